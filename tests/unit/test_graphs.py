"""Which captured batch sizes are kept; capture itself needs a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from pytest_mock import MockerFixture

pytest.importorskip("torch", reason="torch is not installed: the graphs module needs it")

from sglang_spec_ext.args import Settings
from sglang_spec_ext.target_only import graphs

SIZES = [1, 2, 4, 8, 16, 24]


def expected(threshold: int) -> list[int]:
    """Every size that some batch of 1 to N requests is padded to."""
    reached = {
        next((size for size in SIZES if size >= batch), SIZES[-1])
        for batch in range(1, max(threshold, 1) + 1)
    }
    return [size for size in SIZES if size in reached]


@pytest.mark.parametrize("threshold", range(30))
def test_sizes_around_every_captured_one(threshold: int) -> None:
    assert graphs.sizes_that_speculate(SIZES, threshold) == expected(threshold)


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [(0, [1]), (1, [1]), (3, [1, 2, 4]), (4, [1, 2, 4]), (5, [1, 2, 4, 8]), (24, SIZES)],
)
def test_sizes_written_out(threshold: int, kept: list[int]) -> None:
    assert graphs.sizes_that_speculate(SIZES, threshold) == kept


def test_a_threshold_above_the_largest_keeps_all() -> None:
    assert graphs.sizes_that_speculate(SIZES, 10**6) == SIZES


def test_a_single_size_is_kept() -> None:
    assert graphs.sizes_that_speculate([8], 0) == [8]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    logged: list[str] = []
    monkeypatch.setattr(graphs, "log_on_first_rank", logged.append)
    monkeypatch.setattr(graphs, "_announced", set())
    monkeypatch.setattr(graphs, "_largest_captured", None)
    return logged


def runner(mocker: MockerFixture, *, speculative: bool, draft: bool = False) -> Any:
    made = mocker.Mock(is_draft_worker=draft)
    made.spec_algorithm.is_none.return_value = not speculative
    return made


def prune(model_runner: Any, threshold: int) -> tuple[list[int], list[int]]:
    def original(asked: Any, tokens: int, *, flag: bool) -> tuple[list[int], list[int]]:
        assert (asked, tokens, flag) == (model_runner, 3, True)
        return list(SIZES), [1, 16]

    return graphs.prune_sizes(original, Settings(threshold, threshold), model_runner, 3, flag=True)


def test_a_plain_runner_gets_the_sizes_of_a_plain_server(
    mocker: MockerFixture, lines: list[str]
) -> None:
    # the target while its plain decode graphs are captured
    target = runner(mocker, speculative=False)
    plain = mocker.patch.object(graphs.sglang_api, "plain_graph_sizes", return_value=[1, 4, 24])
    assert prune(target, 2) == ([1, 4, 24], [1])
    plain.assert_called_once_with(target.server_args, SIZES)
    assert lines == []


def test_garbage_is_not_looked_for_before_the_plain_capture(
    mocker: MockerFixture, lines: list[str]
) -> None:
    seen: list[int] = []

    def capture(*_: Any) -> tuple[Any, Any]:
        seen.append(gc.get_freeze_count())
        return "backend", mocker.Mock(capture_bs=[1, 2])

    mocker.patch.object(graphs.torch.cuda, "mem_get_info", return_value=(0, 0))
    mocker.patch.object(graphs.sglang_api, "capture_plain_decode", capture)
    assert graphs.TargetGraphs(mocker.Mock(), "full").sizes == [1, 2]
    mocker.patch.object(graphs.sglang_api, "capture_plain_decode", side_effect=RuntimeError)
    with pytest.raises(RuntimeError):
        graphs.TargetGraphs(mocker.Mock(), "full")
    assert seen[0] > 10_000 and gc.get_freeze_count() == 0


def test_a_speculative_runner_keeps_what_can_speculate(
    mocker: MockerFixture, lines: list[str]
) -> None:
    assert prune(runner(mocker, speculative=True), 4) == ([1, 2, 4], [1])
    assert lines == [
        "spec-ext graphs: verify for 3 of 6 batch sizes, up to 4, "
        "since none above N=4 can speculate"
    ]


def test_each_kind_is_announced_once(mocker: MockerFixture, lines: list[str]) -> None:
    for draft in (False, False, True, True):
        prune(runner(mocker, speculative=True, draft=draft), 4)
    assert [line.split(" for ")[0] for line in lines] == [
        "spec-ext graphs: verify",
        "spec-ext graphs: draft",
    ]


def test_nothing_is_announced_when_all_is_kept(mocker: MockerFixture, lines: list[str]) -> None:
    assert prune(runner(mocker, speculative=True), 24) == (SIZES, [1, 16])
    assert lines == []


@pytest.mark.parametrize(
    ("threshold", "largest"), [(0, 1), (3, 4), (4, 4), (23, None), (24, None), (99, None)]
)
def test_the_largest_threshold_is_what_was_kept_if_any_was_left_out(
    mocker: MockerFixture, lines: list[str], threshold: int, largest: int | None
) -> None:
    mocker.patch.object(graphs.sglang_api, "plain_graph_sizes", return_value=[1])
    prune(runner(mocker, speculative=True), threshold)
    prune(runner(mocker, speculative=False), threshold)
    assert graphs.largest_threshold() == largest
