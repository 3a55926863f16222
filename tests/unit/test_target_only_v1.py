"""The spec-v1 target-only step on small CPU tensors, with stand-ins for SGLang's classes."""

from __future__ import annotations

import dataclasses
import enum
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import step_stand_ins
from pytest_mock import MockerFixture
from step_stand_ins import CaptureHiddenMode, ForwardMode, written

torch = pytest.importorskip("torch", reason="torch is not installed: the step works on tensors")

from sglang_spec_ext import observe  # noqa: E402
from sglang_spec_ext.args import Settings  # noqa: E402
from sglang_spec_ext.compat import sglang_v1  # noqa: E402
from sglang_spec_ext.policy import Mode  # noqa: E402
from sglang_spec_ext.target_only import step, v1  # noqa: E402

POOL, CONTEXT, WIDTH = 6, 32, 3
VOCABULARY = 100


class Algorithm(enum.Enum):
    NONE = 0
    EAGLE3 = 1
    STANDALONE = 2

    def is_standalone(self) -> bool:
        return self is Algorithm.STANDALONE


@dataclasses.dataclass
class DraftInput:
    """SGLang 0.5.9's, and what it has of the draft extend."""

    hidden_states: Any = None
    topk_p: Any = None
    verified_id: Any = None
    accept_length: Any = None
    accept_length_cpu: Any = None
    seq_lens_for_draft_extend: Any = None
    seq_lens_for_draft_extend_cpu: Any = None
    req_pool_indices_for_draft_extend: Any = None

    def filter_batch(self, new_indices: Any, has_been_filtered: bool = True) -> None:
        assert has_been_filtered is False
        self.verified_id = self.verified_id[new_indices]


@dataclasses.dataclass
class MiddleDraftInput(DraftInput):
    """0.5.11's: other names."""

    num_accepted_drafts: Any = None
    num_accepted_drafts_cpu: Any = None
    num_accepted_tokens: Any = None
    num_accepted_tokens_cpu: Any = None


@dataclasses.dataclass
class LastDraftInput:
    """0.5.12's: the extend has an input of its own, and STANDALONE reads no hidden states."""

    hidden_states: Any = None
    bonus_tokens: Any = None

    @classmethod
    def hidden_size_for(cls, worker: Any) -> int:
        return WIDTH


@dataclasses.dataclass
class DraftExtendInput:
    hidden_states: Any = None
    num_correct_drafts: Any = None
    num_accept_tokens: Any = None
    num_accept_tokens_cpu: Any = None
    input_ids: Any = None
    seq_lens: Any = None
    seq_lens_cpu: Any = None
    req_pool_indices: Any = None
    bonus_tokens: Any = None


class Writer(step_stand_ins.Writer):
    hidden_width = WIDTH


class Release:
    """What differs between the releases: the class of the draft input."""

    draft_input: Any = DraftInput


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> Any:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module("sglang.srt.model_executor.forward_batch_info", CaptureHiddenMode=CaptureHiddenMode)
    module("sglang.srt.speculative.spec_info", SpeculativeAlgorithm=Algorithm)
    info = module("sglang.srt.speculative.eagle_info")
    module("sglang.srt.speculative", eagle_info=info)

    @contextmanager
    def contexts(draft: Any) -> Any:
        yield

    names = {"draft_input": lambda: Release.draft_input, "hybrid_request_pool": lambda: str}
    api = step.sglang_api
    monkeypatch.setattr(Release, "draft_input", DraftInput)
    monkeypatch.setattr(api, "resolve", lambda name: names[name]())
    monkeypatch.setattr(api, "draft_contexts", contexts)
    place = SimpleNamespace(qualname="CudaGraphRunner")
    monkeypatch.setattr(api, "_place", lambda name: place)
    monkeypatch.setattr(step, "DraftKVWriter", Writer)
    monkeypatch.setattr(api, "copies_draft_kv", lambda worker: worker.hicache)
    monkeypatch.setattr(Writer, "reason", None)
    monkeypatch.setattr(observe, "log_on_first_rank", lambda text: None)


