"""Calls whose form differs between releases: each form, by the place that the release has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

pytest.importorskip("torch", reason="torch is not installed: the module needs it")

import torch

from sglang_spec_ext.compat import contracts, sglang_api
from sglang_spec_ext.compat.contracts import TOUCH_POINTS

Has = Callable[..., None]


def qualnames(name: str) -> list[str]:
    return list(dict.fromkeys(p.qualname for p in TOUCH_POINTS if p.name == name))


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Has:
    """`has(name, qualname, value)`: the release has that place, and this is what is there."""
    values: dict[str, Any] = {}
    held: dict[str, contracts.TouchPoint] = {}

    def put(name: str, qualname: str, value: Any = None) -> None:
        held[name] = next(p for p in TOUCH_POINTS if (p.name, p.qualname) == (name, qualname))
        values[name] = value

    monkeypatch.setattr(sglang_api, "_place", held.__getitem__)
    monkeypatch.setattr(sglang_api, "resolve", values.__getitem__)
    return put


# ---------------------------------------------------------------------------- the target's forward


def test_hidden_mode_as_an_argument(has: Has, mocker: MockerFixture) -> None:
    has("hidden_mode_of_forward", "TpModelWorker.forward_batch_generation")
    worker, batch = mocker.Mock(), SimpleNamespace()
    result = sglang_api.target_forward(worker, batch, "full")
    assert result is worker.forward_batch_generation.return_value
    worker.forward_batch_generation.assert_called_once_with(batch, capture_hidden_mode="full")
    assert vars(batch) == {}


def test_hidden_mode_on_the_batch(has: Has, mocker: MockerFixture) -> None:
    has("hidden_mode_of_forward", "ScheduleBatch.capture_hidden_mode")
    worker, batch = mocker.Mock(), SimpleNamespace(capture_hidden_mode=None)
    result = sglang_api.target_forward(worker, batch, "full")
    assert result is worker.forward_batch_generation.return_value
    worker.forward_batch_generation.assert_called_once_with(batch)
    assert batch.capture_hidden_mode == "full"


# ---------------------------------------------------------------------------- KV and draft input


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("qualname", qualnames("kv_write_location"))
def test_kv_slots_in_the_form_that_the_pool_takes(
    has: Has, mocker: MockerFixture, qualname: str, scale: float | None
) -> None:
    has("kv_write_location", qualname, lambda slots, swa: (slots, swa))
    pool, attention = mocker.Mock(), SimpleNamespace(k_scale=scale, v_scale=scale)
    sglang_api.write_kv(pool, attention, "slots", "k", "v")
    given = ("slots", None) if qualname == "KVWriteLoc" else "slots"
    scales = () if scale is None else (scale, scale)
    pool.set_kv_buffer.assert_called_once_with(attention, given, "k", "v", *scales)


def test_recurrent_hidden_of_a_draft_runner(has: Has) -> None:
    has("recurrent_hidden_spec", "get_draft_recurrent_hidden_state_spec", lambda runner: runner)
    assert sglang_api.recurrent_hidden(SimpleNamespace(draft_runner=(8, "bf16"))) == (8, "bf16")


def test_recurrent_hidden_of_a_draft_worker(has: Has) -> None:
    class DraftInput:
        hidden_size_for = staticmethod(lambda worker: worker.width)
        dtype_for = staticmethod(lambda worker: worker.dtype)

    has("recurrent_hidden_spec", "EagleDraftInput.hidden_size_for")
    has("draft_input", "EagleDraftInput", DraftInput)
    worker = SimpleNamespace(width=8, dtype="bf16")
    assert sglang_api.recurrent_hidden(worker) == (8, "bf16")


@pytest.mark.parametrize("standalone", [False, True])
def test_recurrent_hidden_where_every_draft_has_one(has: Has, standalone: bool) -> None:
    has("recurrent_hidden_spec", "EagleDraftInput.verified_id")
    config = SimpleNamespace(spec_hidden_size=8, dtype="bf16")
    algorithm = SimpleNamespace(is_standalone=lambda: standalone)
    draft = SimpleNamespace(
        draft_runner=SimpleNamespace(model_config=config), speculative_algorithm=algorithm
    )
    assert sglang_api.recurrent_hidden(draft) == (8, "bf16")


@pytest.mark.parametrize("field", ["bonus_tokens", "verified_id"])
def test_the_last_tokens_under_either_name(field: str) -> None:
    draft_input = type("EagleDraftInput", (), {field: None})
    assert sglang_api.bonus_field(draft_input) == field
    given = draft_input()
    setattr(given, field, "tokens")
    assert sglang_api.bonus_tokens(given) == "tokens"


# ---------------------------------------------------------------------------- batch and result


def test_one_token_per_request_said_on_the_result(has: Has) -> None:
    has("stride", "GenerationBatchResult.speculative_num_draft_tokens")
    tokens = torch.tensor([7, 8])
    result = SimpleNamespace(next_token_ids=tokens)
    sglang_api.one_token_per_request(result, 4)
    assert result.next_token_ids is tokens
    assert result.speculative_num_draft_tokens == 1


def test_one_token_per_request_in_the_width_of_a_verify(has: Has) -> None:
    has("stride", "SchedulerOutputProcessorMixin._resolve_spec_overlap_token_ids")
    result = SimpleNamespace(next_token_ids=torch.tensor([7, 8]))
    sglang_api.one_token_per_request(result, 4)
    assert result.next_token_ids.tolist()[::4] == [7, 8]
    assert result.next_token_ids.shape == (8,)
    assert result.next_token_ids.is_contiguous()


def test_prefill_lengths_of_either_batch() -> None:
    assert sglang_api.prefill_lengths(SimpleNamespace(extend_lens=[3, 1])) == [3, 1]
    assert sglang_api.prefill_lengths(SimpleNamespace(extend_seq_lens=[3, 1])) == [3, 1]


def test_new_lengths_on_the_result(has: Has) -> None:
    has("new_lengths", "GenerationBatchResult.new_seq_lens")
    result = SimpleNamespace()
    sglang_api.attach_lengths(result, "lengths")  # type: ignore[arg-type]
    assert vars(result) == {"new_seq_lens": "lengths"}


def test_new_lengths_in_the_draft_input_with_an_event(has: Has, mocker: MockerFixture) -> None:
    has("new_lengths", "EagleDraftInput.verify_done")
    device = mocker.patch.object(sglang_api.torch, "get_device_module")
    result = SimpleNamespace(next_draft_input=SimpleNamespace())
    lengths = SimpleNamespace(device="cuda:1")
    sglang_api.attach_lengths(result, lengths)  # type: ignore[arg-type]
    device.assert_called_once_with("cuda:1")
    event = device.return_value.Event.return_value
    event.record.assert_called_once_with()
    assert vars(result.next_draft_input) == {"new_seq_lens": lengths, "verify_done": event}


def scheduler_of(future_map: Any, enable_overlap: bool = True) -> Any:
    return SimpleNamespace(enable_overlap=enable_overlap, future_map=future_map)


def test_a_relay_takes_tokens_alone_until_it_takes_all_again(has: Has) -> None:
    has("relay", "FutureMap.need_topk")
    future_map = SimpleNamespace(need_topk=True, need_hidden_states=False)
    relay = sglang_api.Relay.of(scheduler_of(future_map))
    assert relay is not None
    for _ in range(2):
        for _ in range(2):
            assert relay.take_tokens()
            assert vars(future_map) == {"need_topk": False, "need_hidden_states": False}
        relay.take_all()
        relay.take_all()
        assert vars(future_map) == {"need_topk": True, "need_hidden_states": False}


def test_a_relay_that_is_not_set_up_yet_is_left_alone(has: Has) -> None:
    has("relay", "FutureMap.need_topk")
    future_map = SimpleNamespace()
    relay = sglang_api.Relay.of(scheduler_of(future_map))
    assert relay is not None
    assert not relay.take_tokens()
    relay.take_all()
    assert vars(future_map) == {}


def test_a_relay_that_takes_everything_is_none_to_us(has: Has) -> None:
    has("relay", "SpeculativeAlgorithm.supports_spec_v2")
    assert sglang_api.Relay.of(scheduler_of(SimpleNamespace())) is None


def test_without_the_overlap_schedule_there_is_no_relay(has: Has) -> None:
    has("relay", "FutureMap.need_topk")
    assert sglang_api.Relay.of(scheduler_of(None, enable_overlap=False)) is None


READ_DONE = {
    "war_fastpath_runner": "war_fastpath_read_done_event",
    "last_shared_read_runner": "shared_read_done_event",
}


@pytest.mark.parametrize(("asked", "event"), READ_DONE.items())
def test_the_event_of_the_targets_reads_goes_where_the_scheduler_asks(
    has: Has, asked: str, event: str
) -> None:
    has("last_shared_read", f"EAGLEWorkerV2.{asked}")
    target, draft = SimpleNamespace(**{event: "stale"}), SimpleNamespace(**{event: None})
    worker = SimpleNamespace(target_worker=SimpleNamespace(model_runner=target), **{asked: draft})
    reads = sglang_api.SharedReads(worker)
    with reads.end_with_target():
        assert vars(target) == {event: None}
        setattr(target, event, "recorded")  # what SGLang's graph runner does
    assert (vars(target), vars(draft)) == ({event: None}, {event: "recorded"})
    with reads.end_with_target():
        pass  # an eager forward records nothing: the scheduler has to wait for all of it
    assert (vars(target), vars(draft)) == ({event: None}, {event: None})


@pytest.mark.parametrize("lacks", ["target", "draft"])
def test_a_runner_without_that_event_is_noticed_at_once(has: Has, lacks: str) -> None:
    has("last_shared_read", "EAGLEWorkerV2.last_shared_read_runner")
    runners = {name: SimpleNamespace(shared_read_done_event=None) for name in ("target", "draft")}
    del runners[lacks].shared_read_done_event
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runners["target"]),
        last_shared_read_runner=runners["draft"],
    )
    with pytest.raises(AttributeError, match="shared_read_done_event"):
        sglang_api.SharedReads(worker)


def test_a_scheduler_that_always_waits_is_told_nothing(has: Has) -> None:
    has("last_shared_read", "CudaGraphRunner.replay")
    with sglang_api.SharedReads(SimpleNamespace()).end_with_target():
        pass


# ---------------------------------------------------------------------------- server arguments


def speculative_hook(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    package = ModuleType("sglang.srt.arg_groups")
    package.speculative_hook = SimpleNamespace(**names)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)


def test_arguments_through_sglangs_own_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    speculative_hook(
        monkeypatch,
        resolving_view=lambda record: ("view of", record),
        declare_resolution=lambda *a, **k: said.append((a, k)),
    )
    assert sglang_api.resolved("record") == ("view of", "record")
    sglang_api.decide("record", max_running_requests=3)
    assert said == [(("record", "sglang_spec_ext"), {"max_running_requests": 3})]


@pytest.mark.parametrize("module", [True, False])
def test_arguments_that_resolve_themselves(monkeypatch: pytest.MonkeyPatch, module: bool) -> None:
    if module:
        speculative_hook(monkeypatch)
    else:
        monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups", None)
    record = SimpleNamespace()
    assert sglang_api.resolved(record) is record
    sglang_api.decide(record, max_running_requests=3)
    assert record.max_running_requests == 3


# ---------------------------------------------------------------------------- graphs

RUNNERS = {"DecodeCudaGraphRunner": "decode_cuda_graph_runner", "CudaGraphRunner": "graph_runner"}
FULL = SimpleNamespace(is_full=lambda: True)
NULL = SimpleNamespace(is_full=lambda: False)


class GraphRunner:
    """SGLang's, the part of its constructor that reads what we swap."""

    capture_bs = (1, 2)

    def __init__(self, model_runner: Any, **options: Any) -> None:
        base = sys.modules["sglang.srt.model_executor.runner.base_runner"]
        self.options = options
        self.saw = SimpleNamespace(
            algorithm=model_runner.spec_algorithm,
            backend=model_runner.attn_backend,
            output=getattr(model_runner, "graph_shared_output", None),
            flag=model_runner.server_args.enable_return_hidden_states,
            mode=base.get_server_return_hidden_states_mode(model_runner.server_args),
        )
        if model_runner.fails:
            raise MemoryError


