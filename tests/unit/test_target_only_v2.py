"""The target-only step on small CPU tensors, with stand-ins for SGLang's worker and classes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import step_stand_ins
from pytest_mock import MockerFixture
from step_stand_ins import CaptureHiddenMode, ForwardMode, last_hidden, written

torch = pytest.importorskip("torch", reason="torch is not installed: the step works on tensors")

from sglang_spec_ext import observe  # noqa: E402
from sglang_spec_ext.args import Settings, SettingsError  # noqa: E402
from sglang_spec_ext.compat import contracts  # noqa: E402
from sglang_spec_ext.policy import Mode  # noqa: E402
from sglang_spec_ext.target_only import step, v2  # noqa: E402

POOL, CONTEXT = 6, 32  # request pool indices, positions per request
TARGET_WIDTH, DRAFT_WIDTH = 3, 5  # hidden width of the target's capture and of the draft's own
TOPK, WIDTH = 2, 3  # WIDTH: draft tokens per request and step
VOCABULARY = 100


class Result(SimpleNamespace):
    """SGLang's GenerationBatchResult, LogitsProcessorOutput and, below, EagleDraftInput."""


class DraftInput(Result):
    bonus_tokens: Any = None


class Writer(step_stand_ins.Writer):
    hidden_width = TARGET_WIDTH

    def write(self, tokens: Any, hidden: Any, positions: Any, slots: Any) -> None:
        EVENTS.append("kv write")
        super().write(tokens, hidden, positions, slots)


class HybridReqToTokenPool(SimpleNamespace):
    """Of a target with recurrent state."""


EVENTS: list[str] = []


def slot(pool_index: int, position: int) -> int:
    return 1000 * pool_index + position


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few names of SGLang that the step imports, without SGLang."""

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    module("sglang.srt.managers.utils", GenerationBatchResult=Result)
    module(
        "sglang.srt.model_executor.forward_batch_info",
        CaptureHiddenMode=CaptureHiddenMode,
    )
    module("sglang.srt.layers.logits_processor", LogitsProcessorOutput=Result)

    @contextmanager
    def contexts(draft: Any) -> Any:
        EVENTS.append("draft contexts")
        yield

    api = v2.sglang_api
    names = {"draft_input": DraftInput, "hybrid_request_pool": HybridReqToTokenPool}
    monkeypatch.setattr(api, "resolve", names.__getitem__)
    todays = {point.name: point for point in reversed(contracts.TOUCH_POINTS)}
    monkeypatch.setattr(api, "_place", todays.__getitem__)
    monkeypatch.setattr(api, "draft_contexts", contexts)
    monkeypatch.setattr(api, "recurrent_hidden", lambda draft: (draft.width, torch.float16))
    monkeypatch.setattr(api, "decode_graph_runner", lambda runner: None)
    monkeypatch.setattr(step, "DraftKVWriter", Writer)
    monkeypatch.setattr(api, "copies_draft_kv", lambda worker: worker.hicache)
    monkeypatch.setattr(Writer, "reason", None)
    monkeypatch.setattr(observe, "log_on_first_rank", lambda text: None)
    EVENTS.clear()


class World:
    """A worker whose target samples `pool index + 10 * position` and a step on top of it."""

    def __init__(
        self,
        mocker: MockerFixture,
        standalone: bool = False,
    ) -> None:
        req_to_token = torch.tensor(
            [[slot(index, position) for position in range(CONTEXT)] for index in range(POOL)]
        )
        algorithm = SimpleNamespace(name="EAGLE3", is_standalone=lambda: standalone)
        self.target = mocker.Mock(side_effect=self._target)
        self.draft_extend = mocker.Mock(side_effect=self._draft_extend)
        self.original = mocker.Mock(side_effect=lambda *a, **k: "SGLang's own")
        self.worker = SimpleNamespace(
            device="cpu",
            topk=TOPK,
            speculative_num_draft_tokens=WIDTH,
            speculative_algorithm=algorithm,
            hicache=False,
            draft_worker=SimpleNamespace(
                draft_runner=SimpleNamespace(shared_read_done_event=None),
                req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
                _draft_extend_for_decode=self.draft_extend,
                width=None if standalone else DRAFT_WIDTH,
            ),
            target_worker=SimpleNamespace(
                forward_batch_generation=self.target,
                model_runner=SimpleNamespace(
                    max_running_requests=None, shared_read_done_event=None
                ),
            ),
        )
        self.worker.last_shared_read_runner = self.worker.draft_worker.draft_runner
        self.step = v2.TargetOnlyStep(self.worker, Settings(2, 2, 1))
        self.captures = not standalone

    def hidden(self, pool_indices: Any, positions: Any) -> Any:
        """The target's hidden state: told apart by request and position."""
        return (pool_indices * 100 + positions).float()[:, None].expand(-1, TARGET_WIDTH).clone()

    def _target(self, step: Any, capture_hidden_mode: Any) -> Result:
        EVENTS.append("target")
        positions = step.seq_lens - 1
        hidden = self.hidden(step.req_pool_indices, positions) if self.captures else None
        return Result(
            next_token_ids=(step.req_pool_indices + 10 * positions) % VOCABULARY,
            logits_output=Result(
                hidden_states=hidden,
                next_token_logprobs=torch.full((len(positions),), -0.5)
                if step.return_logprob
                else None,
            ),
        )

    def _draft_extend(self, view: Any, result: Any) -> None:
        EVENTS.append("draft extend")

    def decode(self, batch: Any, **kwargs: Any) -> Any:
        return self.step.forward(self.original, batch, **kwargs)


