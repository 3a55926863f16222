"""What SGLang's log lines mean, as data: phases, milestones, failures, and hints for known causes.

``anchor`` is a literal that every matching line contains. The reader looks for anchors in whole
blocks of bytes and applies a regular expression only to the lines that hold one, so a pattern
must never have a broader regex than its anchor. Since each literal is one more walk over the
block, a *scout* that several anchors contain is looked for first. Regexes are matched at the start
of the message, after all prefixes: prompts and generated text, which `--log-requests` writes into
the log, must not be able to raise an alarm.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Phase(str, enum.Enum):
    """What a boot is busy with. Members are in the usual order, but releases differ:

    up to 0.5.13 the draft is loaded after the target's graphs were captured, from 0.5.14 on
    before the memory pools are made.
    """

    BLIND = "start (no log to read)"
    LOG = "waiting for the log"
    ARGUMENTS = "arguments"
    DISTRIBUTED = "distributed init"
    TARGET_WEIGHTS = "target weights"
    DRAFT_WEIGHTS = "draft weights"
    POOL = "memory pool"
    GRAPHS = "graph capture"
    DRAFT_POOL = "draft memory pool"
    DRAFT_GRAPHS = "draft graph capture"
    HTTP = "HTTP start"
    WARM_UP = "warm-up"
    FIRST_TOKEN = "first token"


class Kind(enum.Enum):
    BOOT = "a process starts"
    ARGS = "the effective arguments"
    BEGIN = "a phase begins"
    END = "one rank has finished a phase"
    BAR = "a progress bar"
    COMPILE = "kernels are compiled or tuned"
    COMPILED = "compiling or tuning has ended"
    PREFETCH = "weights are read into the page cache"
    READY = "SGLang says that it is ready"
    FAILED = "a process has failed; its traceback follows or the line itself is the cause"
    ECHO = "somebody else reports a failure whose cause is elsewhere"
    ENDED = "a process was ended with an exit code"
    HUNG = "SGLang or NCCL found itself hanging"
    SYMPTOM = "looks bad but can pass"
    NOTE = "worth telling, no reason to stop"
    TRACEBACK = "a traceback without a line of SGLang that explains it"


@dataclass(frozen=True)
class LinePattern:
    kind: Kind
    anchor: bytes
    regex: re.Pattern[str]
    phase: Phase | None = None
    releases: str = "0.5.9-0.5.23"


def _p(
    kind: Kind,
    anchor: str,
    regex: str,
    phase: Phase | None = None,
    releases: str = "0.5.9-0.5.23",
) -> LinePattern:
    return LinePattern(kind, anchor.encode(), re.compile(regex), phase, releases)


TRACEBACK_HEAD = "Traceback (most recent call last):"

STOPPING = b"Gracefully exit"  # after this the end of the process is no crash

# The first pattern that matches a line decides. `server_args=` stays first: that line is many
# kilobytes long and names half of the words below.
PATTERNS: tuple[LinePattern, ...] = (
    _p(Kind.ARGS, "server_args=", r"server_args=(?:ServerArgs\(|\{)"),
    _p(
        Kind.BOOT,
        "sglang.launch_server' is",
        r".*UserWarning: 'python -m sglang\.launch_server' is still supported",
        releases="0.5.10-0.5.23",
    ),
    # --- phases -------------------------------------------------------------------------------
    _p(
        Kind.BEGIN,
        " begin.",
        r"Init torch distributed begin\.",
        Phase.DISTRIBUTED,
        "0.5.9-0.5.20",
    ),
    _p(Kind.BEGIN, " begin.", r"Init parallel begin\.", Phase.DISTRIBUTED, "0.5.21-0.5.23"),
    _p(Kind.BEGIN, " begin.", r"Load weight begin\.", Phase.TARGET_WEIGHTS),
    _p(Kind.END, " end. ", r"Load weight end\. ", Phase.TARGET_WEIGHTS),
    _p(Kind.BEGIN, "KV Cache is", r"KV Cache is allocated\.", Phase.POOL),
    _p(Kind.END, " end. ", r"Memory pool end\. ", Phase.POOL),
    _p(
        Kind.BEGIN,
        " begin.",
        r"Capture (?:draft|Frozen-KV MTP draft)[\w ]* graph begin",
        Phase.DRAFT_GRAPHS,
    ),
    _p(Kind.END, " end. ", r"Capture draft[\w ]* graph end\. ", Phase.DRAFT_GRAPHS),
    _p(Kind.BEGIN, " begin.", r"Capture [\w ]*graph begin", Phase.GRAPHS),
    _p(Kind.END, " end. ", r"Capture [\w ]*graph end\. ", Phase.GRAPHS),
    _p(Kind.BEGIN, "max_total_num_tokens=", r"max_total_num_tokens=\d+, ", Phase.HTTP),
    _p(
        Kind.BEGIN,
        "Uvicorn running",
        r"(?:INFO:\s+)?Uvicorn running on (?P<url>https?://\S+)",
        Phase.WARM_UP,
    ),
    _p(Kind.READY, "ready to roll", r"The server is fired up and ready to roll!"),
    # --- progress inside a phase --------------------------------------------------------------
    _p(
        Kind.BAR,
        "Completed | ",
        r"(?P<what>Multi-thread loading|Loading)[\w ]*shards:\s*\d+% Completed \| "
        r"(?P<done>\d+)/(?P<total>\d+) ",
        Phase.TARGET_WEIGHTS,
    ),
    _p(
        Kind.BAR,
        "Loading safetensors using",
        r"Loading safetensors using [\w ]+:\s*\d+%.*?\| *(?P<done>\d+)/(?P<total>\d+) ",
        Phase.TARGET_WEIGHTS,
    ),
    _p(
        Kind.BAR,
        "Capturing ",
        r"Capturing (?:batches|num tokens|prefill shape)[^|]*?\d+%\|.*?\| *"
        r"(?P<done>\d+)/(?P<total>\d+) ",
        Phase.GRAPHS,
    ),
    _p(Kind.COMPILE, "DeepGEMM JIT", r"Entering (?P<what>DeepGEMM JIT) Pre-Compile session"),
    _p(Kind.COMPILE, "DeepGEMM JIT", r"Try (?P<what>DeepGEMM JIT) Compiling for"),
    _p(Kind.COMPILE, "Loading JIT ops", r"(?:.*flashinfer\.jit: )?(?P<what>Loading JIT ops)"),
    _p(Kind.COMPILE, "utotune", r"Running (?P<what>FlashInfer autotune)"),
    _p(Kind.COMPILED, "utotune", r"FlashInfer autotune completed"),
    _p(Kind.PREFETCH, "refetching ", r"Rank \d+: prefetching \d+/\d+ checkpoint shards"),
    # --- the end, with a cause ----------------------------------------------------------------
    _p(
        Kind.FAILED,
        "hit an exception",
        r"(?P<who>Scheduler|DataParallelController|DetokenizerManager|TokenizerManager"
        r"|Multi(?:Tokenizer|Detokenizer)Router|GrpcRequestManager) hit an exception",
    ),
    _p(
        Kind.FAILED,
        "nitialization failed. warmup error",
        r"Initialization failed\. warmup error:",
    ),
    _p(Kind.FAILED, "Fatal Python error", r"Fatal Python error: (?P<cause>.*)"),
    _p(
        Kind.FAILED,
        ": error: ",
        # argparse, in lower case and after a long usage text. Compilers and ninja write
        # `error:` too, so only the parser's own sentences count.
        r"(?:[\w./-]+\.py|sglang(?: \w+)?|__main__\.py): error: "
        r"(?P<cause>(?:unrecognized arguments|argument |ambiguous option|the following arguments"
        r"|one of the arguments|expected ).*)",
    ),
    _p(
        Kind.FAILED,
        " error while attempting to bind",
        r"(?:ERROR:\s+)?(?P<cause>\[Errno \d+\] error while attempting to bind on address .*)",
    ),
    # --- the end, seen from somewhere else ----------------------------------------------------
    _p(Kind.ECHO, "eceived sigquit from", r"Received sigquit from a child proces"),
    _p(Kind.ECHO, "SIGQUIT received", r"SIGQUIT received\."),
    _p(Kind.ECHO, "cheduler is dead", r"Rank (?P<number>\d+) scheduler is dead", releases="0.5.9"),
    _p(
        Kind.ECHO,
        "xit code",
        r"(?:RuntimeError: )?Rank (?P<number>\d+) scheduler died during initialization "
        r"\(exit code: (?P<code>-?\d+)\)",
        releases="0.5.10-0.5.23",
    ),
    _p(
        Kind.ENDED,
        "xit code",
        r"Subprocess (?P<who>\S+) \(pid=(?P<pid>\d+)\) crashed with exit code (?P<code>-?\d+)",
        releases="0.5.10-0.5.23",
    ),
    _p(Kind.ENDED, "xit code", r"Exit code: (?P<code>-?\d+)", releases="0.5.9"),
    _p(
        Kind.ENDED,
        "cheduler or DataParallelController ",
        r"Scheduler or DataParallelController (?P<pid>\d+) terminated with (?P<code>-?\d+)",
    ),
    # --- hanging ------------------------------------------------------------------------------
    _p(
        Kind.HUNG,
        "atchdog ",
        r"(?:\w+ )?[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<seconds>[\d.]+)"
        r"(?:, self\.soft=(?P<soft>True|False))?",
    ),
    _p(
        Kind.HUNG,
        "atchdog ",
        r"(?:\[\w[^\]]*\]\s*)*(?:\[Rank (?P<number>\d+)\] )?Watchdog caught "
        r"(?P<cause>collective operation timeout: .*)",
    ),
    _p(Kind.SYMPTOM, "Health check failed", r"Health check failed\. Server couldn't get"),
    _p(Kind.SYMPTOM, "could finish the", r"TP rank (?P<number>\d+) could finish the model loading"),
    # --- other things an operator wants to know -----------------------------------------------
    _p(
        Kind.NOTE,
        "ailed to load plugin",
        r"Failed to load plugin (?P<what>\S+)",
        releases="0.5.11-0.5.23",
    ),
    _p(
        Kind.NOTE,
        "ailed to execute general plugin",
        r"Failed to execute general plugin",
        releases="0.5.11-0.5.23",
    ),
    _p(Kind.NOTE, "spec-ext active", r"spec-ext active: "),
    _p(Kind.NOTE, STOPPING.decode(), r"Gracefully exiting\.\.\."),
    _p(Kind.TRACEBACK, "Traceback (most", re.escape(TRACEBACK_HEAD)),
)

ANCHORS: tuple[bytes, ...] = tuple(dict.fromkeys(pattern.anchor for pattern in PATTERNS))
# Bytes that no anchor has: without them a text still holds every anchor that it held.
IN_NO_ANCHOR = bytes(set(range(256)) - set(b"".join(ANCHORS)))

_AFTER_READY = frozenset(
    {
        Kind.ARGS,
        Kind.BOOT,
        Kind.FAILED,
        Kind.ECHO,
        Kind.ENDED,
        Kind.HUNG,
        Kind.SYMPTOM,
        Kind.TRACEBACK,
    }
)
# A server that serves writes megabytes; only a failure or a restart matters from there on.
ANCHORS_AFTER_READY: tuple[bytes, ...] = tuple(
    dict.fromkeys(p.anchor for p in PATTERNS if p.kind in _AFTER_READY or p.anchor == STOPPING)
)


@dataclass(frozen=True)
class Scout:
    """A literal to look for before its anchors; ``rare`` is the rarest of its bytes."""

    literal: bytes
    rare: bytes
    anchors: tuple[bytes, ...]


_BARS = frozenset(pattern.anchor for pattern in PATTERNS if pattern.kind is Kind.BAR)
# Literals that several anchors contain.
_SHARED = (b" error", b"ailed", b"xit code")
_RARE = b"|QJZXKVYGUWHq'(=_zjDMFLCBRSxkvw"  # in logs, roughly


def scouted(anchors: tuple[bytes, ...]) -> tuple[Scout, ...]:
    """What to look for first: every line that holds an anchor holds its scout."""
    found: dict[bytes, tuple[bytes, ...]] = {}
    for anchor in anchors:
        literal = b"|" if anchor in _BARS else next((s for s in _SHARED if s in anchor), anchor)
        found[literal] = (*found.get(literal, ()), anchor)
    return tuple(Scout(literal, _rarest(literal), under) for literal, under in found.items())


def _rarest(literal: bytes) -> bytes:
    return bytes([next((byte for byte in _RARE if byte in literal), literal[-1])])


# Of these the newest of a row says all that those before it said.
_NEWEST_COUNTS = (Kind.BAR, Kind.COMPILE, Kind.SYMPTOM)
NEWEST_COUNTS: frozenset[bytes] = frozenset(
    p.anchor for p in PATTERNS if p.kind in _NEWEST_COUNTS
) - frozenset(p.anchor for p in PATTERNS if p.kind not in _NEWEST_COUNTS)
# A server that only says these does not move on.
SYMPTOMS: tuple[bytes, ...] = tuple(p.anchor for p in PATTERNS if p.kind is Kind.SYMPTOM)
TRACEBACK_ANCHOR = PATTERNS[-1].anchor


def classify(message: str) -> tuple[LinePattern, re.Match[str]] | None:
    """The pattern of one message without prefixes, or None."""
    for pattern in PATTERNS:
        found = pattern.regex.match(message)
        if found is not None:
            return pattern, found
    return None


# Lines that a healthy server writes all the time: no news and no sign of life, since the access log
# also records our own health checks. The second form is of lines whose digits were taken out.
_ROUTINE = rb"(?:Decode batch|Prefill batch|INFO: +[^ \n]+ - \"|Receive: |Finish: )"
ROUTINE_LINE = re.compile(rb"[^\n]{0,80}?\[[\d-]{10} [^\]\n]{8,60}\] " + _ROUTINE)
ROUTINE_KIND = re.compile(rb"[^\[{]{0,80}\[-- ::[^\]]{0,50}\] " + _ROUTINE)
# Lines of `--log-requests`: what users wrote stands in them, and nothing of it is a record.
USERS_TEXT = re.compile(r"(?:Receive|Finish): ")

# Tracebacks under these headings are handled by SGLang and end nothing.
HANDLED_TRACEBACK = re.compile(
    r"Failed to load plugin|Failed to execute general plugin|Ignore import error|"
    r".*\bfreeze_gc failed|.*falling back|.*[Ii]gnor(?:ed|ing)\b"
)

# Exceptions of ranks that lost their partner: never the first cause while there is another one.
ECHO_EXCEPTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|EOFError"
    r"|scheduler died during initialization|Initialization failed\. Please see"
    r"|remote process exited|NCCL error.*(?:remote|unhandled system)|ncclRemoteError"
    r"|Rank \d+ scheduler is dead|failed to recv, got 0 bytes|Socket Timeout"
    r"|process .* terminated with signal"
)


@dataclass(frozen=True)
class Hint:
    """``advice`` is what to do when ``regex`` is found in the cause or its traceback."""

    regex: re.Pattern[str]
    advice: str


def _h(regex: str, advice: str) -> Hint:
    return Hint(re.compile(regex), advice)


HINTS: tuple[Hint, ...] = (
    _h(
        r"No such file or directory: '(?:\S*/)?ninja'|[Nn]inja is required",
        "ninja is not on PATH in the server's environment: `pip install ninja`, or activate the "
        "environment instead of calling its python by path",
    ),
    _h(
        r"No such file or directory: '(?:\S*/)?nvcc'|[Cc]ould not find nvcc|CUDA_HOME",
        "kernels must be compiled but there is no CUDA toolkit: install it and set CUDA_HOME and "
        "PATH, or use an image that has it",
    ),
    _h(
        r"zmq\.error\.ZMQError: Address already in use|ZMQError.*in use",
        "another server, or what is left of one, holds the port that SGLang uses between its "
        "processes: find it with `pgrep -fa sglang`, or set other --port / --nccl-port values",
    ),
    _h(
        r"error while attempting to bind|\[Errno 98\]|[Aa]ddress already in use|EADDRINUSE",
        "the port is taken: find its owner with `ss -ltnp`, or choose another --port",
    ),
    _h(
        r"couldn't connect to 'https://huggingface|LocalEntryNotFoundError|OfflineModeIsEnabled"
        r"|Temporary failure in name resolution|Max retries exceeded.*huggingface",
        "the model is not on this box and the hub cannot be reached: give a local directory, "
        "pre-download it, or set HF_ENDPOINT / HF_HOME",
    ),
    _h(
        r"GatedRepoError|401 Client Error|403 Client Error|Access to model .* is restricted",
        "the hub refuses this model: accept its licence and log in with a token that may read it",
    ),
    _h(
        r"does not appear to have a file named config\.json|is not a valid model identifier"
        r"|Repo id must be in the form|RepositoryNotFoundError",
        "the model path is wrong: it is neither a local directory nor a name on the hub",
    ),
    _h(
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "the weights leave no room for the KV cache: raise --mem-fraction-static, use more GPUs "
        "(--tp), a smaller draft, or free the GPU of other processes",
    ),
    _h(
        r"Capture \w+ graph failed: .*out of memory|Capture cuda graph failed: CUDA out of memory",
        "graph capture ran out of memory: lower --mem-fraction-static or --cuda-graph-max-bs; a "
        "batch threshold also lowers how many graphs are needed",
    ),
    _h(
        r"cudaErrorStreamCaptureUnsupported|operation not permitted when stream is capturing",
        "something in the step cannot be captured: try another attention backend or "
        "--disable-cuda-graph to find out which",
    ),
    _h(
        r"CUDA out of memory|OutOfMemoryError|HIP out of memory",
        "the GPU is full: see what else runs there with nvidia-smi, lower --mem-fraction-static "
        "or --cuda-graph-max-bs, or spread the model with --tp",
    ),
    _h(
        r"unrecognized arguments: .*--speculative-(?:disable-batch|resume-batch|min-steps)",
        "the sglang-spec-ext plugin is not loaded in this process: check SGLANG_PLUGINS, and "
        "that both packages are installed in the server's environment",
    ),
    _h(
        r"unrecognized arguments:|ambiguous option|error: argument|expected one argument",
        "this release does not know the command line: `sglang-spec-ext preflight -- <command>` "
        "names the right flags",
    ),
    _h(
        r"Unsupported config option|Multiple config files|Config file (?:not found|must)"
        r"|No config file specified",
        "SGLang does not take the file of --config: `sglang-spec-ext preflight -- <command>` names "
        "the key and the way to write it",
    ),
    _h(
        r"set_eagle3_layers_to_capture|capture_aux_hidden_states|get_embed_and_head",
        "this model class has no EAGLE-3 hook in this release: use a newer SGLang, or the hooks "
        "and patches of sglang-spec-ext",
    ),
    _h(
        r"'>' not supported between instances of 'NoneType' and 'int'",
        "set --speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens together or not at all",
    ),
    _h(
        r"selected index k out of range|Sizes of tensors must match except in dimension 1",
        "the speculative values do not fit each other or this worker: "
        "`sglang-spec-ext preflight -- <command>` computes what fits",
    ),
    _h(
        r"set_embed\b|hot_token_id",
        "the draft model is missing or is no draft: give --speculative-draft-model-path and run "
        "`sglang-spec-ext check-draft`",
    ),
    _h(
        r"shape '?\[?.*32000|size mismatch for|The size of tensor a .* must match the size of "
        r"tensor b",
        "target and draft do not fit each other: run `sglang-spec-ext check-draft`",
    ),
    _h(
        r"SafetensorError|MetadataIncompleteBuffer|HeaderTooLarge|InvalidHeader",
        "a weight file is damaged or half downloaded: compare sizes and checksums with the "
        "source and fetch it again",
    ),
    _h(
        r"No space left on device",
        "a disk is full; also look at /dev/shm (containers: --shm-size or --ipc=host) and the "
        "kernel caches under the home directory",
    ),
    _h(
        r"Bus error|bus error|unable to open shared memory|/dev/shm",
        "shared memory is too small: run the container with --shm-size 32g or --ipc=host",
    ),
    _h(
        r"no kernel image is available|PTXAS error|sm_\d+.*not (?:compatible|supported)",
        "the kernels were built for other GPUs than this one: install the build for its "
        "architecture",
    ),
    _h(
        r"CUDA driver version is insufficient|driver .* too old|cudaErrorInsufficientDriver",
        "the GPU driver is older than this CUDA build needs: update it or use an older image",
    ),
    _h(
        r"No accelerator .*(?:available|found)|No CUDA GPUs are available|Found no NVIDIA driver"
        r"|not compiled with CUDA enabled",
        "this process sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's "
        "--gpus",
    ),
    _h(
        r"undefined symbol|cannot open shared object file|version `\w+' not found",
        "a compiled package does not fit the installed torch or CUDA: reinstall sglang, torch and "
        "kernels as one set",
    ),
    _h(
        r"Transformers does not recognize this architecture|Unrecognized configuration class"
        r"|Model architectures .* are not supported",
        "this release does not know the model: use a newer SGLang and transformers, or another "
        "checkpoint",
    ),
    _h(
        r"trust_remote_code",
        "the model brings its own code: add --trust-remote-code if you trust it",
    ),
    _h(
        r"device-side assert|Assertion `.*(?:inf|nan|ind >= ?0)",
        "a kernel read outside its buffer or met inf/nan: start with CUDA_LAUNCH_BLOCKING=1 to "
        "see where; with EAGLE-3 check token ids above the draft's vocabulary",
    ),
    _h(
        r"memory leak detected!",
        "SGLang's KV bookkeeping does not add up: note the numbers; a combination of features in "
        "this release leaks slots",
    ),
    _h(
        r"NCCL (?:error|failure)|ncclUnhandledCudaError|ncclSystemError|ncclInternalError",
        "NCCL could not talk between the ranks: start with NCCL_DEBUG=INFO, check NVLink/IB, "
        "NCCL_SOCKET_IFNAME and shared memory",
    ),
    _h(r"Too many open files", "raise the limit: `ulimit -n 65536` before the start"),
    _h(
        r"Fatal Python error: Segmentation fault|exit code:? -11",
        "a native extension crashed: the frames above name the call; start with "
        "--disable-cuda-graph to see whether it is a replayed graph",
    ),
    _h(
        r"exit code:? -9|Killed",
        "killed from outside, usually by the OOM killer: `dmesg -T | grep -i oom`, the "
        "container's memory limit, and how many ranks load the weights at once",
    ),
    _h(
        r"exit code:? -15|Gracefully exiting",
        "somebody stopped it (SIGTERM): an operator, a scheduler or a restart policy; no crash "
        "of SGLang's own",
    ),
    _h(
        r"Watchdog caught collective operation timeout",
        "one rank did not reach a collective that the others wait in: look for the rank that "
        "failed or is busy elsewhere; start with NCCL_DEBUG=INFO and TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    _h(
        r"watchdog timeout",
        "one step took longer than --watchdog-timeout: the py-spy dump in the log shows where; "
        "the first requests may compile kernels, then raise --watchdog-timeout",
    ),
)


def hint_for(text: str) -> str:
    """Advice for a known cause; empty when there is none."""
    return next((hint.advice for hint in HINTS if hint.regex.search(text)), "")
