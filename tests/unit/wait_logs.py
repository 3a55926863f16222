"""Logs shaped like SGLang's, by release and number of ranks, with the time of every line."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

START = datetime(2026, 3, 1, 12, 0, 0)
USER_WARNING = (
    "/usr/lib/python3.11/site-packages/sglang/launch_server.py:71: UserWarning: 'python -m "
    "sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint."
)
READY = "The server is fired up and ready to roll!"
FLOOD = (
    "/usr/lib/python3.11/site-packages/torch/_dynamo/variables/functions.py:1598: UserWarning: "
    "torch._dynamo.utils.warn_once(msg)"
)


@dataclass(frozen=True)
class At:
    """``data`` is written ``second`` seconds after the start."""

    second: float
    data: bytes


def old_args(tp: int = 1, **more: object) -> str:
    """The dataclass form of releases up to 0.5.19, with many kilobytes of what nobody needs."""
    values = {
        "model_path": "/models/Llama-3.1-8B",
        "host": "0.0.0.0",
        "port": 30000,
        "api_key": "sk-very-secret-value-0123456789",
        "watchdog_timeout": 300,
        "tp_size": tp,
        "pp_size": 1,
        "dp_size": 1,
        "enable_dp_attention": False,
        "nnodes": 1,
        "node_rank": 0,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/models/draft",
        "skip_server_warmup": False,
        "disaggregation_mode": "null",
    } | more
    filler = ", ".join(f"enable_thing_{i}=None" for i in range(200))
    inner = ", ".join(f"{name}={value!r}" for name, value in values.items())
    return f"server_args=ServerArgs({inner}, {filler}, crash='hit an exception: Traceback')"


def new_args(tp: int = 1, **more: object) -> str:
    """The dict form of later releases."""
    values = {
        "model_path": "/models/Llama-3.1-8B",
        "tp_size": tp,
        "dp_size": 1,
        "attn_dp_size": 1,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/models/draft",
        "skip_server_warmup": False,
        "watchdog_timeout": 300,
    } | more
    return f"server_args={values!r}"


class LogWriter:
    """Collects lines; ``tick`` moves its clock."""

    def __init__(self, tp: int = 1) -> None:
        self.tp = tp
        self.second = 0.0
        self.lines: list[At] = []

    def tick(self, seconds: float) -> LogWriter:
        self.second += seconds
        return self

    def raw(self, text: str | bytes, end: str = "\n") -> LogWriter:
        data = text if isinstance(text, bytes) else text.encode()
        self.lines.append(At(self.second, data + end.encode()))
        return self

    def say(self, message: str, rank: int | None = None, more: str = "") -> LogWriter:
        stamp = (START + timedelta(seconds=int(self.second))).strftime("%Y-%m-%d %H:%M:%S")
        shown = f" TP{rank}" if rank is not None and self.tp > 1 else ""
        return self.raw(f"[{stamp}{shown}{more}] {message}")

    def every_rank(self, message: str) -> LogWriter:
        for rank in range(self.tp):
            self.say(message, rank)
        return self

    def bar(self, text: str) -> LogWriter:
        return self.raw(f"\r{text}", end="")

    def weights(self, kind: str = "LlamaForCausalLM", shards: int = 4) -> LogWriter:
        self.every_rank("Load weight begin. avail mem=78.46 GB")
        for done in range(shards + 1):
            self.tick(5).bar(
                f"Loading safetensors checkpoint shards: {100 * done // shards:3d}% Completed | "
                f"{done}/{shards} [00:0{done}<00:0{shards - done},  1.00it/s]"
            )
        self.raw("")
        return self.every_rank(
            f"Load weight end. elapsed=20.31 s, type={kind}, avail mem=62.1 GB, mem usage=15.0 GB."
        )

    def pool(self) -> LogWriter:
        self.tick(1).every_rank(
            "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 914573, K size: 20.00 GB, "
            "V size: 20.00 GB"
        )
        return self.every_rank("Memory pool end. avail mem=12.03 GB")

    def graphs(self, begin: str, end: str, sizes: int = 4) -> LogWriter:
        self.every_rank(begin)
        for done in range(sizes + 1):
            self.tick(2).bar(
                f"Capturing batches (bs={8 - done} avail_mem=15.31 GB): {25 * done:3d}%|"
                f"███       | {done}/{sizes} [00:0{done}<00:01,  2.00it/s]"
            )
        # The bar has no end of its own: the next record sticks to it.
        return self.every_rank(end)

    def serve(self) -> LogWriter:
        self.say(
            "max_total_num_tokens=914573, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            "max_running_requests=48, context_len=131072, available_gpu_mem=11.50 GB",
            0,
        )
        self.tick(2).say("INFO:     Started server process [4711]")
        self.say("INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)")
        self.tick(1).say('INFO:     127.0.0.1:50000 - "GET /model_info HTTP/1.1" 200 OK')
        self.say('INFO:     127.0.0.1:50001 - "GET /health HTTP/1.1" 503 Service Unavailable')
        self.say("Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.0", 0)
        self.say('INFO:     127.0.0.1:50001 - "GET /health HTTP/1.1" 503 Service Unavailable')
        self.tick(2).say('INFO:     127.0.0.1:50000 - "POST /generate HTTP/1.1" 200 OK')
        return self.say(READY)


def boot_old(tp: int = 1, **args: object) -> LogWriter:
    """A whole boot as 0.5.9-0.5.13 write it: the draft is loaded after the target's graphs."""
    log = LogWriter(tp)
    log.say(old_args(tp, **args)).tick(10)
    log.every_rank("Init torch distributed begin.").tick(1)
    log.every_rank("Init torch distributed ends. elapsed=0.50 s, mem usage=0.10 GB")
    log.weights().pool()
    log.graphs(
        "Capture cuda graph begin. This can take up to several minutes. avail mem=12.03 GB",
        "Capture cuda graph end. Time elapsed: 8.35 s. mem usage=0.50 GB. avail mem=11.5 GB.",
    )
    log.weights("LlamaForCausalLMEagle3", 1).pool()
    log.graphs(
        "Capture draft cuda graph begin. This can take up to several minutes. avail mem=11.03 GB",
        "Capture draft cuda graph end. Time elapsed: 8.35 s. mem usage=0.50 GB. avail mem=11 GB.",
    )
    log.graphs(
        "Capture draft extend cuda graph begin. This can take up to several minutes. avail mem=11",
        "Capture draft extend cuda graph end. Time elapsed: 1.35 s. mem usage=0.1 GB. avail mem=1.",
    )
    return log.serve()