@pytest.fixture
def world(mocker: MockerFixture) -> World:
    return World(mocker)


@pytest.fixture
def own_extend(mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch) -> World:
    """A draft whose KV cannot be written without its layers."""
    monkeypatch.setattr(Writer, "reason", "it has 2 layers")
    return World(mocker)


def decode_batch(lengths: dict[int, int], **fields: Any) -> SimpleNamespace:
    """A decode batch: sequence length by request pool index; bonus token 50 + pool index."""
    pool_indices = torch.tensor(list(lengths))
    seq_lens = torch.tensor(list(lengths.values()))
    return SimpleNamespace(
        **{
            "forward_mode": ForwardMode.VERIFY,
            "is_extend_in_batch": False,
            "req_pool_indices": pool_indices,
            "seq_lens": seq_lens,
            "seq_lens_cpu": seq_lens.clone(),
            "seq_lens_sum": int(seq_lens.sum()),
            "spec_info": Result(bonus_tokens=(50 + pool_indices).to(torch.int32)),
            "has_grammar": False,
            "return_logprob": False,
            "input_ids": None,
            "out_cache_loc": None,
            **fields,
        }
    )


def equal(tensor: Any, values: Any) -> bool:
    return bool(tensor.tolist() == values)


THREE = {1: 7, 4: 9, 2: 5}  # above N=2
TWO = {1: 8, 4: 10}  # at N


def hidden_of(pool_index: int, position: int) -> list[float]:
    return [float(pool_index * 100 + position)] * TARGET_WIDTH


# ---------------------------------------------------------------------------- which path


def test_speculating_is_sglangs_own_step(world: World) -> None:
    batch = decode_batch(TWO)
    assert world.decode(batch, on_publish="p") == "SGLang's own"
    world.original.assert_called_once_with(world.worker, batch, on_publish="p")
    assert EVENTS == []


def test_above_n_sglangs_own_step_does_not_run(world: World) -> None:
    world.decode(decode_batch(THREE))
    world.original.assert_not_called()
    assert EVENTS == ["target"]


