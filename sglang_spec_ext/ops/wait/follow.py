"""The bytes of the log: from a file that may move, shrink or not exist yet, or from a pipe."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

PIECE = 4 << 20  # bytes per read


class LogSource(Protocol):
    """A log that can be asked for what is new."""

    def read_new(self) -> Iterator[bytes]:
        """Everything written since the last call, in pieces."""

    def age(self) -> float:
        """Seconds since the last write; 0 where that is unknown."""

    def close(self) -> None: ...


class LogFile:
    """Follows a path like `tail -F`: from ``offset`` on, over rotation and truncation."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._file: BinaryIO | None = None

    def read_new(self) -> Iterator[bytes]:
        if self._file is None and not self._open():
            return
        yield from self._drain()
        if self._was_replaced():
            yield from self._drain()  # what came between the last read and the rotation
            self.close()
            self._offset = 0
            if self._open():
                yield from self._drain()

    def age(self) -> float:
        try:
            return max(time.time() - self.path.stat().st_mtime, 0.0)
        except OSError:
            return 0.0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb")
        except OSError:  # not there yet, or a rotation that has not given it to us yet
            return False
        self._file.seek(self._offset)
        return True

    def _drain(self) -> Iterator[bytes]:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # truncated in place, as `copytruncate` and `>` do
        while piece := self._file.read(PIECE):
            yield piece

    def _was_replaced(self) -> bool:
        assert self._file is not None
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False  # between the two halves of a rotation, or deleted: keep what is open
        here = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)


class LogPipe:
    """Standard input: `docker logs -f NAME 2>&1 | sglang-spec-ext wait --log -`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.closed = False
        os.set_blocking(descriptor, False)

    def read_new(self) -> Iterator[bytes]:
        while not self.closed:
            try:
                piece = os.read(self.descriptor, PIECE)
            except BlockingIOError:
                return
            if not piece:
                self.closed = True
                return
            yield piece

    def age(self) -> float:
        return 0.0

    def close(self) -> None:
        os.set_blocking(self.descriptor, True)