def slot(pool_index: int, position: int) -> int:
    return 1000 * pool_index + position


class Request(SimpleNamespace):
    def finished(self) -> bool:
        return bool(self.done)


class Batch(SimpleNamespace):
    """SGLang's ScheduleBatch; `prepare_for_decode` is that of a plain server."""

    def prepare_for_decode(self) -> None:
        assert self.spec_algorithm is Algorithm.NONE
        self.forward_mode = ForwardMode.DECODE
        self.input_ids, self.output_ids = self.output_ids, None
        pairs = zip(self.req_pool_indices.tolist(), self.seq_lens.tolist(), strict=True)
        self.out_cache_loc = torch.tensor([slot(i, p) for i, p in pairs])
        for lengths in (self.seq_lens, self.seq_lens_cpu, self.orig_seq_lens):
            lengths.add_(1)
        self.seq_lens_sum += len(self.reqs)

    def copy(self) -> Batch:
        return Batch(**vars(self))

    def get_model_worker_batch(self) -> SimpleNamespace:
        assert self.spec_algorithm is Algorithm.NONE
        assert self.spec_info is None
        return SimpleNamespace(
            input_ids=self.input_ids,
            seq_lens=self.seq_lens.clone(),
            req_pool_indices=self.req_pool_indices,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )


class Result(SimpleNamespace):
    """SGLang's GenerationBatchResult."""

    copy_done: Any = None

    def copy_to_cpu(self, return_logprob: bool) -> None:
        # nothing is on the device here: mark what a commit may read
        self.next_token_ids = OnHost(self.next_token_ids)
        self.copy_done.record()


class OnHost:
    on_host = True

    def __init__(self, tensor: Any) -> None:
        self.tolist = tensor.tolist


def decode_batch(lengths: dict[int, int], draft_input: Any = None) -> Batch:
    """Sequence length by request pool index; bonus token 50 + pool index."""
    pool_indices = torch.tensor(list(lengths))
    seq_lens = torch.tensor(list(lengths.values()))
    bonus = (50 + pool_indices).to(torch.int32)
    return Batch(
        forward_mode=ForwardMode.DECODE,
        is_extend_in_batch=False,
        device="cpu",
        return_logprob=False,
        has_grammar=False,
        return_hidden_states=False,
        reqs=[Request(done=False, is_retracted=False) for _ in lengths],
        req_pool_indices=pool_indices,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.clone(),
        orig_seq_lens=torch.zeros(len(lengths), dtype=torch.int32),
        seq_lens_sum=-1,
        spec_algorithm=Algorithm.EAGLE3,
        spec_info=draft_input or DraftInput(verified_id=bonus, topk_p="kept"),
        sampling_info=SimpleNamespace(vocab_mask="this step's", has_custom_logit_processor=False),
        output_ids=None,
        out_cache_loc=None,
    )


class World:
    """A worker whose target samples `pool index + 10 * position`, and a step on top of it."""

    def __init__(self, mocker: MockerFixture, algorithm: Algorithm = Algorithm.EAGLE3) -> None:
        table = torch.tensor([[slot(i, p) for p in range(CONTEXT)] for i in range(POOL)])
        self.target = mocker.Mock(side_effect=self._target)
        self.extend = mocker.Mock(side_effect=lambda batch: None)
        self.original = mocker.Mock(side_effect=lambda *a, **k: "SGLang's own")
        self.runner = SimpleNamespace(
            max_running_requests=None, device="cpu", attn_backend="backend", graph_runner="verify"
        )
        self.worker = SimpleNamespace(
            topk=1,
            speculative_algorithm=algorithm,
            hicache=False,
            draft_model_runner=SimpleNamespace(),
            draft_tp_context=None,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            forward_draft_extend_after_decode=self.extend,
            target_worker=SimpleNamespace(
                forward_batch_generation=self.target, model_runner=self.runner
            ),
        )
        self.step = v1.TargetOnlyStep(self.worker, Settings(2, 2, 1))

    def _target(self, forward: Any) -> SimpleNamespace:
        assert self.runner.graph_runner is None, "the verify graphs would be replayed"
        positions = forward.seq_lens - 1
        hidden = (forward.req_pool_indices * 100 + positions).float()[:, None].expand(-1, WIDTH)
        captured = forward.capture_hidden_mode is CaptureHiddenMode.FULL
        return Result(
            next_token_ids=((forward.req_pool_indices + 10 * positions) % VOCABULARY).int(),
            logits_output=SimpleNamespace(hidden_states=hidden if captured else None),
        )

    def decode(self, batch: Any) -> Any:
        return self.step.forward(self.original, batch)