class Sealed:
    """Server arguments that may not be assigned to."""

    def __init__(self, flag: bool) -> None:
        object.__setattr__(self, "enable_return_hidden_states", flag)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is sealed")


class TargetRunner:
    device = "cuda"
    fails = False

    def __init__(self, attribute: str, *, flag: bool = False, **fields: Any) -> None:
        self.init_new_workspace = False
        self.spec_algorithm = "EAGLE3"
        self.attn_backend = "verify backend"
        self.server_args = Sealed(flag)
        verify = object.__new__(GraphRunner)
        vars(self).update({attribute: verify, **fields})

    def _get_attention_backend(self, init_new_workspace: bool) -> str:
        self.init_new_workspace = init_new_workspace
        return "plain backend"


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, names in {
        "runner.base_runner": {"get_server_return_hidden_states_mode": lambda args: "server's"},
        "runner": {},
    }.items():
        module = ModuleType(f"sglang.srt.model_executor.{name}")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runner = sys.modules["sglang.srt.model_executor.runner"]
    runner.base_runner = sys.modules["sglang.srt.model_executor.runner.base_runner"]  # type: ignore[attr-defined]
    spec_info = ModuleType("sglang.srt.speculative.spec_info")
    spec_info.SpeculativeAlgorithm = SimpleNamespace(NONE="none")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, spec_info.__name__, spec_info)