@pytest.mark.parametrize("after", [[], [THREE]], ids=["speculating", "target-only"])
def test_idle_batches_pass_through_and_are_no_step(world: World, after: list[Any]) -> None:
    for lengths in after:
        world.decode(decode_batch(lengths))
    mode = world.step.policy.mode
    events = list(EVENTS)
    idle = decode_batch({}, forward_mode=ForwardMode.IDLE)
    assert world.decode(idle, on_publish="p") == "SGLang's own"
    world.original.assert_called_once_with(world.worker, idle, on_publish="p")
    assert world.step.policy.mode is mode
    assert events == EVENTS


# ---------------------------------------------------------------------------- the result


def test_result_contract(world: World) -> None:
    result = world.decode(decode_batch(THREE))
    assert equal(result.accept_lens, [1, 1, 1])
    assert result.accept_lens.dtype == torch.int32
    assert result.speculative_num_draft_tokens == 1  # the stride of next_token_ids
    assert equal(result.new_seq_lens, [8, 10, 6])
    assert equal(result.next_token_ids, [71, 94, 52])
    assert observe.is_target_only(result)


def test_the_next_draft_input(world: World) -> None:
    result = world.decode(decode_batch(THREE))
    given = result.next_draft_input
    assert given.bonus_tokens is result.next_token_ids
    for tensor, width, dtype in (
        (given.topk_p, TOPK, torch.float32),
        (given.topk_index, TOPK, torch.int64),
        (given.hidden_states, DRAFT_WIDTH, torch.float16),
    ):
        assert tuple(tensor.shape) == (3, width)
        assert tensor.dtype == dtype
        # filter and merge index and concatenate them
        assert tuple(tensor[torch.tensor([0, 2])].shape) == (2, width)
    assert (given.num_tokens_per_req, given.num_tokens_for_logprob_per_req) == (1, 1)


def test_the_step_that_the_target_gets(world: World) -> None:
    world.decode(decode_batch(THREE))
    ((step,), options) = world.target.call_args
    assert options == {"capture_hidden_mode": CaptureHiddenMode.FULL}
    assert step.forward_mode is ForwardMode.DECODE
    assert step.spec_info is None
    assert equal(step.input_ids, [51, 54, 52])
    assert step.input_ids.dtype == torch.int64
    assert equal(step.seq_lens, [8, 10, 6])
    assert equal(step.seq_lens_cpu, [8, 10, 6])
    assert step.seq_lens_sum == 24
    assert equal(step.out_cache_loc, [slot(1, 7), slot(4, 9), slot(2, 5)])


def test_without_lengths_on_the_host_none_are_made(world: World) -> None:
    world.decode(decode_batch(THREE, seq_lens_cpu=None, seq_lens_sum=None))
    ((step,), _) = world.target.call_args
    assert step.seq_lens_cpu is None
    assert step.seq_lens_sum is None


def test_the_batch_itself_is_not_changed(world: World) -> None:
    batch = decode_batch(THREE)
    fields = dict(vars(batch))
    values = copy.deepcopy(fields)
    world.decode(batch)
    assert vars(batch).keys() == fields.keys()
    for name, value in fields.items():
        assert getattr(batch, name) is value, name
    for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices"):
        assert torch.equal(fields[name], values[name]), name
    assert torch.equal(batch.spec_info.bonus_tokens, values["spec_info"].bonus_tokens)


def test_nothing_is_allocated(world: World) -> None:
    # the world has no KV allocator at all, and the slots are those of req_to_token
    before = world.step._req_to_token.clone()
    world.decode(decode_batch(THREE))
    assert torch.equal(world.step._req_to_token, before)


def test_published_once_and_before_the_target_runs(world: World) -> None:
    published: list[list[int]] = []

    def on_publish(lengths: Any) -> None:
        EVENTS.append("publish")
        published.append(lengths.tolist())

    world.decode(decode_batch(THREE), on_publish=on_publish)
    assert published == [[8, 10, 6]]
    assert EVENTS == ["publish", "target"]