@pytest.fixture
def world(mocker: MockerFixture) -> World:
    return World(mocker)


THREE = {1: 7, 4: 9, 2: 5}  # above N=2
TWO = {1: 8, 4: 10}  # at N


def hidden_of(pool_index: int, position: int) -> list[float]:
    return [float(pool_index * 100 + position)] * WIDTH


# ---------------------------------------------------------------------------- a target-only step


def test_speculating_is_sglangs_own_step(world: World) -> None:
    batch = decode_batch(TWO)
    assert world.decode(batch) == "SGLang's own"
    world.original.assert_called_once_with(world.worker, batch)
    world.target.assert_not_called()


def test_the_target_decodes_the_bonus_tokens_as_a_plain_servers(world: World) -> None:
    batch = decode_batch(THREE)
    result = world.decode(batch)
    ((forward,), _) = world.target.call_args
    assert forward.input_ids.tolist() == [51, 54, 52]
    assert forward.input_ids.dtype == torch.int64
    assert forward.seq_lens.tolist() == [8, 10, 6]
    assert forward.capture_hidden_mode is CaptureHiddenMode.FULL
    assert observe.is_target_only(result)
    world.original.assert_not_called()


def test_afterwards_the_batch_is_a_speculative_servers_again(world: World) -> None:
    batch = decode_batch(THREE)
    draft_input = batch.spec_info
    world.decode(batch)
    assert batch.spec_algorithm is Algorithm.EAGLE3
    assert batch.spec_info is draft_input
    assert world.runner.graph_runner == "verify"
    assert world.runner.attn_backend == "backend"
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [8, 10, 6]
    assert batch.seq_lens_sum == 8 + 10 + 6
    assert batch.orig_seq_lens.tolist() == [8, 10, 6]
    assert batch.orig_seq_lens.dtype == torch.int32
    # the next verify would apply a mask that stays behind
    assert batch.sampling_info.vocab_mask is None


def test_a_failing_forward_leaves_the_runner_and_the_batch_as_they_were(world: World) -> None:
    batch = decode_batch(THREE)
    draft_input = batch.spec_info
    world.target.side_effect = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        world.decode(batch)
    assert (batch.spec_algorithm, batch.spec_info) == (Algorithm.EAGLE3, draft_input)
    assert world.runner.graph_runner == "verify"


@pytest.mark.parametrize("field", ["verified_id", "bonus_tokens"])
def test_the_sampled_tokens_are_the_next_bonus(world: World, field: str) -> None:
    bonus = torch.tensor([51, 54, 52])
    made = DraftInput(verified_id=bonus) if field == "verified_id" else LastDraftInput(None, bonus)
    batch = decode_batch(THREE, made)
    world.decode(batch)
    assert getattr(batch.spec_info, field).tolist() == [71, 94, 52]


def test_the_drafts_kv_is_written_for_the_position_just_decoded(world: World) -> None:
    world.decode(decode_batch(THREE))
    ((tokens, hidden, positions, slots),) = written(world.step)
    assert tokens.tolist() == [71, 94, 52]
    assert positions.tolist() == [7, 9, 5]
    assert slots.tolist() == [slot(1, 7), slot(4, 9), slot(2, 5)]
    assert hidden.tolist() == [hidden_of(1, 7), hidden_of(4, 9), hidden_of(2, 5)]
    world.extend.assert_not_called()


# ---------------------------------------------------------------------------- draft extend