@pytest.mark.parametrize(("qualname", "attribute"), RUNNERS.items())
def test_decoding_on_other_graphs_and_back(has: Has, qualname: str, attribute: str) -> None:
    has("decode_graph_runner", qualname)
    runner = TargetRunner(attribute)
    before = dict(vars(runner))
    with pytest.raises(ZeroDivisionError), sglang_api.decoding_on(runner, "backend", "graphs"):
        assert (runner.attn_backend, getattr(runner, attribute)) == ("backend", "graphs")
        raise ZeroDivisionError
    assert vars(runner) == before


@pytest.mark.parametrize(("qualname", "attribute"), RUNNERS.items())
def test_the_targets_graph_runner(has: Has, qualname: str, attribute: str) -> None:
    has("decode_graph_runner", qualname)
    runner = TargetRunner(attribute)
    assert sglang_api.decode_graph_runner(runner) is getattr(runner, attribute)
    setattr(runner, attribute, None)
    assert sglang_api.decode_graph_runner(runner) is None
    eager = TargetRunner(attribute)
    eager.device = "cpu"
    assert sglang_api.decode_graph_runner(eager) is None


def today(has: Has) -> TargetRunner:
    has("decode_graph_runner", "DecodeCudaGraphRunner")
    has("hidden_states_mode", "get_server_return_hidden_states_mode")
    plain = lambda runner: f"rows of {runner.spec_algorithm}"  # noqa: E731
    has("graph_output", "GraphSharedOutput.create_for_model_runner", plain)
    return TargetRunner("decode_cuda_graph_runner", graph_shared_output="rows of verify")


