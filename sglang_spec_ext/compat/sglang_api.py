"""The calls into SGLang whose form differs between releases, each in one function.

Every function decides by what it finds (a contract's place, a parameter name), never by a version.
Imported only where SGLang's serving code is: it needs torch.
"""

from __future__ import annotations

import copy
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_spec_ext.compat import workers
from sglang_spec_ext.compat.contracts import TouchPoint


@cache
def resolve(name: str) -> Any:
    """The object behind touch point ``name`` in the installed release.

    Raises:
        LookupError: no place of that name holds; the contract check should have caught it.
    """
    point = _place(name)
    return pkgutil.resolve_name(f"{point.module}:{point.qualname}")


@cache
def _place(name: str) -> TouchPoint:
    point = workers.holding(name)
    if point is None:
        raise LookupError(f"no place of touch point {name!r} holds in the installed SGLang")
    return point


def target_forward(target_worker: Any, batch: Any, hidden_mode: Any) -> Any:
    """The target's forward and sampling of ``batch``; its hidden states by ``hidden_mode``.

    Args:
        batch: consumed: a release that has the mode on the batch takes it off again.
    """
    if _place("hidden_mode_of_forward").kind == "attribute":
        batch.capture_hidden_mode = hidden_mode
        return target_worker.forward_batch_generation(batch)
    return target_worker.forward_batch_generation(batch, capture_hidden_mode=hidden_mode)


def prefill_lengths(batch: Any) -> list[int]:
    """Tokens that each request of a prefill brings: an older worker gets a batch of its own."""
    lengths: list[int] = (
        batch.extend_lens if hasattr(batch, "extend_lens") else batch.extend_seq_lens
    )
    return lengths


def attach_lengths(result: Any, lengths: torch.Tensor) -> None:
    """Leave the new sequence lengths where the scheduler looks for them after the step.

    Args:
        result: of the step, with its next draft input.
        lengths: [batch] int64.
    """
    if _place("new_lengths").qualname == "EagleDraftInput.verify_done":
        result.next_draft_input.new_seq_lens = lengths
        result.next_draft_input.verify_done = torch.get_device_module(lengths.device).Event()
        result.next_draft_input.verify_done.record()
        return
    result.new_seq_lens = lengths


def bonus_tokens(draft_input: Any) -> torch.Tensor:
    """[batch], the last committed token of each request, which no forward has consumed yet."""
    tokens: torch.Tensor = getattr(draft_input, bonus_field(draft_input))
    return tokens


def bonus_field(draft_input: Any) -> str:
    """The field of a draft input, or of its class, with these tokens."""
    return "bonus_tokens" if hasattr(draft_input, "bonus_tokens") else "verified_id"


def one_token_per_request(result: Any, verify_width: int) -> None:
    """Let the scheduler find the tokens of a step that has one per request.

    Args:
        result: of the step; its ``next_token_ids`` are [batch].
        verify_width: tokens per request that a verify has.
    """
    if _place("stride").kind == "attribute":
        result.speculative_num_draft_tokens = 1
        return
    # it looks for each request's tokens at a multiple of the width
    result.next_token_ids = result.next_token_ids[:, None].expand(-1, verify_width).flatten()


class SharedReads:
    """When a step without a draft is done with the request pool, told to the scheduler.

    The scheduler prepares the next step beside a forward, on a stream of its own, and writes to the
    request pool only when an event says that the forward has read it: a graph runner records that
    right after its inputs. It is kept on the runner that ran, and asked for at the one that runs
    last in a speculating step, the draft's. Without it the scheduler waits for the whole forward.

    Args:
        worker: SGLang's spec-v2 worker.
    """

    def __init__(self, worker: Any) -> None:
        asked = _place("last_shared_read").qualname.rpartition(".")[2]
        self._event = {
            "war_fastpath_runner": "war_fastpath_read_done_event",
            "last_shared_read_runner": "shared_read_done_event",
        }.get(asked)  # up to 0.5.13.post1 every forward is waited for
        if self._event is not None:
            self._target, self._asked = worker.target_worker.model_runner, getattr(worker, asked)
            for runner in (self._target, self._asked):
                getattr(runner, self._event)  # else the server stops here, and not at a switch

    @contextmanager
    def end_with_target(self) -> Iterator[None]:
        """Around a forward of the target after which nothing reads the request pool."""
        if self._event is None:
            yield
            return
        setattr(self._target, self._event, None)  # what an earlier forward left says nothing
        yield
        done = getattr(self._target, self._event)
        setattr(self._target, self._event, None)
        setattr(self._asked, self._event, done)


