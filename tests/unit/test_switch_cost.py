"""What `benchmarks/switch_cost.py` makes of the chunks of a request."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

TARGET_MS, VERIFY_MS, EACH = 5.0, 9.0, 40


Chunks = list[tuple[float, int]]


def request(switches: int, extra_ms: dict[bool, float], slower_ms: float = 0.0) -> Chunks:
    """Chunks of a request whose server switches every EACH steps, from target-only on.

    Args:
        extra_ms: what the first step costs besides, by whether it speculates.
        slower_ms: how much slower each step is than the one before.
    """

    def chunks() -> Iterator[tuple[float, int]]:
        now, tokens = 100.0, 1
        yield now, tokens
        for number in range((switches + 1) * EACH):
            part, place = divmod(number, EACH)
            speculates = part % 2 == 1
            step_ms = (VERIFY_MS if speculates else TARGET_MS) + number * slower_ms
            now += (step_ms + (extra_ms[speculates] if part and not place else 0.0)) / 1e3
            tokens += 4 if speculates else 1
            yield now, tokens

    return list(chunks())


def middles(chunks: Chunks, switches: int) -> list[float]:
    """Half a part after each switch, when N is set to what it is."""
    return [chunks[EACH * part + EACH // 2][0] for part in range(1, switches + 1)]


def test_the_cost_of_each_direction(switch_cost: ModuleType) -> None:
    chunks = request(6, {False: 1.5, True: 3.0})
    steps = switch_cost.steps_of(chunks)
    result = switch_cost.costs_of(steps, [0.0] * 6, middles(chunks, 6))
    assert result["costs_ms"]["to speculating"] == pytest.approx([3.0] * 3)
    assert result["costs_ms"]["to target-only"] == pytest.approx([1.5] * 3)
    assert result["costs_ms"]["no switch"] == pytest.approx([0.0] * 6, abs=1e-6)
    assert result["step_ms"] == pytest.approx({"target-only": 5.0, "speculating": 9.0})
    assert "| to speculating | 3 | 3.00 | 3.00 to 3.00 | 0.60 |" in switch_cost.table(result)


def test_steps_that_grow_with_the_text_are_no_cost(switch_cost: ModuleType) -> None:
    steps = switch_cost.steps_of(request(4, {False: 0.0, True: 0.0}, slower_ms=0.01))
    costs = switch_cost.costs_of(steps, [0.0] * 4, [])["costs_ms"]
    assert costs["to speculating"] == pytest.approx([0.0] * 2, abs=0.2)
    assert costs["to target-only"] == pytest.approx([0.0] * 2, abs=0.2)


def test_a_request_that_switches_nothing_costs_what_it_costs(switch_cost: ModuleType) -> None:
    chunks = request(2, {False: 0.0, True: 0.0})
    late = EACH + EACH // 2 + 2
    delayed = chunks[:late] + [(at + 0.002, tokens) for at, tokens in chunks[late:]]
    asked = middles(chunks, 1)
    result = switch_cost.costs_of(switch_cost.steps_of(delayed), [0.0] * 2, asked)
    assert result["costs_ms"]["no switch"] == pytest.approx([2.0])


def test_a_load_with_one_switch(switch_cost: ModuleType) -> None:
    steps = switch_cost.steps_of(request(1, {False: 0.0, True: 2.0}))
    table = switch_cost.table(switch_cost.costs_of(steps, [0.0], []))
    assert "| to target-only | 0 | - | - | - |" in table
    assert "| to speculating | 1 | 2.00 | 2.00 to 2.00 | 0.40 |" in table


def test_switches_that_do_not_show(switch_cost: ModuleType) -> None:
    steps = switch_cost.steps_of(request(2, {False: 0.0, True: 0.0}))
    with pytest.raises(switch_cost.CostError, match="shows 2 switches"):
        switch_cost.costs_of(steps, [0.0] * 3, [])


@pytest.mark.parametrize("late", [-1, 1])
@pytest.mark.parametrize("early", [-1, 1])
def test_a_switch_under_way_at_either_end_of_the_load(
    switch_cost: ModuleType, early: int, late: int
) -> None:
    """All requests are there from just before or after the first move, and up to such a one."""
    chunks = request(6, {False: 1.5, True: 3.0})
    changes = [chunks[EACH * part][0] for part in range(1, 7)]
    moved = [at - 2 * TARGET_MS / 1e3 for at in changes]  # a switch shows two steps later
    confirmed = middles(chunks, 6)
    begin, end = switch_cost.settled(
        confirmed, moved[0] + early * TARGET_MS / 1e3, moved[-1] + late * TARGET_MS / 1e3
    )
    steps = [step for step in switch_cost.steps_of(chunks) if begin < step.at < end]
    costs = switch_cost.costs_of(steps, [at for at in moved if begin < at < end], [])["costs_ms"]
    assert costs["to target-only"] == pytest.approx([1.5] * 2)
    assert costs["to speculating"] == pytest.approx([3.0] * 2)


@pytest.mark.parametrize("confirmed", [[], [1.0, 5.0], [1.0, 5.0, 9.5]])
def test_a_load_that_is_too_short(switch_cost: ModuleType, confirmed: list[float]) -> None:
    with pytest.raises(switch_cost.CostError, match="before N was moved: raise --output-tokens"):
        switch_cost.settled(confirmed, 2.0, 9.0)


def test_switches_too_close_to_each_other(
    switch_cost: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "EACH", switch_cost.AROUND)
    steps = switch_cost.steps_of(request(4, {False: 0.0, True: 0.0}))
    with pytest.raises(switch_cost.CostError, match="--period is too short"):
        switch_cost.costs_of(steps, [0.0] * 4, [])


def test_no_server(switch_cost: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert switch_cost.main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server with the threshold answers at" in capsys.readouterr().err