def record_reads(world: World) -> None:
    """The target's graph runner says when its reads of the request pool are done."""
    forward, runner = world.target.side_effect, world.worker.target_worker.model_runner

    def recording(*args: Any, **kwargs: Any) -> Any:
        runner.shared_read_done_event = "read"
        return forward(*args, **kwargs)

    world.target.side_effect = recording


def test_the_scheduler_waits_for_the_targets_reads_and_not_for_its_forward(world: World) -> None:
    record_reads(world)
    world.decode(decode_batch(THREE))
    assert world.worker.last_shared_read_runner.shared_read_done_event == "read"


def test_a_draft_extend_after_it_reads_too(own_extend: World) -> None:
    record_reads(own_extend)
    own_extend.decode(decode_batch(THREE))
    assert own_extend.worker.last_shared_read_runner.shared_read_done_event is None


@pytest.mark.parametrize(
    ("grammar", "events"), [(True, ["barrier", "target"]), (False, ["target"])]
)
def test_grammar_barrier(world: World, grammar: bool, events: list[str]) -> None:
    world.decode(
        decode_batch(THREE, has_grammar=grammar),
        grammar_barrier=lambda: EVENTS.append("barrier"),
    )
    assert EVENTS[: len(events)] == events
    assert EVENTS.count("barrier") == int(grammar)


def test_a_release_without_a_grammar_barrier(world: World) -> None:
    world.decode(decode_batch(THREE, has_grammar=True))
    assert EVENTS[0] == "target"


def test_log_probabilities_are_a_column(world: World) -> None:
    result = world.decode(decode_batch(THREE, return_logprob=True))
    assert tuple(result.logits_output.next_token_logprobs.shape) == (3, 1)


def test_without_log_probabilities_there_are_none(world: World) -> None:
    assert world.decode(decode_batch(THREE)).logits_output.next_token_logprobs is None


# ---------------------------------------------------------------------------- hidden states


def test_draft_kv_is_written_at_the_consumed_position(world: World) -> None:
    world.decode(decode_batch(THREE))
    ((tokens, hidden, positions, slots),) = written(world.step)
    assert equal(tokens, [71, 94, 52])  # the token after the position
    assert tokens.dtype == torch.int64
    assert equal(hidden, [hidden_of(1, 7), hidden_of(4, 9), hidden_of(2, 5)])
    assert equal(positions, [7, 9, 5])
    assert equal(slots, [slot(1, 7), slot(4, 9), slot(2, 5)])
    assert world.step.counts.draft_tokens_warmed == 3


def test_hidden_states_are_kept_by_pool_index(world: World) -> None:
    world.decode(decode_batch(THREE))
    kept = [hidden_of(1, 7), hidden_of(4, 9), hidden_of(2, 5)]
    assert equal(last_hidden(world.step, 1, 4, 2), kept)
    assert equal(last_hidden(world.step, 0, 3, 5), [[0.0] * TARGET_WIDTH] * 3)


def test_a_reused_pool_index_holds_the_new_request(world: World) -> None:
    world.decode(decode_batch({1: 7, 4: 9, 2: 5}))
    world.decode(decode_batch({1: 8, 4: 20, 3: 5}))  # 4 is another request now, 2 has finished
    kept = [hidden_of(4, 20), hidden_of(1, 8), hidden_of(2, 5)]
    assert equal(last_hidden(world.step, 4, 1, 2), kept)


def extend_batch(lengths: dict[int, int], **fields: Any) -> SimpleNamespace:
    return decode_batch(
        lengths,
        **{
            "forward_mode": ForwardMode.EXTEND,
            "extend_lens": list(lengths.values()),
            **fields,
        },
    )


def prefill(world: World, batch: Any) -> Any:
    """Hidden state of row r of the prefill is [r, r, r]."""
    rows = torch.arange(float(sum(batch.extend_lens)))[:, None].expand(-1, TARGET_WIDTH)
    made = Result(logits_output=Result(hidden_states=rows))
    world.original.side_effect = lambda *a, **k: made
    assert world.decode(batch, on_publish="p") is made
    world.original.assert_called_with(world.worker, batch, on_publish="p")
    return made