def boot_new(tp: int = 1, **args: object) -> LogWriter:
    """A whole boot as 0.5.21-0.5.23 write it: both models first, then pools, then graphs."""
    log = LogWriter(tp)
    log.raw(USER_WARNING).tick(8).say(new_args(tp, **args)).tick(10)
    log.every_rank("Init parallel begin.").tick(1)
    log.every_rank("Init parallel ends. elapsed=0.05 s")
    log.weights().weights("LlamaForCausalLMEagle3", 1).pool().pool()
    log.graphs(
        "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=9",
        "Capture target verify CUDA graph end. bs=[1, 2, 4, 8], elapsed=8.89 s, mem usage=0.5 GB, "
        "avail mem=8.50 GB.",
    )
    log.graphs(
        "Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=8 GB",
        "Capture draft decode CUDA graph end. bs=[1, 2], elapsed=0.89 s, mem usage=0.5 GB, avail "
        "mem=8.50 GB.",
    )
    return log.serve()


def until(log: LogWriter, words: str, also: bool = True) -> LogWriter:
    """The log up to the first line with ``words`` (``also``: that line too)."""
    cut = LogWriter(log.tp)
    for line in log.lines:
        found = words.encode() in line.data
        if not found or also:
            cut.lines.append(line)
            cut.second = line.second
        if found:
            return cut
    raise AssertionError(f"no line with {words!r}")


NINJA = """Scheduler hit an exception: Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 3170, in run
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/site-packages/flashinfer/jit/cpp_ext.py", line 312, in run_ninja
    subprocess.run(command, check=True)
FileNotFoundError: [Errno 2] No such file or directory: 'ninja'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/flashinfer/jit/core.py", line 100, in build
    raise RuntimeError("Ninja build failed") from error
RuntimeError: Ninja build failed
"""
CLOSED = """Scheduler hit an exception: Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 3170, in run
    scheduler = Scheduler(server_args, port_args)
RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:11223
"""
SIGQUIT = "Received sigquit from a child process. It usually means the child failed."
NCCL = (
    "[rank4]:[E1022 10:27:56.123456789 ProcessGroupNCCL.cpp:616] [Rank 4] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, "
    "Timeout(ms)=600000) ran for 600037 milliseconds before timing out."
)
WATCHDOG = "Scheduler watchdog timeout (self.watchdog_timeout=300.0, self.soft=False)"
UNRECOGNIZED = (
    "launch_server.py: error: unrecognized arguments: --num-speculative-tokens 3 --enforce-eager"
)
HANDLED = """Failed to load plugin other from group sglang.srt.plugins
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/sglang/srt/plugins/__init__.py", line 80, in load
    func = ep.load()
ModuleNotFoundError: No module named 'other.plugin'"""