def oldest(has: Has, *, flag: bool = False) -> TargetRunner:
    has("decode_graph_runner", "CudaGraphRunner")
    has("hidden_states_mode", "CudaGraphRunner.recapture_if_needed")
    has("graph_output", "_allocate_decode_buffers")
    return TargetRunner("graph_runner", flag=flag)


@pytest.mark.parametrize("release", [today, oldest])
def test_the_target_reads_as_plain_while_its_graphs_are_captured(
    has: Has, release: Callable[[Has], TargetRunner]
) -> None:
    target = release(has)
    before = dict(vars(target))
    backend, graphs = sglang_api.capture_plain_decode(target, FULL)
    assert backend == graphs.saw.backend == "plain backend"
    assert graphs.saw.algorithm == "none"
    assert graphs.options == {
        "attn_backend": "plain backend",
        "speculative_num_steps": 0,
        "speculative_num_draft_tokens": 1,
    }
    assert vars(target) == before


@pytest.mark.parametrize("release", [today, oldest])
def test_a_capture_that_fails_leaves_no_trace(
    has: Has, release: Callable[[Has], TargetRunner]
) -> None:
    target = release(has)
    target.fails = True
    before = dict(vars(target))
    with pytest.raises(MemoryError):
        sglang_api.capture_plain_decode(target, FULL)
    assert vars(target) == before
    base = sys.modules["sglang.srt.model_executor.runner.base_runner"]
    assert base.get_server_return_hidden_states_mode(None) == "server's"


@pytest.mark.parametrize("mode", [FULL, NULL])
def test_hidden_states_by_a_function_of_the_server(has: Has, mode: Any) -> None:
    _, graphs = sglang_api.capture_plain_decode(today(has), mode)
    assert graphs.saw.mode is mode
    assert graphs.saw.flag is False
    assert graphs.saw.output == "rows of none"


@pytest.mark.parametrize(
    ("flag", "mode", "seen"), [(False, FULL, True), (False, NULL, False), (True, NULL, True)]
)
def test_hidden_states_by_a_flag_of_the_server(has: Has, flag: bool, mode: Any, seen: bool) -> None:
    target = oldest(has, flag=flag)
    _, graphs = sglang_api.capture_plain_decode(target, mode)
    assert graphs.saw.flag is seen
    assert graphs.saw.mode == "server's"
    assert target.server_args.enable_return_hidden_states is flag