def test_resume_extends_the_last_token_of_each_request(world: World) -> None:
    world.decode(decode_batch(THREE))
    batch = decode_batch({1: 8, 4: 10})
    seen: list[Any] = []
    world.extend.side_effect = lambda b: seen.append((b.spec_info, b.out_cache_loc))
    assert world.decode(batch) == "SGLang's own"
    ((made, slots),) = seen
    assert slots.tolist() == [slot(1, 7), slot(4, 9)]
    assert made.hidden_states.tolist() == [hidden_of(1, 7), hidden_of(4, 9)]
    assert made.verified_id.tolist() == [51, 54]
    assert made.accept_length.tolist() == made.accept_length_cpu == [0, 0]
    assert made.seq_lens_for_draft_extend is batch.seq_lens
    assert made.seq_lens_for_draft_extend_cpu is batch.seq_lens_cpu
    assert made.req_pool_indices_for_draft_extend is batch.req_pool_indices
    assert batch.spec_info is made


def test_one_resume_per_switch(world: World) -> None:
    world.decode(decode_batch(THREE))
    for _ in range(3):
        world.decode(decode_batch(TWO))
    assert world.extend.call_count == 1


def test_requests_prefilled_while_off_resume_too(world: World) -> None:
    world.decode(decode_batch(THREE))
    prefill = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_lens=[2, 3],
        req_pool_indices=torch.tensor([0, 5]),
        reqs=[],
    )
    states = torch.arange(5.0)[:, None].expand(-1, WIDTH)
    result = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states))
    world.original.side_effect = [result, "SGLang's own"]
    assert world.decode(prefill) is result
    batch = decode_batch({0: 2, 5: 3})
    world.decode(batch)
    assert batch.spec_info.hidden_states.tolist() == [[1.0] * WIDTH, [4.0] * WIDTH]


def test_the_names_of_the_middle_releases(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "draft_input", MiddleDraftInput)
    batch = decode_batch(TWO)
    sglang_v1.draft_extend(world.worker, batch, torch.tensor([5, 6]), torch.zeros(2, WIDTH))
    made = batch.spec_info
    assert made.num_accepted_drafts.tolist() == made.num_accepted_drafts_cpu == [0, 0]
    assert made.num_accepted_tokens.tolist() == made.num_accepted_tokens_cpu == [1, 1]


def test_the_last_releases_make_the_next_draft_input_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Release, "draft_input", LastDraftInput)
    info: Any = sys.modules["sglang.srt.speculative.eagle_info"]
    monkeypatch.setattr(info, "EagleDraftExtendInput", DraftExtendInput, raising=False)
    batch = decode_batch(TWO)
    seen: list[Any] = []

    def extend(b: Any) -> LastDraftInput:
        seen.append(b.spec_info)
        return LastDraftInput("next")

    world.extend.side_effect = extend
    sglang_v1.draft_extend(world.worker, batch, torch.tensor([5, 6]), torch.zeros(2, WIDTH))
    (made,) = seen
    assert isinstance(made, DraftExtendInput)
    assert made.input_ids.tolist() == [5, 6]
    assert made.num_correct_drafts.tolist() == [0, 0]
    assert made.num_accept_tokens.tolist() == made.num_accept_tokens_cpu == [1, 1]
    assert made.seq_lens is batch.seq_lens
    assert made.seq_lens_cpu is batch.seq_lens_cpu
    assert made.req_pool_indices is batch.req_pool_indices
    assert made.bonus_tokens is None
    assert batch.spec_info == LastDraftInput("next")


def test_a_draft_without_a_kv_only_write_extends_on_every_step(
    mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "reason", "it has 2 layers")
    world = World(mocker)
    batch = decode_batch(THREE)
    world.decode(batch)
    assert world.extend.call_count == 1
    made = batch.spec_info
    assert made.verified_id.tolist() == [71, 94, 52]
    assert made.hidden_states.tolist() == [hidden_of(1, 7), hidden_of(4, 9), hidden_of(2, 5)]
    assert batch.out_cache_loc.tolist() == [slot(1, 7), slot(4, 9), slot(2, 5)]
    world.decode(decode_batch(TWO))
    assert world.extend.call_count == 1, "the draft input is complete: nothing to do on resume"


