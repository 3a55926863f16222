"""The plugin's state as control requests see it, on a real policy and without SGLang."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from sglang_spec_ext import __version__
from sglang_spec_ext.args import Settings
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode
from sglang_spec_ext.runtime_state import RuntimeState

SETTINGS = Settings(4, 3, 2)


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
