"""What is shown: a table on terminals of any width, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from wait_logs import boot_old, until
from wait_replay import Replay

from sglang_spec_ext.ops.wait.boot import BootState, Outcome, Verdict
from sglang_spec_ext.ops.wait.patterns import Phase
from sglang_spec_ext.ops.wait.render import LiveView, PlainView, as_json, print_verdict


def loading(ranks: int = 8, through: int = 6) -> Replay:
    log = until(boot_old(ranks), "4/4").raw("")
    for rank in range(through):
        log.say("Load weight end. type=X, avail mem=62.1 GB, mem usage=15.0 GB.", rank)
    replay = Replay()
    replay.run(log.lines)
    return replay


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    replay = loading()
    replay.boot.compiling = "DeepGEMM JIT"
    replay.boot.notes["x"] = "a note that is much longer than any narrow terminal can be " * 2
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with LiveView(console, replay.boot) as view:
        view.show(replay.now + 30)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = console.render_lines(view._draw(replay.now + 30), pad=False)
    assert max(sum(part.cell_length for part in line) for line in lines) <= width
    assert "target" in text
    assert "6 of 8 ranks" in text
    assert "slow but alive" in text


def test_a_pipe_gets_plain_lines_and_each_only_once() -> None:
    replay = loading()
    console = Console(file=io.StringIO(), width=40)
    view = PlainView(console, replay.boot)
    for second in range(20):
        view.show(replay.now + second)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert len(lines) == len(set(lines)) == 4
    assert lines[-1].endswith("target weights ... 4/4, 6 of 8 ranks")
    view.show(replay.now + 60)
    assert len(console.file.getvalue().splitlines()) == 5  # type: ignore[attr-defined]


def test_the_verdict_and_its_json_say_the_same() -> None:
    verdict = Verdict(
        Outcome.CRASHED, Phase.GRAPHS, "[bold]ValueError[/]: x", "TP3", "do this", ("a", "b")
    )
    console = Console(file=io.StringIO(), width=40)
    print_verdict(console, verdict, 75.4)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.splitlines()[0] == (
        "CRASHED after 1:15 in phase 'graph capture' [TP3]: [bold]ValueError[/]: x"
    )
    assert "what to do: do this" in text
    answer = as_json(BootState(0.0), verdict, 1, 75.4)
    assert (answer["outcome"], answer["exit_code"], answer["rank"]) == ("crashed", 1, "TP3")
    assert answer["evidence"] == ["a", "b"]
