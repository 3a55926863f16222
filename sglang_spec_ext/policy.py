"""When to speculate: the two modes and the switch between them.

Pure Python and deterministic: every tensor-parallel rank feeds it the same running-decode counts,
so every rank takes the same decision in the same step. Never read a clock or a local metric here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sglang_spec_ext.args import Settings


class Mode(Enum):
    SPECULATING = "speculating"
    TARGET_ONLY = "target-only"


@dataclass(frozen=True)
class Switch:
    """One change of mode.

    Attributes:
        to: the mode from this step on.
        batch: running decode requests at this step.
        steps_since_last: decode steps taken in the mode that ends here.
    """

    to: Mode
    batch: int
    steps_since_last: int


class BatchThresholdPolicy:
    """Target-only above ``threshold`` running decodes, speculating again at ``resume_threshold``.

    Leaving speculation is never delayed: above the threshold no draft runs, whatever happened
    before. Only the way back waits for ``min_steps`` decode steps, which bounds flapping to one
    round trip per ``min_steps`` steps.

    ``settings`` may be replaced between two steps, on every rank between the same two.

    Args:
        on_step: told of each step: its mode, its running requests, and the switch if it is one.
    """

    def __init__(
        self,
        settings: Settings,
        on_step: Callable[[Mode, int, Switch | None], None] | None = None,
    ) -> None:
        self.settings = settings
        self.mode = Mode.SPECULATING
        self.steps_in_mode = 0
        self._on_step = on_step

    def step(self, running: int) -> Switch | None:
        """Decide the mode of this decode step; returns the switch if the mode changes.

        Args:
            running: requests in this decode batch (waiting and prefilling ones do not count).
        """
        switch = None
        wanted = self._wanted(running)
        if wanted is not self.mode:
            switch = Switch(wanted, running, self.steps_in_mode)
            self.mode = wanted
            self.steps_in_mode = 0
        self.steps_in_mode += 1
        if self._on_step is not None:
            self._on_step(self.mode, running, switch)
        return switch

    def _wanted(self, running: int) -> Mode:
        # threshold 0 means never speculate, also not in a step that has nothing to run
        if self.settings.threshold == 0 or running > self.settings.threshold:
            return Mode.TARGET_ONLY
        if self.mode is Mode.SPECULATING:
            return Mode.SPECULATING
        if running > self.settings.resume_threshold:
            return Mode.TARGET_ONLY
        if self.steps_in_mode < self.settings.min_steps:
            return Mode.TARGET_ONLY
        return Mode.SPECULATING