class Relay:
    """What SGLang's overlap schedule hands from each step to the next one, a row per request.

    Beside the tokens these are the draft's proposals and its hidden state. Some algorithms have
    less, and the scheduler's ``FutureMap`` keeps in fields of its own what there is. With them off
    it takes, and gives the next step, what that of a server without speculation does. From 0.5.22
    on its ``stash`` leaves out by itself what a step lacks; once that is the oldest release with
    the fields, ``take_all`` and they can go.

    Args:
        future_map: of the scheduler, with such fields.
    """

    _FIELDS = ("need_topk", "need_hidden_states")

    def __init__(self, future_map: Any) -> None:
        self._future_map = future_map
        self._left_out: dict[str, bool] = {}

    @classmethod
    def of(cls, scheduler: Any) -> Relay | None:
        """None where no step goes through a relay, or through one without these fields."""
        if not scheduler.enable_overlap or _place("relay").kind != "field":
            return None
        return cls(scheduler.future_map)

    def take_tokens(self) -> bool:
        """Take no more than the tokens of this step; False if that cannot be."""
        if not self._left_out:
            # some releases set the fields with the first step, whose rows they are sized by
            if not hasattr(self._future_map, self._FIELDS[0]):
                return False
            self._left_out = {name: getattr(self._future_map, name) for name in self._FIELDS}
        for name in self._left_out:
            setattr(self._future_map, name, False)
        return True

    def take_all(self) -> None:
        """Take everything of the steps that come."""
        for name, needed in self._left_out.items():
            setattr(self._future_map, name, needed)
        self._left_out = {}


@contextmanager
def draft_contexts(draft_worker: Any) -> Iterator[None]:
    """The contexts in which SGLang itself runs the draft: its TP group, its MoE backends."""
    tp_context: Callable[..., Any] = getattr(
        draft_worker, "draft_tp_context", resolve("draft_tp_context")
    )
    known = {
        "layout": lambda: draft_worker.parallel_layout,  # 0.5.23
        "owns_attention": lambda: draft_worker.draft_owns_attention,  # 0.5.21, 0.5.22
        "tp_group": lambda: draft_worker.draft_runner.tp_group,  # up to 0.5.21
    }
    arguments = {name: known[name]() for name in _tp_context_parameters()}
    with ExitStack() as stack:
        if "tp_group" in arguments:
            # up to 0.5.21 the worker may hold a null context whose parameter has another name
            stack.enter_context(tp_context(arguments.pop("tp_group"), **arguments))
        else:
            stack.enter_context(tp_context(**arguments))
        stack.enter_context(resolve("moe_backend_context")())
        stack.enter_context(resolve("moe_a2a_context")())
        yield


@cache
def _tp_context_parameters() -> tuple[str, ...]:
    return tuple(inspect.signature(resolve("draft_tp_context")).parameters)