PREFILLED = Result(logits_output=Result(hidden_states=torch.zeros(4, TARGET_WIDTH)))


def test_what_waits_is_written_before_a_prefill_that_may_read_it(world: World) -> None:
    world.decode(decode_batch(THREE))
    world.original.side_effect = lambda *a, **k: EVENTS.append("original") or PREFILLED
    EVENTS.clear()
    world.decode(extend_batch({3: 4}))
    assert EVENTS == ["draft contexts", "kv write", "original"]


def test_with_hicache_nothing_waits(world: World) -> None:
    world.worker.hicache = True
    world.step = v2.TargetOnlyStep(world.worker, Settings(2, 2, 1))
    world.decode(decode_batch(THREE))
    assert EVENTS == ["target", "draft contexts", "kv write"]


def test_a_prefill_while_target_only_leaves_each_requests_last_row(world: World) -> None:
    world.decode(decode_batch(THREE))
    prefill(world, extend_batch({3: 4, 5: 1, 0: 6}))
    assert equal(last_hidden(world.step, 3, 5, 0)[:, 0], [3.0, 4.0, 10.0])
    assert equal(last_hidden(world.step, 1), [hidden_of(1, 7)])


def test_a_chunk_counts_with_its_own_length(world: World) -> None:
    world.decode(decode_batch(THREE))
    # 20 tokens are in, this chunk brings 2 more of request 3 and all 3 of request 5
    prefill(world, extend_batch({3: 22, 5: 3}, extend_lens=[2, 3]))
    assert equal(last_hidden(world.step, 3, 5)[:, 0], [1.0, 4.0])
    prefill(world, extend_batch({3: 27}, extend_lens=[5]))
    assert equal(last_hidden(world.step, 3)[:, 0], [4.0])


def test_a_prefill_beside_decodes_of_other_ranks_is_a_prefill(world: World) -> None:
    world.decode(decode_batch(THREE))
    target_calls = world.target.call_count
    prefill(world, extend_batch({3: 4}, forward_mode=ForwardMode.VERIFY, is_extend_in_batch=True))
    assert world.target.call_count == target_calls


def test_a_prefill_while_speculating_keeps_nothing(world: World) -> None:
    prefill(world, extend_batch({3: 4}))
    assert not last_hidden(world.step, *range(POOL)).any()


def test_a_prefill_is_no_decode_step(world: World) -> None:
    prefill(world, extend_batch({0: 4, 1: 4, 2: 4, 3: 4}))
    assert world.step.policy.mode is Mode.SPECULATING


# ---------------------------------------------------------------------------- resume


def resume(world: World, batch: Any) -> tuple[Any, Any]:
    """What SGLang's draft extend was given when the batch resumed."""
    world.decode(batch)
    assert world.step.policy.mode is Mode.SPECULATING
    world.draft_extend.assert_called_once()
    view, result = world.draft_extend.call_args.args
    return view, result


def test_resume_extends_the_draft_once_for_the_whole_batch(world: World) -> None:
    world.decode(decode_batch(THREE))
    batch = decode_batch(TWO)
    view, result = resume(world, batch)
    assert view.forward_mode is ForwardMode.DECODE
    assert equal(view.seq_lens, [7, 9])
    assert equal(view.seq_lens_cpu, [7, 9])
    assert view.seq_lens_sum == 16
    assert equal(
        view.out_cache_loc, [slot(i, p + j) for i, p in ((1, 7), (4, 9)) for j in range(3)]
    )
    assert equal(result.next_token_ids, [51, 0, 0, 54, 0, 0])
    assert result.next_token_ids.dtype == torch.int64
    zero = [0.0] * TARGET_WIDTH
    assert equal(
        result.logits_output.hidden_states,
        [hidden_of(1, 7), zero, zero, hidden_of(4, 9), zero, zero],
    )
    assert equal(result.accept_lens, [1, 1])
    assert equal(result.new_seq_lens, [8, 10])
    assert result.next_draft_input is batch.spec_info


