"""The counters of one scheduler process."""

from __future__ import annotations

from sglang_spec_ext.args import Settings
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode

SPECULATING, TARGET_ONLY = Mode.SPECULATING, Mode.TARGET_ONLY


def test_nothing_has_happened_at_first() -> None:
    counts = Counts()
    assert counts.steps == counts.tokens == counts.switches == {SPECULATING: 0, TARGET_ONLY: 0}
    assert (counts.resumes, counts.draft_tokens_warmed, counts.accept_length) == (0, 0, None)


def test_steps_and_switches_of_a_policy() -> None:
    counts = Counts()
    policy = BatchThresholdPolicy(Settings(4, 4, 1), counts.step)
    for batch in [1, 5, 6, 2, 3, 9]:
        policy.step(batch)
    assert counts.steps == {SPECULATING: 3, TARGET_ONLY: 3}
    assert counts.switches == {TARGET_ONLY: 2, SPECULATING: 1}
    assert counts.resumes == 1


def test_accept_length_is_over_the_verifies_alone() -> None:
    counts = Counts()
    counts.committed(SPECULATING, 2, 7)
    counts.committed(TARGET_ONLY, 6, 6)
    counts.committed(SPECULATING, 1, 1)
    assert counts.tokens == {SPECULATING: 8, TARGET_ONLY: 6}
    assert counts.accept_length == 8 / 3


def test_warmed_rows_add_up() -> None:
    counts = Counts()
    for rows in (5, 6):
        counts.warmed(rows)
    assert counts.draft_tokens_warmed == 11
