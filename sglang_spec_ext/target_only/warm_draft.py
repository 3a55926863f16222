"""Keep a one-layer draft warm while only the target runs, at the price of a small part of it.

Each target-only step leaves one draft row per request to write. For a step's few rows the write
costs what reading the draft's weights costs, about 1 % of a step of an 8B target; for the rows of
many steps it costs hardly more. So the rows wait, and are written together.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from sglang_spec_ext.compat import sglang_api
from sglang_spec_ext.target_only import fused
from sglang_spec_ext.target_only.draft_kv import DraftKVWriter

WAITING_ROWS = 1024
"""Rows that wait at most. From some hundred on a write is bound by arithmetic, and grows."""

SMALLEST_GRAPH = 16


def graph_sizes(capacity: int) -> list[int]:
    """Numbers of rows to capture the write for, ascending: powers of two, and the capacity."""
    sizes = [SMALLEST_GRAPH]
    while sizes[-1] * 2 < capacity:
        sizes.append(sizes[-1] * 2)
    return [*sizes, capacity]


class WarmDraft:
    """What the draft does not hold yet: rows that wait, and each request's last hidden state.

    A KV slot that waits must not be read by the draft nor belong to another request. Hence the
    waiting rows are written before any other forward of the worker (`catch_up`), and before those
    of a step whose requests are not those of the step before: a slot becomes free only when its
    request leaves the batch.

    A request's last hidden state is valid if the request was prefilled or stepped since the last
    switch to target-only. A resume reads no others, so reuse of a pool index needs no cleaning up.

    Args:
        writer: writes the rows.
        draft_worker: for the draft's own contexts.
        requests: rows of SGLang's request pool.
        device: of the pool.
        waits: False where something outside the worker's forwards reads the draft's KV.
    """

    def __init__(
        self,
        writer: DraftKVWriter,
        draft_worker: Any,
        requests: int,
        device: torch.device,
        waits: bool,
    ) -> None:
        self._writer, self._draft_worker, self._waits = writer, draft_worker, waits
        width, dtype = writer.hidden_width, writer.hidden_dtype
        self._last_hidden = torch.zeros((requests, width), dtype=dtype, device=device)
        self._capacity = max(WAITING_ROWS, requests)  # a step must fit
        self._hidden = torch.zeros((self._capacity, width), dtype=dtype, device=device)
        # columns of a row: token after the position, position, KV slot, request pool index
        self._columns = torch.zeros((4, self._capacity), dtype=torch.int64, device=device)
        self._rows = self._rows_of_step = 0
        self._requests: torch.Tensor | None = None
        self._sizes = graph_sizes(self._capacity)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        row = self._columns[0, :1]  # else it compiles while requests wait
        fused.keep_rows(self._hidden, self._columns, 0, self._hidden[:1], (row, row, row, row))

    def capture(self) -> None:
        """Capture the write as CUDA graphs."""
        pool = None
        with sglang_api.draft_contexts(self._draft_worker), sglang_api.graph_capture() as context:
            for size in reversed(self._sizes):
                with torch.cuda.stream(context.stream):
                    self._write(size)  # what kernels compile at first use must not be captured
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=context.stream):
                        self._write(size)
                pool = pool or graph.pool()
                self._graphs[size] = graph

    def prefilled(self, pool_indices: torch.Tensor, hidden: torch.Tensor) -> None:
        """Keep the hidden state of each request's last token after a prefill.

        Args:
            pool_indices: [requests] int64, rows of the request pool.
            hidden: [requests, hidden width].
        """
        self._last_hidden[pool_indices] = hidden

    def stepped(
        self,
        pool_indices: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Take the rows of one target-only step, all [batch] int64 but ``hidden``.

        Args:
            pool_indices: the batch's own tensor: as long as it is the same object, the requests
                are the same.
            tokens: the token after each position.
            hidden: [batch, hidden width], the target's state at each position; copied.
            positions: where each token went.
            slots: KV slot of each position.
        """
        size = tokens.shape[0]
        if pool_indices is not self._requests or self._rows + size > self._capacity:
            self.catch_up()
        self._requests = pool_indices
        columns = (tokens, positions, slots, pool_indices)
        fused.keep_rows(self._hidden, self._columns, self._rows, hidden, columns)
        self._rows, self._rows_of_step = self._rows + size, size
        if not self._waits:
            self.catch_up()

    def catch_up(self) -> None:
        """Write what waits; afterwards the draft's KV holds every position of every request."""
        rows, self._rows, self._requests = self._rows, 0, None
        if not rows:
            return
        newest = slice(rows - self._rows_of_step, rows)
        self._last_hidden[self._columns[3, newest]] = self._hidden[newest]
        if not self._graphs:
            with sglang_api.draft_contexts(self._draft_worker):
                self._write(rows)
            return
        padded = self._sizes[bisect_left(self._sizes, rows)]
        # slot 0 is SGLang's sink for padded rows; what else they hold then does no harm
        self._columns[2, rows:padded].zero_()
        self._graphs[padded].replay()

    def last_hidden(self, pool_indices: torch.Tensor) -> torch.Tensor:
        """[requests, hidden width] of the last committed position of each request."""
        self.catch_up()
        return self._last_hidden[pool_indices]

    def _write(self, rows: int) -> None:
        tokens, positions, slots, _ = self._columns[:, :rows]
        self._writer.write(tokens, self._hidden[:rows], positions, slots)
