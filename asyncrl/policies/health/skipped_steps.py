"""Steps whose loss or gradient was not finite: the backend changed no weights, and here they are counted.

One may be an accident of its batch. The same again and again is no training: the learner ends the run with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_MODELS: Final = ("learner", "critic")
_NUMBERS: Final = ("loss", "grad_norm", "critic/grad_norm")


class SkippedSteps:
    """``most`` in a row are too many; 0 is never. ``in_a_row``: up to and with the last step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_a_row = 0

    def note(self, step: int, metrics: Mapping[str, float]) -> str:
        """What to say of a step by its metrics; "" when its update was made."""
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