# ---------------------------------------------------------------------------- control and metrics


@pytest.mark.parametrize(("enabled", "expected"), [(True, "collector"), (False, None)])
@pytest.mark.parametrize("qualname", qualnames("metrics_collector"))
def test_a_collector_only_where_this_process_reports(
    has: Has, qualname: str, enabled: bool, expected: str | None
) -> None:
    has("metrics_collector", qualname)
    flags = {"current_scheduler_metrics_enabled": enabled}
    context = SimpleNamespace(collector="collector", **flags)
    scheduler = SimpleNamespace(metrics_collector_context=context)
    if qualname == "SchedulerMetricsMixin.init_metrics":
        scheduler = SimpleNamespace(metrics_collector="collector", enable_metrics=True, **flags)
    assert sglang_api.metrics_collector(scheduler) == expected


def test_no_collector_on_a_mixin_scheduler_without_metrics(has: Has) -> None:
    has("metrics_collector", "SchedulerMetricsMixin.init_metrics")
    # 0.5.9 says so of its first rank whether or not metrics are asked for
    scheduler = SimpleNamespace(enable_metrics=False, current_scheduler_metrics_enabled=True)
    assert sglang_api.metrics_collector(scheduler) is None


@pytest.mark.parametrize("updated", [True, False])
def test_the_answer_to_a_change_of_state_in_both_its_forms(has: Has, updated: bool) -> None:
    @dataclass
    class Answer:
        updated: bool

    @dataclass
    class WithArguments:
        updated: bool
        server_args: dict[str, Any]

    for form in (Answer, WithArguments):
        has("internal_state_answer", "SetInternalStateReqOutput", form)
        answer = sglang_api.internal_state_answer(updated)
        assert isinstance(answer, form)
        assert answer.updated is updated


# ---------------------------------------------------------------------------- captured sizes


def generated(arguments: Any, largest: int) -> list[int]:
    """As SGLang's: every size where it speculates or may not pad, else powers of two."""
    if arguments.speculative_algorithm or arguments.disable_cuda_graph_padding:
        return list(range(1, largest + 1))
    return [size for size in (1, 2, 4, 8, 16) if size < largest] + [largest]


@pytest.fixture(params=["argument", "method", "field"])
def generator(request: pytest.FixtureRequest, has: Has, monkeypatch: pytest.MonkeyPatch) -> None:
    forms: dict[str, tuple[str, Any]] = {
        "argument": ("generate_decode_cuda_graph_batch_sizes", generated),
        "method": ("ServerArgs._generate_decode_cuda_graph_batch_sizes", generated),
        "field": (
            "ServerArgs._generate_cuda_graph_batch_sizes",
            lambda arguments: generated(arguments, arguments.cuda_graph_max_bs),
        ),
    }
    has("generated_sizes", *forms[request.param])
    monkeypatch.setattr(sglang_api, "resolved", lambda arguments: arguments)


def arguments(padding: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_algorithm="EAGLE3",
        disable_cuda_graph_padding=not padding,
        cuda_graph_max_bs=99,
        # what 0.5.23 asks before the fields
        _resolved_overrides=[("somebody", {"speculative_algorithm": "EAGLE3"})],
    )


@pytest.mark.usefixtures("generator")
def test_the_plain_sizes_are_those_of_a_server_that_never_speculates() -> None:
    server = arguments()
    assert sglang_api.plain_graph_sizes(server, list(range(1, 13))) == [1, 2, 4, 8, 12]
    assert (server.speculative_algorithm, server.cuda_graph_max_bs) == ("EAGLE3", 99)


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("sizes", [[1, 3, 5], [7]])
def test_sizes_that_the_user_named_all_stay(sizes: list[int]) -> None:
    assert sglang_api.plain_graph_sizes(arguments(), sizes) == sizes


@pytest.mark.usefixtures("generator")
def test_without_padding_all_sizes_stay() -> None:
    sizes = list(range(1, 13))
    assert sglang_api.plain_graph_sizes(arguments(padding=False), sizes) == sizes


def test_decisions_over_the_fields_do_not_hide_the_other_values() -> None:
    otherwise = sglang_api._Otherwise(arguments(), speculative_algorithm=None)
    assert otherwise.speculative_algorithm is None
    assert otherwise._resolved_overrides == ()
    assert otherwise.cuda_graph_max_bs == 99
    with pytest.raises(AttributeError):
        _ = otherwise.no_such_argument
