"""Counts steps whose loss or gradient was not finite, so that the backend changed no weights.

One such step may be an accident of its batch. If they repeat, the learner ends the run with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_MODELS: Final = ("learner", "critic")
_NUMBERS: Final = ("loss", "grad_norm", "critic/grad_norm")


class SkippedSteps:
    """The skipped steps in a row. ``most`` in a row are too many; 0: never. ``in_a_row`` includes the last step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_a_row = 0

    def note(self, step: int, metrics: Mapping[str, float]) -> str:
        """Record a step by its metrics, and return what to log about it; "" if it updated the weights."""
        skipped = [name for name in _MODELS if metrics.get(f"{name}/skipped_steps")]
        if not skipped:
            self.in_a_row = 0
            return ""
        self.in_a_row += 1
        numbers = ", ".join(f"{name} {metrics[name]:g}" for name in _NUMBERS if name in metrics)
        of = f" of {self._most}" if self._most else ""
        return (
            f"step {step} left the {' and the '.join(skipped)} as it was ({numbers}), {self.in_a_row} in a row{of}; "
            "its groups stay in the log"
        )

    @property
    def are_too_many(self) -> bool:
        return 0 < self._most <= self.in_a_row
