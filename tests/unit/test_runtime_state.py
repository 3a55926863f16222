"""The plugin's state as control requests see it, on a real policy and without SGLang."""

from __future__ import annotations

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_spec_ext import __version__, compat, observe
from sglang_spec_ext.args import Settings
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode
from sglang_spec_ext.runtime_state import RuntimeState, relay_update

SETTINGS = Settings(4, 3, 2)
N, M = "speculative_disable_batch_threshold", "speculative_resume_batch_threshold"


def step(**fields: Any) -> Any:
    """What RuntimeState reads of a target-only step."""
    counts = Counts()
    policy = BatchThresholdPolicy(SETTINGS, counts.step)
    values = {"own_extend_reason": None, "largest_threshold": None}
    return SimpleNamespace(policy=policy, counts=counts, **values | fields)


def test_the_state_of_a_server_that_has_done_nothing() -> None:
    none = {"speculating": 0, "target-only": 0}
    assert RuntimeState(step()).describe() == {
        "version": __version__,
        "mode": "speculating",
        "threshold": 4,
        "resume_threshold": 3,
        "min_steps": 2,
        "largest_threshold": None,
        "steps_in_mode": 0,
        "switches": none,
        "resumes": 0,
        "steps": none,
        "tokens": none,
        "accept_length": None,
        "draft_tokens_warmed": 0,
        "draft_kept_warm_by": "KV-only writes",
        "refused": None,
    }


def test_the_state_follows_what_happens() -> None:
    this = step(own_extend_reason="it has 2 layers", largest_threshold=8)
    for batch in (1, 6, 6, 6, 3, 7, 7):
        this.policy.step(batch)
    this.counts.committed(Mode.SPECULATING, 2, 7)
    this.counts.committed(Mode.TARGET_ONLY, 6, 6)
    this.counts.warmed(6)
    state = RuntimeState(this).describe()
    assert state["mode"] == "target-only"
    assert state["switches"] == {"speculating": 1, "target-only": 2}
    assert (state["resumes"], state["steps_in_mode"], state["largest_threshold"]) == (1, 2, 8)
    assert state["steps"] == {"speculating": 2, "target-only": 5}
    assert state["tokens"] == {"speculating": 7, "target-only": 6}
    assert (state["accept_length"], state["draft_tokens_warmed"]) == (3.5, 6)
    warmth = "SGLang's draft extend on every step (it has 2 layers)"
    assert state["draft_kept_warm_by"] == warmth
    assert json.loads(json.dumps(state)) == state


# ---------------------------------------------------------------------------- changing it


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(observe, "log_on_first_rank", logged.append)
    api = ModuleType("sglang_spec_ext.compat.sglang_api")
    api.internal_state_answer = lambda updated: Answer(updated)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, api.__name__, api)
    monkeypatch.setattr(compat, "sglang_api", api, raising=False)
    return logged


class Answer(SimpleNamespace):
    def __init__(self, updated: bool) -> None:
        super().__init__(updated=updated)


class Rank:
    """One scheduler process; SGLang itself knows the key `own` and refuses negative values."""

    def __init__(self, **fields: Any) -> None:
        self.step = step(**fields)
        self.state = RuntimeState(self.step)
        self.own: int | None = None

    def set(self, **asked: Any) -> bool:
        answer = self.state.update(Rank.original, self, SimpleNamespace(server_args=asked))
        return bool(answer.updated)

    def original(self, request: Any) -> Answer:
        assert set(request.server_args) <= {"own"}
        if request.server_args["own"] < 0:
            return Answer(False)
        self.own = request.server_args["own"]
        return Answer(True)

    @property
    def settings(self) -> Settings:
        settings: Settings = self.step.policy.settings
        return settings


