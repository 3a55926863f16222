"""Sleep until something happens: a process ends, the log grows, an answer comes, or time is up."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from pathlib import Path
from types import TracebackType

from inotify_simple import INotify, flags

_FILE_EVENTS = flags.MODIFY | flags.MOVE_SELF | flags.DELETE_SELF | flags.ATTRIB
_FOLDER_EVENTS = flags.CREATE | flags.MOVED_TO


class Wakeup:
    """Waits on the kernel's events where it can; ``sleep`` still ends after its time.

    Network file systems and some container mounts report no events, and old kernels know no
    pidfd, so every event is only a reason to look earlier.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        self._notify: INotify | None = None
        self._watched: Path | None = None
        self._bell_out, self._bell_in = os.pipe()
        os.set_blocking(self._bell_out, False)
        os.set_blocking(self._bell_in, False)
        self._poll.register(self._bell_out, select.POLLIN)
        self._lock = threading.Lock()  # for the bell, which other threads ring
        self._closed = False

    def __enter__(self) -> Wakeup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
        for descriptor in (*self._pids.values(), self._bell_out, self._bell_in):
            if descriptor >= 0:
                os.close(descriptor)
        if self._notify is not None:
            self._notify.close()

    def on_file(self, path: Path) -> None:
        """Wake when ``path`` is written, replaced or created."""
        try:
            self._notify = INotify(nonblocking=True)
            self._watched = path
            self._notify.add_watch(path.parent, _FOLDER_EVENTS)
        except OSError:  # no such folder yet, or the user's limit of watches is reached
            return
        self._poll.register(self._notify.fileno(), select.POLLIN)
        self._watch_file()

    def on_descriptor(self, descriptor: int) -> None:
        """Wake when ``descriptor`` can be read."""
        self._poll.register(descriptor, select.POLLIN)

    def forget_descriptor(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def on_end_of(self, pid: int) -> None:
        """Wake when process ``pid`` ends; it need not be a child of ours."""
        if pid in self._pids:
            return
        try:
            self._pids[pid] = os.pidfd_open(pid)
        except (OSError, AttributeError):
            self._pids[pid] = -1  # gone already, or not supported: the regular look finds out
            return
        self._poll.register(self._pids[pid], select.POLLIN)

    def ring(self) -> None:
        """Wake from another thread."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it rings already
            if not self._closed:
                os.write(self._bell_in, b"!")

    def sleep(self, seconds: float) -> bool:
        """Until the next event, but not longer than ``seconds``; True if a process has ended."""
        ended = False
        for descriptor, _ in self._poll.poll(int(seconds * 1000)):
            if descriptor == self._bell_out:
                os.read(descriptor, 1024)
            elif self._notify is not None and descriptor == self._notify.fileno():
                self._notify.read(timeout=0)
                self._watch_file()
            else:
                ended |= self._drop_ended(descriptor)
        return ended

    def _watch_file(self) -> None:
        assert self._notify is not None and self._watched is not None
        with contextlib.suppress(OSError):  # not there yet: its folder is watched
            self._notify.add_watch(self._watched, _FILE_EVENTS)

    def _drop_ended(self, descriptor: int) -> bool:
        """A pidfd stays readable for ever once its process has ended: look at it no more."""
        for pid, known in self._pids.items():
            if known == descriptor:
                self._poll.unregister(descriptor)
                os.close(descriptor)
                self._pids[pid] = -1
                return True
        return False