def write_kv(
    pool: Any, attention: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Store K and V of one token per slot, in the pool's own dtype and scales.

    Args:
        pool: a plain MHA pool (see ``plain_mha_pool``).
        attention: the layer's RadixAttention (layer id, k_scale, v_scale).
        slots: [tokens] int64.
        k, v: [tokens, kv heads, head dim].
    """
    location: Any = slots
    if _place("kv_write_location").qualname == "KVWriteLoc":
        location = resolve("kv_write_location")(slots, None)
    if attention.k_scale is None:
        pool.set_kv_buffer(attention, location, k, v)
    else:
        pool.set_kv_buffer(attention, location, k, v, attention.k_scale, attention.v_scale)


def plain_mha_pool(pool: Any) -> bool:
    """Whether slots of ``req_to_token`` index this pool's K and V as they are."""
    return type(pool) is resolve("mha_pool")


def plain_weight(projection: Any) -> bool:
    """Whether a linear layer is ``weight @ input`` and no more: not quantized, packed or biased."""
    return (
        type(projection.quant_method) is resolve("unquantized_linear")
        and projection.bias is None
        and not getattr(projection, "use_intel_amx_backend", False)
    )


def copies_draft_kv(worker: Any) -> bool:
    """Whether the draft's KV is read between the worker's forwards: HiCache copies it to the host
    as soon as a request has finished."""
    return bool(resolved(worker.server_args).enable_hierarchical_cache)


def keeps_recurrent_state(req_to_token_pool: Any) -> bool:
    """Whether the target has Mamba or linear-attention layers, whose state verify commits."""
    return isinstance(req_to_token_pool, resolve("hybrid_request_pool"))


def recurrent_hidden(draft_worker: Any) -> tuple[int | None, torch.dtype]:
    """Width and dtype of the hidden state that the draft hands from step to step; no width where
    it hands none on, and reads none of the target."""
    place = _place("recurrent_hidden_spec").qualname
    if place == "EagleDraftInput.hidden_size_for":
        draft_input = resolve("draft_input")
        return draft_input.hidden_size_for(draft_worker), draft_input.dtype_for(draft_worker)
    if place == "EagleDraftInput.verified_id":  # the relay to the next step stores all of it
        config = draft_worker.draft_runner.model_config
        return config.spec_hidden_size, config.dtype
    width, dtype = resolve("recurrent_hidden_spec")(draft_worker.draft_runner)
    return width, dtype


def resolved(server_args: Any) -> Any:
    """A view of the arguments with everything that SGLang decided about them so far."""
    view = getattr(_speculative_hook(), "resolving_view", None)
    return server_args if view is None else view(server_args)


def decide(server_args: Any, **fields: Any) -> None:
    """Set arguments during SGLang's own resolution of them, the way that it does."""
    declare = getattr(_speculative_hook(), "declare_resolution", None)
    if declare is not None:
        declare(server_args, "sglang_spec_ext", **fields)
        return
    for name, value in fields.items():
        setattr(server_args, name, value)


def metrics_collector(scheduler: Any) -> Any | None:
    """SGLang's Prometheus collector, None in a scheduler process that reports no metrics."""
    if _place("metrics_collector").kind == "attribute":
        context = scheduler.metrics_collector_context
        return context.collector if context.current_scheduler_metrics_enabled else None
    # up to 0.5.12 the scheduler itself holds it
    enabled = scheduler.enable_metrics and scheduler.current_scheduler_metrics_enabled
    return scheduler.metrics_collector if enabled else None


def internal_state_answer(updated: bool) -> Any:
    """What a scheduler answers to a request to change its state."""
    answer = resolve("internal_state_answer")
    # up to 0.5.15 the answer also holds all arguments, which nobody reads
    more: dict[str, Any] = {"server_args": {}} if "server_args" in answer.__annotations__ else {}
    return answer(updated=updated, **more)


def _speculative_hook() -> Any:
    # where the arguments resolve themselves there is no such module, and nothing to ask it for
    try:
        from sglang.srt.arg_groups import speculative_hook
    except ImportError:
        return None
    return speculative_hook


def decode_graph_runner(target_runner: Any) -> Any | None:
    """The target's CUDA graph runner for decode and verify, None where it runs eager."""
    runner = getattr(target_runner, _graph_runner_attribute(), None)
    return runner if hasattr(runner, "capture_bs") and target_runner.device == "cuda" else None


def _graph_runner_attribute() -> str:
    modern = _place("decode_graph_runner").qualname == "DecodeCudaGraphRunner"
    return "decode_cuda_graph_runner" if modern else "graph_runner"


@contextmanager
def decoding_on(target_runner: Any, backend: Any, graph_runner: Any) -> Iterator[None]:
    """Let the target's decodes run on another attention backend and its graphs."""
    attribute = _graph_runner_attribute()
    with (
        _set(target_runner, "attn_backend", backend),
        _set(target_runner, attribute, graph_runner),
    ):
        yield


def capture_plain_decode(target_runner: Any, hidden_mode: Any) -> tuple[Any, Any]:
    """Capture decode graphs of a speculative server's target as if it never speculated.

    Returns:
        The new attention backend and the graph runner captured on it.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner_class: Any = type(decode_graph_runner(target_runner))
    with ExitStack() as stack:
        workspace = target_runner.init_new_workspace
        stack.enter_context(_set(target_runner, "init_new_workspace", workspace))
        backend = target_runner._get_attention_backend(init_new_workspace=True)
        # the runner decides by these whether it captures DECODE or TARGET_VERIFY, on what
        # backend, and whether hidden states come out
        stack.enter_context(_set(target_runner, "spec_algorithm", SpeculativeAlgorithm.NONE))
        stack.enter_context(_set(target_runner, "attn_backend", backend))
        stack.enter_context(_graphs_return(target_runner, hidden_mode))
        if hasattr(target_runner, "graph_shared_output"):
            # sized for the batch sizes of a plain server; the verify graphs may need fewer rows
            plain = resolve("graph_output")(target_runner)
            stack.enter_context(_set(target_runner, "graph_shared_output", plain))
        options = {
            "attn_backend": backend,
            "speculative_num_steps": 0,
            "speculative_num_draft_tokens": 1,
        }
        if len(inspect.signature(runner_class).parameters) == 1:
            options = {}  # the first releases read all of it off the target's runner
        runner = runner_class(target_runner, **options)
    return backend, runner


def plain_graph_sizes(server_args: Any, sizes: list[int]) -> list[int]:
    """Those of the captured batch sizes that SGLang captures where it does not speculate.

    Where it speculates it captures nearly twice as many, to pad less of a step that is dear. Sizes
    that the user named are not its own choice, and all stay.

    Args:
        server_args: of the speculative server.
        sizes: ascending, not empty; for a server that speculates.
    """
    speculates = resolved(server_args).speculative_algorithm
    if _generated_sizes(server_args, speculates, sizes[-1]) != sizes:
        return sizes
    return _generated_sizes(server_args, None, sizes[-1])


def _generated_sizes(server_args: Any, algorithm: Any, largest: int) -> list[int]:
    # up to 0.5.13.post1 the largest is one more of the server's arguments
    arguments = _Otherwise(
        resolved(server_args), speculative_algorithm=algorithm, cuda_graph_max_bs=largest
    )
    takes_largest = "max_bs" in (_place("generated_sizes").parameters or ())
    generate: Callable[..., list[int]] = resolve("generated_sizes")
    return generate(arguments, largest) if takes_largest else generate(arguments)


class _Otherwise:
    """Arguments of the server, some with another value; the record itself may be sealed."""

    def __init__(self, arguments: Any, **others: Any) -> None:
        self.__dict__.update(others, _arguments=arguments, _resolved_overrides=())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arguments, name)


@contextmanager
def _graphs_return(target_runner: Any, hidden_mode: Any) -> Iterator[None]:
    """What a graph runner that is made meanwhile returns of the hidden states."""
    if _place("hidden_states_mode").qualname == "get_server_return_hidden_states_mode":
        from sglang.srt.model_executor.runner import base_runner

        with _set(base_runner, "get_server_return_hidden_states_mode", lambda *_: hidden_mode):
            yield
        return
    # a flag of the server decides between all of them and none
    arguments = copy.copy(target_runner.server_args)
    if hidden_mode.is_full():
        object.__setattr__(arguments, "enable_return_hidden_states", True)  # sealed, but ours
    with _set(target_runner, "server_args", arguments):
        yield


@contextmanager
def _set(target: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of one attribute for a while."""
    kept = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, kept)


