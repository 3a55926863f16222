"""What one scheduler process has done so far: the figures behind /server_info and /metrics.

Every rank counts the same. Plain numbers that the host has anyway: counting never asks the device.
"""

from __future__ import annotations

from sglang_spec_ext.policy import Mode, Switch
from sglang_spec_ext.prometheus import Series


class Counts:
    """Counters that only ever grow.

    Attributes:
        steps: decode steps, by mode.
        tokens: tokens that decode steps have committed, by mode. As SGLang counts them for its own
            throughput: a request that has just ended may be in one step more.
        switches: changes of mode, by the mode that they lead to.
        verifies: requests times speculating steps.
        draft_tokens_warmed: tokens of target-only steps whose draft K and V were written.
        series: is told the same, where the server reports metrics.
    """

    def __init__(self) -> None:
        self.steps = dict.fromkeys(Mode, 0)
        self.tokens = dict.fromkeys(Mode, 0)
        self.switches = dict.fromkeys(Mode, 0)
        self.verifies = 0
        self.draft_tokens_warmed = 0
        self.series: Series | None = None

    @property
    def resumes(self) -> int:
        """How often speculation has gone on after target-only steps."""
        return self.switches[Mode.SPECULATING]

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify, the bonus token included; None before the first."""
        return self.tokens[Mode.SPECULATING] / self.verifies if self.verifies else None

    def step(self, mode: Mode, running: int, switch: Switch | None) -> None:
        """Count one decode step of ``running`` requests; ``switch`` if the mode changes with it."""
        self.steps[mode] += 1
        if switch is not None:
            self.switches[switch.to] += 1
            if self.series is not None:
                self.series.switched(switch)

    def committed(self, mode: Mode, requests: int, tokens: int) -> None:
        """Count the outcome of one decode step."""
        self.tokens[mode] += tokens
        if mode is Mode.SPECULATING:
            self.verifies += requests
        if self.series is not None:
            self.series.committed(mode, tokens)

    def warmed(self, tokens: int) -> None:
        """Count tokens of a target-only step whose draft K and V were written."""
        self.draft_tokens_warmed += tokens
        if self.series is not None:
            self.series.warmed(tokens)