def test_resume_comes_before_sglangs_own_step_with_the_same_batch(world: World) -> None:
    world.decode(decode_batch(THREE))
    EVENTS.clear()
    batch = decode_batch(TWO)
    fields = dict(vars(batch))
    world.original.side_effect = lambda *a, **k: EVENTS.append("original")
    world.decode(batch, on_publish="p")
    assert EVENTS == ["draft contexts", "kv write", "draft contexts", "draft extend", "original"]
    world.original.assert_called_once_with(world.worker, batch, on_publish="p")
    assert vars(batch) == fields


def test_resume_once_not_on_every_speculating_step(world: World) -> None:
    for lengths in (THREE, TWO, {1: 9, 4: 11}, {1: 10}):
        world.decode(decode_batch(lengths))
    world.draft_extend.assert_called_once()


def test_a_request_that_was_prefilled_just_before_resumes_from_its_prefill(world: World) -> None:
    world.decode(decode_batch(THREE))
    prefill(world, extend_batch({3: 4}))
    _, result = resume(world, decode_batch({1: 8, 3: 4}))
    rows = result.logits_output.hidden_states[::WIDTH]
    assert equal(rows, [hidden_of(1, 7), [3.0] * TARGET_WIDTH])


def test_resume_without_lengths_on_the_host(world: World) -> None:
    world.decode(decode_batch(THREE))
    view, _ = resume(world, decode_batch(TWO, seq_lens_cpu=None, seq_lens_sum=None))
    assert view.seq_lens_cpu is None
    assert view.seq_lens_sum is None


# ---------------------------------------------------------------------------- the relay


class FutureMap(SimpleNamespace):
    """What SGLang's relay takes, and whether it takes more than tokens."""

    @property
    def takes_all(self) -> bool:
        assert self.need_topk == self.need_hidden_states
        return bool(self.need_topk)


def relayed_by(world: World) -> FutureMap:
    """The overlap schedule's relay, seen by what SGLang's own step and its prefills leave."""
    made = FutureMap(need_topk=True, need_hidden_states=True)
    world.step.attach(SimpleNamespace(enable_overlap=True, future_map=made))
    world.original.side_effect = lambda *a, **k: EVENTS.append(f"original {made.takes_all}")
    return made


def test_a_step_without_proposals_relays_none(world: World) -> None:
    relay = relayed_by(world)
    result = world.decode(decode_batch(THREE))
    assert not relay.takes_all
    given = vars(result.next_draft_input)
    assert given.pop("bonus_tokens") is result.next_token_ids
    assert given == {"num_tokens_per_req": 1, "num_tokens_for_logprob_per_req": 1}


def test_all_that_sglang_itself_does_is_relayed_whole(world: World) -> None:
    relay = relayed_by(world)
    world.decode(decode_batch(TWO))
    world.decode(decode_batch(THREE))
    world.original.side_effect = lambda *a, **k: EVENTS.append(relay.takes_all) or PREFILLED
    world.decode(extend_batch({3: 4}))
    world.decode(decode_batch(THREE))
    assert not relay.takes_all
    world.decode(decode_batch(TWO))
    assert [event for event in EVENTS if event is True or str(event).startswith("orig")] == [
        "original True", True, True,
    ]  # fmt: skip
    assert relay.takes_all


def test_the_resume_fills_what_was_not_relayed(world: World) -> None:
    relayed_by(world)
    last = world.decode(decode_batch(THREE)).next_draft_input
    batch = decode_batch(TWO, spec_info=last)
    last.bonus_tokens = last.bonus_tokens[:2]
    _, result = resume(world, batch)
    assert result.next_draft_input is last


def test_a_draft_that_extends_on_every_step_relays_its_proposals(own_extend: World) -> None:
    relay = relayed_by(own_extend)
    result = own_extend.decode(decode_batch(THREE))
    assert relay.takes_all
    assert tuple(result.next_draft_input.topk_p.shape) == (3, TOPK)


