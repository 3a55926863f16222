"""What was asked of this launcher process, by whichever door, until its server is up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext import args
from sglang_spec_ext.args import Settings


@dataclass
class Asked:
    """State of the process.

    Attributes:
        on_command_line: the arguments came from a command line; whoever typed it is told in one
            line what is wrong with it, and has no caller who could catch an exception.
        draft_check: value of the flag or keyword, None where neither was given.
    """

    on_command_line: bool = False
    draft_check: Any = None
    _under_construction: Settings | None = None

    def settings_of(self, record: Any) -> Settings | None:
        """The settings of a ServerArgs record, which may still be under construction."""
        return args.read_stamp(record) or self._under_construction or args.from_env()

    @contextlib.contextmanager
    def constructing(self, settings: Settings) -> Iterator[None]:
        """While the record is built that these settings belong to."""
        self._under_construction = settings
        try:
            yield
        finally:
            self._under_construction = None

    def check_mode(self) -> str:
        """What becomes of errors in the draft. Raises SettingsError where that was asked wrongly.

        One of ``args.CHECK_MODES``.
        """
        return args.draft_check(self.draft_check)


asked = Asked()
