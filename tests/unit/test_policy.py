"""The switch between the two modes, as tables of batch sizes and what they lead to."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from sglang_spec_ext.args import Settings
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode, Switch

SPECULATING, TARGET_ONLY = Mode.SPECULATING, Mode.TARGET_ONLY


def modes(settings: Settings, batches: list[int]) -> str:
    """The mode of each step: S for speculating, T for target-only."""
    policy = BatchThresholdPolicy(settings)
    letters = []
    for batch in batches:
        policy.step(batch)
        letters.append("S" if policy.mode is SPECULATING else "T")
    return "".join(letters)


@pytest.mark.parametrize(
    ("n", "m", "k", "batches", "expected"),
    [
        pytest.param(4, 4, 1, [1, 3, 4, 4], "SSSS", id="exactly N speculates"),
        pytest.param(4, 4, 1, [4, 5, 6], "STT", id="N plus one does not"),
        pytest.param(4, 4, 1, [5], "T", id="the first step can be the switch"),
        pytest.param(4, 4, 1, [5, 4], "TS", id="K 1 resumes in the next step"),
        pytest.param(4, 2, 1, [5, 4, 3, 2], "TTTS", id="M is where it resumes"),
        pytest.param(4, 2, 1, [5, 2, 3, 4, 5], "TSSST", id="M does not matter while speculating"),
        pytest.param(4, 0, 1, [5, 1, 1, 0], "TTTS", id="M 0 resumes only when empty"),
        pytest.param(4, 4, 4, [5, 1, 1, 1, 1], "TTTTS", id="K steps at least"),
        pytest.param(4, 4, 4, [5, 5, 5, 5, 5, 1], "TTTTTS", id="K has passed already"),
        pytest.param(4, 4, 3, [5, 1, 9, 1], "TTTS", id="K counts every step in the mode"),
        pytest.param(4, 4, 8, [1, 5, 1, 5], "STTT", id="K never delays the way to target-only"),
        pytest.param(4, 4, 2, [5, 4, 4, 5], "TTST", id="not the second switch either"),
        pytest.param(4, 4, 1, [5, 4, 5, 4], "TSTS", id="alternating around N, K 1"),
        pytest.param(4, 4, 4, [5, 4, 5, 4, 5, 4, 5, 4], "TTTTTSTT", id="alternating around N, K 4"),
        pytest.param(4, 3, 4, [5, 4, 5, 4, 5, 4, 5, 4], "TTTTTTTT", id="alternating, M below N"),
        pytest.param(4, 4, 1, [0, 0], "SS", id="an empty batch is not above N"),
        pytest.param(4, 4, 1, [5, 0], "TS", id="an empty batch is at most M"),
        pytest.param(0, 0, 1, [1, 1, 0, 1, 0, 0], "TTTTTT", id="N 0 never speculates"),
        pytest.param(0, 0, 1, [0, 1], "TT", id="N 0 never, not even with nothing to run"),
        pytest.param(10**9, 10**9, 1, [1, 5000], "SS", id="an N that nothing exceeds"),
    ],
)
def test_mode_of_each_step(n: int, m: int, k: int, batches: list[int], expected: str) -> None:
    assert modes(Settings(n, m, k), batches) == expected


def test_a_joining_prefill_counts_only_once_it_decodes() -> None:
    # The caller steps the policy on decode batches alone, so a prefill between two of them is no
    # step: neither its requests nor its time count.
    policy = BatchThresholdPolicy(Settings(2, 2, 2))
    assert policy.step(2) is None
    # two requests prefill here: no call
    assert policy.mode is SPECULATING
    assert policy.step(4) == Switch(TARGET_ONLY, batch=4, steps_since_last=1)


def test_a_switch_says_to_which_mode_at_which_batch_after_how_many_steps() -> None:
    policy = BatchThresholdPolicy(Settings(4, 3, 2))
    switches = [policy.step(batch) for batch in [1, 2, 6, 4, 3, 2, 2, 5]]
    assert switches == [
        None,
        None,
        Switch(TARGET_ONLY, batch=6, steps_since_last=2),
        None,
        Switch(SPECULATING, batch=3, steps_since_last=2),
        None,
        None,
        Switch(TARGET_ONLY, batch=5, steps_since_last=3),
    ]


def test_a_switch_in_the_first_step_follows_no_steps() -> None:
    policy = BatchThresholdPolicy(Settings(1, 1, 1))
    assert policy.step(2) == Switch(TARGET_ONLY, batch=2, steps_since_last=0)


def random_runs() -> list[tuple[Settings, list[int]]]:
    generator = random.Random(20240607)
    runs = []
    for _ in range(200):
        n = generator.randint(0, 8)
        settings = Settings(n, generator.randint(0, n), generator.randint(1, 6))
        runs.append((settings, [generator.randint(0, 12) for _ in range(150)]))
    return runs


def test_never_speculates_above_n_whatever_came_before() -> None:
    for settings, batches in random_runs():
        policy = BatchThresholdPolicy(settings)
        for batch in batches:
            policy.step(batch)
            assert not (batch > settings.threshold and policy.mode is SPECULATING), settings


def test_resumes_only_at_m_or_below_and_after_k_steps() -> None:
    for settings, batches in random_runs():
        policy = BatchThresholdPolicy(settings)
        resumed = 0
        for batch in batches:
            switch = policy.step(batch)
            if switch is not None and switch.to is SPECULATING:
                resumed += 1
                assert batch <= settings.resume_threshold, settings
                assert switch.steps_since_last >= settings.min_steps, settings
        assert resumed > 0 or settings.resume_threshold < 2, settings


def test_switches_are_bounded_by_the_steps() -> None:
    for settings, batches in random_runs():
        policy = BatchThresholdPolicy(settings)
        switches = [s for s in map(policy.step, batches) if s is not None]
        # one round trip takes K steps target-only and one speculating
        assert len(switches) <= 2 * (len(batches) // (settings.min_steps + 1) + 1), settings
        assert all(a.to is not b.to for a, b in pairwise(switches))


def test_switch_steps_add_up_to_the_steps_taken() -> None:
    for settings, batches in random_runs():
        policy = BatchThresholdPolicy(settings)
        last = 0
        for at, batch in enumerate(batches):
            switch = policy.step(batch)
            if switch is not None:
                assert switch.steps_since_last == at - last
                last = at


def test_ranks_that_see_the_same_counts_decide_the_same() -> None:
    for settings, batches in random_runs()[:20]:
        first, second = BatchThresholdPolicy(settings), BatchThresholdPolicy(settings)
        assert [first.step(b) for b in batches] == [second.step(b) for b in batches]


def test_each_step_is_told_with_its_mode_its_batch_and_its_switch() -> None:
    told: list[tuple[Mode, int, Switch | None]] = []
    policy = BatchThresholdPolicy(Settings(4, 4, 1), lambda *step: told.append(step))
    switches = [policy.step(batch) for batch in [1, 5, 6, 2]]
    modes = [SPECULATING, TARGET_ONLY, TARGET_ONLY, SPECULATING]
    assert told == list(zip(modes, [1, 5, 6, 2], switches, strict=True))
    assert policy.steps_in_mode == 1


@pytest.mark.parametrize(
    ("settings", "batch", "mode"),
    [
        pytest.param(Settings(5, 5, 1), 5, SPECULATING, id="a higher N lets the batch speculate"),
        pytest.param(Settings(5, 3, 1), 5, TARGET_ONLY, id="but not above the M that goes with it"),
        pytest.param(Settings(5, 5, 9), 5, TARGET_ONLY, id="nor before K steps"),
        pytest.param(Settings(0, 0, 1), 1, TARGET_ONLY, id="0 holds from the next step on"),
    ],
)
def test_new_settings_hold_from_the_next_step_on(
    settings: Settings, batch: int, mode: Mode
) -> None:
    policy = BatchThresholdPolicy(Settings(4, 4, 1))
    for _ in range(3):
        policy.step(5)
    policy.settings = settings
    assert policy.mode is TARGET_ONLY
    policy.step(batch)
    assert policy.mode is mode