@pytest.mark.parametrize(("draft_input", "captured"), [(DraftInput, True), (LastDraftInput, False)])
def test_standalone_reads_hidden_states_only_in_the_first_releases(
    mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch, draft_input: Any, captured: bool
) -> None:
    monkeypatch.setattr(Release, "draft_input", draft_input)
    world = World(mocker, Algorithm.STANDALONE)
    extended = mocker.patch.object(sglang_v1, "draft_extend")
    world.decode(decode_batch(THREE))
    hidden = extended.call_args.args[3]
    assert (hidden is not None) is captured


# ---------------------------------------------------------------------------- what comes of it


class Scheduler:
    """Commits tokens as SGLang does, and ends the requests that a test names."""

    enable_overlap = False

    def __init__(self) -> None:
        self.committed: list[list[int]] = []
        """Tokens of each commit, -1 for a request that it passed over."""
        self.algorithms: list[Algorithm] = []
        self.ends: set[int] = set()
        """Tokens that end a request."""

    def commit(self, batch: Any, result: Any) -> None:
        if result.copy_done is not None:
            assert result.next_token_ids.on_host
            assert result.logits_output.hidden_states is None
        self.algorithms.append(batch.spec_algorithm)
        tokens = []
        for request, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=True):
            if self.enable_overlap and (request.finished() or request.is_retracted):
                tokens.append(-1)
                continue
            assert not request.finished()
            tokens.append(token)
            request.done = token in self.ends
        self.committed.append(tokens)


