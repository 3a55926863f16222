"""When the rows of target-only steps reach the draft's KV: never too late, and no oftener."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the rows are tensors")

from sglang_spec_ext.target_only import warm_draft  # noqa: E402
from sglang_spec_ext.target_only.warm_draft import WAITING_ROWS, WarmDraft  # noqa: E402

WIDTH, REQUESTS = 3, 6


class Draft:
    """A draft whose KV at a slot is (token, position, hidden state) of the row written there."""

    hidden_width = WIDTH
    hidden_dtype = torch.float32

    def __init__(self) -> None:
        self.kv: dict[int, tuple[int, int, float]] = {}
        self.writes: list[int] = []
        self.in_context = False

    def write(self, tokens: Any, hidden: Any, positions: Any, slots: Any) -> None:
        assert self.in_context
        assert tuple(hidden.shape) == (len(tokens), WIDTH)
        self.writes.append(len(tokens))
        rows = zip(tokens.tolist(), positions.tolist(), hidden[:, 0].tolist(), strict=True)
        self.kv.update(dict(zip(slots.tolist(), rows, strict=True)))


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> Draft:
    made = Draft()

    @contextmanager
    def contexts(worker: Any) -> Any:
        made.in_context = True
        yield
        made.in_context = False

    monkeypatch.setattr(warm_draft.sglang_api, "draft_contexts", contexts)
    return made


def warm(draft: Draft, waits: bool = True, requests: int = REQUESTS) -> WarmDraft:
    return WarmDraft(draft, SimpleNamespace(), requests, torch.device("cpu"), waits)  # type: ignore[arg-type]


def step(of: WarmDraft, requests: Any, position: int) -> None:
    """One step of ``requests``, all at ``position``; what a row holds follows from both."""
    size = len(requests)
    hidden = (requests * 100 + position).float()[:, None].expand(-1, WIDTH)
    at = torch.full((size,), position)
    of.stepped(requests, requests + 10 * position, hidden, at, requests * 10 + position)


def expected(requests: list[int], positions: range) -> dict[int, tuple[int, int, float]]:
    return {r * 10 + p: (r + 10 * p, p, float(r * 100 + p)) for r in requests for p in positions}


def test_rows_of_a_steady_batch_wait_and_are_written_together(draft: Draft) -> None:
    made, requests = warm(draft), torch.tensor([1, 4])
    for position in range(5):
        step(made, requests, position)
    assert draft.writes == []
    made.catch_up()
    assert draft.writes == [10]
    assert draft.kv == expected([1, 4], range(5))
    made.catch_up()
    assert draft.writes == [10], "nothing waits any more"


def test_the_hidden_states_are_copied_since_a_graph_overwrites_them(draft: Draft) -> None:
    made, requests = warm(draft), torch.tensor([1, 4])
    hidden = torch.ones(2, WIDTH)
    made.stepped(requests, requests, hidden, requests, requests)
    hidden.zero_()
    assert made.last_hidden(requests).tolist() == [[1.0] * WIDTH] * 2
    assert draft.kv == {1: (1, 1, 1.0), 4: (4, 4, 1.0)}


def test_other_requests_write_what_waits_before_a_slot_changes_hands(draft: Draft) -> None:
    made, slot = warm(draft), torch.tensor([7])
    hidden = torch.zeros(1, WIDTH)
    for request, token in ((2, 20), (3, 30)):  # request 2 finishes, 3 gets its slot
        pool_indices = torch.tensor([request])
        made.stepped(pool_indices, torch.tensor([token]), hidden, torch.tensor([5]), slot)
    assert draft.kv == {7: (20, 5, 0.0)}
    made.catch_up()
    assert draft.kv == {7: (30, 5, 0.0)}


def test_equal_indices_in_another_tensor_are_other_requests(draft: Draft) -> None:
    made = warm(draft)
    step(made, torch.tensor([2]), 0)
    step(made, torch.tensor([2]), 1)
    assert draft.writes == [1]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_full_buffer_is_written_and_filled_again(draft: Draft, size: int) -> None:
    made, requests = warm(draft), torch.arange(size)
    fits = WAITING_ROWS // size
    for _ in range(2 * fits + 1):
        step(made, requests, 0)
    assert draft.writes == [fits * size] * 2
    made.catch_up()
    assert draft.writes[2:] == [size]


def test_a_step_of_every_request_fits(draft: Draft) -> None:
    made = warm(draft, requests=WAITING_ROWS + 50)
    requests = torch.arange(WAITING_ROWS + 50)
    step(made, requests, 0)
    step(made, requests, 1)
    made.catch_up()
    assert draft.writes == [WAITING_ROWS + 50] * 2


def test_the_last_hidden_state_is_that_of_the_newest_step(draft: Draft) -> None:
    made, requests = warm(draft), torch.tensor([1, 4])
    made.prefilled(torch.tensor([1, 2]), torch.full((2, WIDTH), 7.0))
    for position in range(3):
        step(made, requests, position)
    kept = made.last_hidden(torch.tensor([4, 2, 1]))
    assert kept[:, 0].tolist() == [402.0, 7.0, 102.0]
    assert draft.writes == [6], "a resume reads the draft's KV"


def test_where_something_else_reads_the_kv_no_row_waits(draft: Draft) -> None:
    made, requests = warm(draft, waits=False), torch.tensor([1, 4])
    step(made, requests, 0)
    assert draft.kv == expected([1, 4], range(1))
    step(made, requests, 1)
    assert draft.kv == expected([1, 4], range(2))
    assert made.last_hidden(requests)[:, 0].tolist() == [101.0, 401.0]


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [
        (1024, [16, 32, 64, 128, 256, 512, 1024]),
        (1025, [16, 32, 64, 128, 256, 512, 1024, 1025]),
        (4096, [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]),
    ],
)
def test_sizes_of_the_graphs(capacity: int, sizes: list[int]) -> None:
    assert warm_draft.graph_sizes(capacity) == sizes


def test_on_graphs_the_padded_rows_write_to_the_sink(draft: Draft) -> None:
    made, replayed = warm(draft), []

    def graph(size: int) -> Any:
        def replay() -> None:
            replayed.append(size)
            draft.in_context = True
            made._write(size)

        return SimpleNamespace(replay=replay)

    made._graphs = {size: graph(size) for size in made._sizes}
    requests = torch.tensor([1, 4])
    for position in range(9):
        step(made, requests, position)
    made.catch_up()
    assert replayed == [32]
    draft.kv.pop(0)
    assert draft.kv == expected([1, 4], range(9))
    draft.kv.clear()  # as if all of these slots belonged to others by now
    step(made, requests, 9)
    made.catch_up()
    assert replayed == [32, 16]
    draft.kv.pop(0)
    assert draft.kv == expected([1, 4], range(9, 10))