def test_a_change_holds_and_is_one_line(lines: list[str]) -> None:
    rank = Rank()
    assert rank.set(**{N: 8, M: 6})
    assert rank.settings == Settings(8, 6, 2)
    assert rank.state.describe()["threshold"] == 8
    assert lines == ["spec-ext settings: N=4, M=3, K=2 -> N=8, M=6, K=2 (by /set_internal_state)"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({N: -1}, f"{N} -1 is not a whole number >= 0"),
        ({N: 4.5}, f"{N} 4.5 is not a whole number >= 0"),
        ({N: True}, f"{N} True is not a whole number >= 0"),
        ({M: 5}, f"{M} 5 is above {N} 4"),
        ({N: 2}, f"{M} 3 is above {N} 2"),
        ({N: 17}, f"{N} 17 is above 16, the largest batch for which this server has captured"),
        ({N: 8, M: 9, "own": 1}, f"{M} 9 is above {N} 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason_and_changes_nothing(
    lines: list[str], asked: dict[str, Any], words: str
) -> None:
    rank = Rank(largest_threshold=16)
    assert not rank.set(**asked)
    assert (rank.settings, rank.own) == (SETTINGS, None)
    assert words in rank.state.describe()["refused"]
    (line,) = lines
    assert line.startswith("spec-ext: /set_internal_state changes nothing: ")
    assert words in line


def test_the_next_change_forgets_the_refusal(lines: list[str]) -> None:
    rank = Rank()
    assert not rank.set(**{N: -1})
    assert rank.set(**{N: 5})
    assert rank.state.describe()["refused"] is None


def test_what_is_not_ours_goes_to_sglang(lines: list[str]) -> None:
    rank = Rank()
    assert rank.set(own=3)
    assert not rank.set(own=-1)
    assert (rank.own, rank.settings, lines) == (3, SETTINGS, [])


def test_a_request_for_both_is_done_as_a_whole(lines: list[str]) -> None:
    rank = Rank()
    assert rank.set(own=3, **{N: 5})
    assert (rank.own, rank.settings.threshold) == (3, 5)
    assert not rank.set(own=-1, **{N: 6})
    assert (rank.own, rank.settings.threshold) == (3, 5)


def test_all_ranks_come_to_the_same(lines: list[str]) -> None:
    ranks = [Rank(), Rank()]
    batches = [1, 5, 7, 3, 6, 6, 6, 2, 7]
    modes: list[list[Mode]] = [[], []]
    for at, batch in enumerate(batches):
        for rank, seen in zip(ranks, modes, strict=True):
            if at == 4:
                assert rank.set(**{N: 6, M: 6})
            rank.step.policy.step(batch)
            seen.append(rank.step.policy.mode)
    assert modes[0] == modes[1]
    # 6 requests speculate from the change on, once K steps have passed
    assert modes[0][4:] == [Mode.SPECULATING] * 4 + [Mode.TARGET_ONLY]


# ---------------------------------------------------------------------------- the answer


class Manager:
    """The HTTP process's side: asks all data-parallel ranks."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks = ranks

    async def set_internal_state(self, request: Any) -> list[bool]:
        return [rank.set(**request.server_args) for rank in self.ranks]

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return [{"sglang_spec_ext": rank.state.describe()} for rank in self.ranks]


def relay(manager: Manager, **asked: Any) -> Any:
    request = SimpleNamespace(server_args=asked)
    return asyncio.run(relay_update(Manager.set_internal_state, manager, request))


def test_a_refusal_is_answered_with_its_reason(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastapi = ModuleType("fastapi")

    class HTTPException(Exception):
        pass

    fastapi.HTTPException = HTTPException  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastapi", fastapi)
    with pytest.raises(HTTPException) as refused:
        relay(Manager(Rank()), **{N: -1})
    code, reason = refused.value.args
    assert code == 400
    assert reason.startswith(f"{N} -1 is not a whole number >= 0.")


def test_an_answer_of_sglang_is_passed_on(lines: list[str]) -> None:
    assert relay(Manager(Rank(), Rank()), **{N: 9}) == [True, True]
    assert relay(Manager(Rank()), own=-1) == [False]
    assert relay(Manager(Rank()), own=-1, **{N: 9}) == [False]
