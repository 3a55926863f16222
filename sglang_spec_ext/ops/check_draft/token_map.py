"""d2t, the draft's map into the target's vocabulary: offsets, absolute ids, or nonsense."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property


class Reading(enum.Enum):
    OFFSETS = "offsets"  # target id = draft id + d2t[draft id], as SGLang reads it
    ABSOLUTE = "absolute"  # target id = d2t[draft id]
    AMBIGUOUS = "ambiguous"  # makes sense both ways
    NONSENSE = "nonsense"  # makes sense neither way


@dataclass(frozen=True)
class TokenMap:
    """``values`` is d2t, ``vocab_size`` the target's, ``mask`` the ids that t2d marks, if any."""

    values: tuple[int, ...]
    vocab_size: int
    mask: frozenset[int] | None = None

    @cached_property
    def ids(self) -> list[int]:
        """Target ids as SGLang computes them."""
        return [draft_id + value for draft_id, value in enumerate(self.values)]

    @cached_property
    def reading(self) -> Reading:
        as_offsets, as_absolute = self._valid(self.ids), self._valid(self.values)
        if as_offsets and as_absolute and self.mask is not None:
            as_absolute = set(self.values) == self.mask
            as_offsets = not as_absolute
        return {
            (True, True): Reading.AMBIGUOUS,
            (True, False): Reading.OFFSETS,
            (False, True): Reading.ABSOLUTE,
            (False, False): Reading.NONSENSE,
        }[as_offsets, as_absolute]

    @property
    def agrees_with_mask(self) -> bool:
        """Whether t2d, if there is one, marks the very ids that d2t maps to."""
        meant = self.values if self.reading is Reading.ABSOLUTE else self.ids
        return self.mask is None or set(meant) == self.mask

    @property
    def offsets(self) -> tuple[int, ...]:
        """The values as offsets, for a map that holds absolute ids."""
        return tuple(value - draft_id for draft_id, value in enumerate(self.values))

    @property
    def out_of_range(self) -> list[int]:
        return [number for number in self.ids if not 0 <= number < self.vocab_size]

    @property
    def repeats(self) -> int:
        return len(self.ids) - len(set(self.ids))

    def _valid(self, ids: list[int] | tuple[int, ...]) -> bool:
        return len(set(ids)) == len(ids) and all(0 <= number < self.vocab_size for number in ids)