def graph_capture() -> Any:
    """SGLang's context around the capture of CUDA graphs; yields an object with ``stream``."""
    return resolve("graph_capture")()


@dataclass(frozen=True)
class CaptureRequest:
    """Which hidden states the target is to capture.

    Attributes:
        algorithm: EAGLE3 or DFLASH.
        captures: False for a draft that reads the last hidden state only.
        layers: by their outputs; None for SGLang's three default ones.
        draft: directory or name of the draft.
    """

    algorithm: str
    captures: bool
    layers: Sequence[int] | None
    draft: str | None


def capture_request(runner: Any) -> CaptureRequest | None:
    """What a ``ModelRunner`` is about to ask of its target; None for drafts and other servers."""
    algorithm = runner.spec_algorithm
    if runner.is_draft_worker:
        return None
    # up to 0.5.15 the runner itself holds these fields
    config = getattr(runner, "spec_aux_config", runner)
    draft = getattr(resolved(runner.server_args), "speculative_draft_model_path", None)
    if algorithm.is_eagle3():
        layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
        return CaptureRequest("EAGLE3", bool(config.eagle_use_aux_hidden_state), layers, draft)
    if hasattr(algorithm, "is_dflash") and algorithm.is_dflash():
        return CaptureRequest("DFLASH", True, config.dflash_target_layer_ids, draft)
    return None


def target_class(runner: Any) -> type:
    """The class that a ``ModelRunner`` is about to load."""
    found: type = resolve("model_architecture")(runner.model_config)[0]
    return found


def logits_processors(model: Any) -> list[Any]:
    """The modules of a loaded model that turn hidden states into logits."""
    point = _place("logits_processor")
    kind = pkgutil.resolve_name(f"{point.module}:{point.qualname.partition('.')[0]}")
    return [module for module in model.modules() if isinstance(module, kind)]
