"""From what was seen to a table and a verdict. Pure Python, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed.demo.server_log import SPECULATING, TARGET_ONLY, DecodeStep, Switch

TOLERANCE = 0.05
"""Relative difference of accept lengths that counts as none."""

Event = DecodeStep | Switch


@dataclass(frozen=True)
class Row:
    """One line of the table: decode steps that belong together.

    batch: running requests, the most of them and those of the last step. accept_length: tokens
    per verify, None if nothing speculated. tokens_per_s: None where no request was timed.
    """

    name: str
    batch: tuple[int, int]
    mode: str
    accept_length: float | None
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Check:
    """One thing that had to hold. `text` says what, with the numbers."""

    held: bool
    text: str


def summarize(name: str, events: Sequence[Event], tokens_per_s: float | None = None) -> Row | None:
    """The row of all decode steps in `events`; None if there is no decode step.

    Why from the "Decode batch" lines and not from the requests' ``meta_info``: a request's
    ``spec_accept_length`` is one mean over its life, and those of the burst live through both
    modes. The server logs a line per step here (``--decode-log-interval 1``), in one file with the
    switches, so that each step is known to lie before or after a switch. A line's accept length is
    the mean over the requests of its step, hence the weights.
    """
    steps = [event for event in events if isinstance(event, DecodeStep)]
    if not steps:
        return None
    verifies = sum(step.running for step in steps if step.accept_length is not None)
    accepted = sum(step.running * (step.accept_length or 0) for step in steps)
    speculated = [step.accept_length is not None for step in steps]
    mode = SPECULATING if all(speculated) else "both" if any(speculated) else TARGET_ONLY
    return Row(
        name,
        (max(step.running for step in steps), steps[-1].running),
        mode,
        accepted / verifies if verifies else None,
        tokens_per_s,
    )


def split_at_switches(events: Sequence[Event]) -> list[list[Event]]:
    """The events between switches: always one part more than there are switches."""
    parts: list[list[Event]] = [[]]
    for event in events:
        if isinstance(event, Switch):
            parts.append([])
        else:
            parts[-1].append(event)
    return parts


def switch_check(events: Sequence[Event], threshold: int) -> Check:
    """Exactly one switch to target-only above the threshold, then one back at or below it."""
    switches = [event for event in events if isinstance(event, Switch)]
    seen = ", ".join(f"{switch.new_mode} at batch {switch.batch}" for switch in switches)
    held = [switch.new_mode for switch in switches] == [TARGET_ONLY, SPECULATING]
    if held:
        off, on = switches
        held = off.batch > threshold >= on.batch
    wanted = f"one switch to {TARGET_ONLY} above {threshold} running requests and one back"
    return Check(held, f"{wanted}; seen: {seen or 'none'}")


def mode_check(rows: Sequence[Row | None], wanted: Sequence[str]) -> Check:
    """Every step of each row ran in the mode that is wanted for it."""
    seen = [row.mode if row else "no decode step" for row in rows]
    return Check(seen == list(wanted), f"modes of the rows above: {', '.join(seen)}")


def accept_check(name: str, row: Row | None, reference: Row | None) -> Check:
    """The row's accept length is that of `reference`, which is above 1 at all."""
    text = f"accept length, {name}"
    if not row or not reference or row.accept_length is None or reference.accept_length is None:
        return Check(False, f"{text}: not seen")
    held = (
        reference.accept_length > 1
        and abs(row.accept_length / reference.accept_length - 1) <= TOLERANCE
    )
    numbers = f"{row.accept_length:.2f}, before the burst {reference.accept_length:.2f}"
    return Check(held, f"{text}: {numbers} (allowed: {TOLERANCE:.0%} apart)")


def output_check(ours: Sequence[list[int]], plain: Sequence[list[int]]) -> Check:
    """Token for token the plain server's output, request by request."""
    same = sum(a == b for a, b in zip(ours, plain, strict=True))
    text = f"output equals that of a server without the plugin: {same} of {len(plain)} requests"
    if same == len(plain):
        return Check(True, text)
    request = next(i for i, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b)
    pairs = zip(ours[request], plain[request], strict=False)
    shorter = min(len(ours[request]), len(plain[request]))
    token = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    return Check(False, f"{text}; first difference: request {request}, output token {token}")


def rate(arrivals: Sequence[tuple[float, int]], start: float, end: float) -> float | None:
    """Tokens per second that arrived in the half-open interval (start, end]; None if empty."""
    if end <= start:
        return None
    return sum(tokens for when, tokens in arrivals if start < when <= end) / (end - start)