class Loop:
    """SGLang's loop without overlap around a `World`: run a batch, then process its result."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler = world, Scheduler()

    def decode(self, batch: Any) -> Any:
        result = self.world.decode(batch)
        if result != "SGLang's own":
            self.world.step.process_decode(Scheduler.commit, self.scheduler, batch, result)
        return result


@pytest.fixture
def loop(world: World) -> Loop:
    return Loop(world)


def following(batch: Any) -> Any:
    """What SGLang runs after `batch`: without its finished requests."""
    kept = [i for i, request in enumerate(batch.reqs) if not request.finished()]
    lengths = dict(zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True))
    chosen = [pair for i, pair in enumerate(lengths.items()) if i in kept]
    made = decode_batch(dict(chosen), batch.spec_info)
    made.reqs = [batch.reqs[i] for i in kept]
    return made


FIRST, SECOND = [71, 94, 52], [81, 4, 62]
"""Tokens of the first steps of `THREE`."""
FOUR = {**THREE, 3: 6}  # one can end, and it is above N still


def test_a_steps_tokens_are_committed_while_the_next_one_runs(loop: Loop) -> None:
    batch = decode_batch(THREE)
    loop.decode(batch)
    assert loop.scheduler.committed == []
    batch = following(batch)
    loop.decode(batch)
    assert loop.scheduler.committed == [FIRST]
    loop.decode(following(batch))
    assert loop.scheduler.committed == [FIRST, SECOND]
    assert loop.scheduler.algorithms == [Algorithm.NONE] * 2
    assert batch.spec_algorithm is Algorithm.EAGLE3
    assert loop.scheduler.enable_overlap is False
    assert loop.world.step.counts.tokens[Mode.TARGET_ONLY] == 6
    assert loop.world.step.counts.draft_tokens_warmed == 6


@pytest.mark.parametrize("reason", ["has_grammar", "return_hidden_states", "custom"])
def test_what_the_next_step_needs_on_the_host_is_committed_at_once(loop: Loop, reason: str) -> None:
    batch = decode_batch(THREE)
    if reason == "custom":
        batch.sampling_info.has_custom_logit_processor = True
    else:
        setattr(batch, reason, True)
    result = loop.decode(batch)
    assert loop.scheduler.committed == [FIRST]
    assert loop.scheduler.algorithms == [Algorithm.NONE]
    assert result.logits_output.hidden_states is not None


def test_a_request_that_ends_has_one_more_row_which_is_passed_over(loop: Loop) -> None:
    loop.scheduler.ends = {94}
    batch = decode_batch(FOUR)
    loop.decode(batch)
    batch = following(batch)
    loop.decode(batch)
    assert len(batch.reqs) == 4, "nobody knew when it was launched"
    assert batch.spec_info.verified_id.tolist() == [81, 62, 73], "as a verify leaves it"
    batch = following(batch)
    loop.decode(batch)
    assert loop.scheduler.committed == [[*FIRST, 63], [81, -1, 62, 73]]
    assert loop.world.step.counts.tokens[Mode.TARGET_ONLY] == 7
    assert loop.world.step.counts.draft_tokens_warmed == 7


def test_a_step_of_which_nothing_is_left_is_dropped(loop: Loop) -> None:
    loop.scheduler.ends = set(FIRST)
    batch = decode_batch(THREE)
    loop.decode(batch)
    loop.decode(following(batch))
    assert batch.spec_info.verified_id.tolist() == [], "a merge would take them for the new ones"
    loop.decode(decode_batch({0: 1, 3: 2, 5: 3}))
    assert loop.scheduler.committed == [FIRST]


def test_before_the_resume_one_step_comes_down(loop: Loop) -> None:
    """Of a step in flight nobody knows yet whom it ends, and their KV slots are free then."""
    loop.scheduler.ends = {94, 81}
    batch = decode_batch(THREE)
    loop.decode(batch)
    batch = following(batch)
    loop.decode(batch)  # commits the first, and so one ends
    batch = following(batch)
    assert loop.decode(batch) != "SGLang's own"
    assert loop.scheduler.committed == [FIRST, [81, -1, 62], [-1, 72]]
    batch = following(batch)
    assert loop.decode(batch) == "SGLang's own"
    assert loop.world.extend.call_count == 1
    assert batch.spec_info.hidden_states.tolist() == [hidden_of(2, 7)]
    assert loop.decode(batch) == "SGLang's own"
    assert loop.world.extend.call_count == 1


def prefill_of(*requests: Any) -> Any:
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_lens=[1] * len(requests),
        req_pool_indices=torch.arange(len(requests)),
        reqs=list(requests),
    )


def prefill_result(rows: int) -> Any:
    return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.ones(rows, WIDTH)))


def test_a_prefill_comes_after_the_step_in_flight(loop: Loop) -> None:
    loop.scheduler.ends = {94}
    batch = decode_batch(THREE)
    loop.decode(batch)
    seen: list[Any] = []

    def prefill(*_: Any) -> Any:
        seen.extend(loop.scheduler.committed)
        return prefill_result(1)

    loop.world.original.side_effect = prefill
    loop.world.decode(prefill_of(Request(done=False, is_retracted=False)))
    assert seen == [FIRST]
    assert batch.spec_info.verified_id.tolist() == [71, 52]


def test_a_prefill_after_a_second_step_in_flight(loop: Loop) -> None:
    """What the first step ended is not in the draft input any more when the second comes down."""
    loop.scheduler.ends = {94, 81}
    batch = decode_batch(THREE)
    loop.decode(batch)
    batch = following(batch)
    loop.decode(batch)
    loop.world.original.side_effect = lambda *_: prefill_result(1)
    loop.world.decode(prefill_of(Request(done=False, is_retracted=False)))
    assert loop.scheduler.committed == [FIRST, [81, -1, 62]]
    assert batch.spec_info.verified_id.tolist() == [62]


def test_a_retracted_request_gets_its_token_anew(loop: Loop) -> None:
    batch = decode_batch(THREE)
    loop.decode(batch)
    batch.reqs[0].is_retracted = True
    loop.world.original.side_effect = lambda *_: prefill_result(1)
    again = batch.reqs[1]  # its prefill has taken the mark off
    loop.world.decode(prefill_of(again))
    assert loop.scheduler.committed == [[-1, -1, 52]]
    assert again.is_retracted is False
    assert batch.reqs[0].is_retracted is True


def test_a_request_prefilled_before_the_resume_is_warm(loop: Loop) -> None:
    """Also in between the decision to resume and the resume."""
    loop.scheduler.ends = {94}
    batch = decode_batch(THREE)
    loop.decode(batch)
    batch = following(batch)
    loop.decode(batch)
    loop.decode(following(batch))  # the step that comes down
    loop.world.original.side_effect = [prefill_result(1), "SGLang's own"]
    loop.world.decode(prefill_of(Request(done=False, is_retracted=False)))
    batch = decode_batch({0: 1})
    assert loop.decode(batch) == "SGLang's own"
    assert batch.spec_info.hidden_states.tolist() == [[1.0] * WIDTH]


def test_a_batch_changed_by_somebody_else_stops(loop: Loop) -> None:
    batch = decode_batch(THREE)
    loop.decode(batch)
    batch.spec_info.verified_id = batch.spec_info.verified_id[:2]
    loop.scheduler.ends = {94}
    with pytest.raises(RuntimeError, match="2 rows for 3 requests"):
        loop.world.decode(prefill_of())


def test_a_failing_commit_leaves_scheduler_and_batch_as_they_were(loop: Loop) -> None:
    batch = decode_batch(
        THREE,
    )
    batch.has_grammar = True
    result = loop.world.decode(batch)

    def fail(*_: Any) -> None:
        raise RuntimeError("no grammar")

    with pytest.raises(RuntimeError, match="no grammar"):
        loop.world.step.process_decode(fail, loop.scheduler, batch, result)
    assert loop.scheduler.enable_overlap is False
    assert batch.spec_algorithm is Algorithm.EAGLE3


def test_a_verify_is_left_to_sglang(world: World) -> None:
    batch, result = decode_batch(THREE), SimpleNamespace()
    batch.reqs[0].done = True

    def leave(scheduler: Any, seen: Any, committed: Any) -> str:
        assert seen.spec_algorithm is Algorithm.EAGLE3
        return "left"

    assert world.step.process_decode(leave, "scheduler", batch, result) == "left"
    assert batch.spec_info.verified_id.tolist() == [51, 54, 52], "verify has dropped it already"


# ---------------------------------------------------------------------------- CUDA graphs


class GraphRunner:
    """SGLang's CudaGraphRunner, as it is made: what it sees of the ModelRunner."""

    capture_bs = (1,)

    def __init__(
        self,
        model_runner: Any,
        *,
        attn_backend: Any = None,
        speculative_num_steps: int | None = None,
        speculative_num_draft_tokens: int | None = None,
    ) -> None:
        arguments = model_runner.server_args
        self.seen = (
            model_runner.spec_algorithm,
            attn_backend or model_runner.attn_backend,
            arguments.enable_return_hidden_states,
        )


class FirstGraphRunner(GraphRunner):
    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)


@pytest.mark.parametrize("kind", [GraphRunner, FirstGraphRunner])
@pytest.mark.parametrize("hidden", [True, False])
def test_the_plain_decode_graphs_are_captured_apart(kind: Any, hidden: bool) -> None:
    def backend(init_new_workspace: bool) -> str:
        runner.init_new_workspace = init_new_workspace
        return "new backend"

    runner = SimpleNamespace(
        device="cuda",
        spec_algorithm=Algorithm.EAGLE3,
        attn_backend="backend",
        init_new_workspace="kept",
        server_args=SimpleNamespace(enable_return_hidden_states=False),
        _get_attention_backend=backend,
    )
    runner.graph_runner = kind.__new__(kind)
    before = dict(vars(runner))
    mode = SimpleNamespace(is_full=lambda: hidden)
    made_backend, made = step.sglang_api.capture_plain_decode(runner, mode)
    assert made_backend == "new backend"
    assert made.seen == (Algorithm.NONE, "new backend", hidden)
    assert vars(runner) == before
    assert runner.server_args.enable_return_hidden_states is False