# ---------------------------------------------------------------------------- other drafts


def test_a_draft_without_kv_only_writes_extends_on_every_target_only_step(
    own_extend: World,
) -> None:
    result = own_extend.decode(
        decode_batch(THREE), on_publish=lambda lengths: EVENTS.append("publish")
    )
    assert EVENTS == ["publish", "target", "draft contexts", "draft extend"]
    view, given = own_extend.draft_extend.call_args.args
    assert equal(view.seq_lens, [7, 9, 5])
    assert equal(given.next_token_ids[::WIDTH], [71, 94, 52])
    assert equal(
        given.logits_output.hidden_states[::WIDTH],
        [hidden_of(1, 7), hidden_of(4, 9), hidden_of(2, 5)],
    )
    assert equal(given.new_seq_lens, [8, 10, 6])
    assert given.next_draft_input is result.next_draft_input
    own_extend.decode(decode_batch({1: 8, 4: 10, 2: 6}))
    assert own_extend.draft_extend.call_count == 2
    assert own_extend.step.counts.draft_tokens_warmed == 6


def test_such_a_draft_needs_no_extend_on_resume(own_extend: World) -> None:
    own_extend.decode(decode_batch(THREE))
    own_extend.decode(decode_batch(TWO))
    assert own_extend.step.policy.mode is Mode.SPECULATING
    assert own_extend.draft_extend.call_count == 1
    own_extend.original.assert_called_once()


def test_such_a_draft_keeps_no_hidden_states(own_extend: World) -> None:
    own_extend.decode(decode_batch(THREE))
    assert own_extend.step._warm_draft is None
    prefill(own_extend, extend_batch({3: 4}))


def test_a_standalone_draft_reads_no_hidden_states(mocker: MockerFixture) -> None:
    world = World(mocker, standalone=True)
    result = world.decode(decode_batch(THREE))
    assert world.target.call_args.kwargs == {"capture_hidden_mode": CaptureHiddenMode.NULL}
    assert result.next_draft_input.hidden_states is None
    _, given = world.draft_extend.call_args.args
    assert given.logits_output.hidden_states is None
    assert equal(given.next_token_ids, [71, 0, 0, 94, 0, 0, 52, 0, 0])


# ---------------------------------------------------------------------------- graphs, switches


def test_with_graphs_the_target_runs_in_their_place(world: World) -> None:
    inside: list[bool] = []

    class Graphs:
        @contextmanager
        def in_place(self) -> Any:
            inside.append(True)
            yield
            inside.pop()

    world.target.side_effect = seen_by(world.target.side_effect, inside)
    world.step._target_graphs = Graphs()
    world.decode(decode_batch(THREE))
    assert EVENTS == ["target inside", "target"]
    assert inside == []


def seen_by(target: Callable[..., Any], inside: list[bool]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if inside:
            EVENTS.append("target inside")
        return target(*args, **kwargs)

    return wrapped


def test_each_switch_is_logged_once(world: World, mocker: MockerFixture) -> None:
    log_switch = mocker.patch.object(v2.observe, "log_switch")
    for lengths in (TWO, THREE, THREE, TWO, TWO):
        world.decode(decode_batch(lengths))
    switches = [call.args[0] for call in log_switch.call_args_list]
    assert [(s.to, s.batch) for s in switches] == [(Mode.TARGET_ONLY, 3), (Mode.SPECULATING, 2)]


def test_targets_with_recurrent_state_are_refused_before_serving(world: World) -> None:
    pool = world.worker.draft_worker.req_to_token_pool
    world.worker.draft_worker.req_to_token_pool = HybridReqToTokenPool(**vars(pool))
    with pytest.raises(SettingsError, match=r"batch-threshold 2 .*Mamba or linear-attention"):
        v2.TargetOnlyStep(world.worker, Settings(2, 2, 1))
