"""reward.kind = "exact": 1 when the completion is the label, 0 when it is not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncrl.config.checks import compiled
from asyncrl.protocols import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    strip: bool = True
    """Ignore whitespace around label and answer."""
    ignore_case: bool = False
    """Compare case-insensitively."""
    extract: str = ""
    """Regular expression; its last match in the completion is the answer (its first group, if it has one)."""

    def __post_init__(self) -> None:
        compiled(self.extract, "extract")


class ExactReward:
    """Compares text; a label that is not text is compared as Python prints it."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self._extract = re.compile(options.extract) if options.extract else None

    def __call__(self, sample: Sample) -> float:
        if sample.label is None:
            raise ValueError("the prompt has no label to compare to")
        answer = self._answer(sample.completion)
        return float(answer is not None and answer == self._normal(str(sample.label)))

    def vote(self, completion: str) -> str:
        """What is compared with the label, for majorities; "" if there is nothing."""
        return self._answer(completion) or ""

    def _answer(self, completion: str) -> str | None:
        if self._extract is None:
            return self._normal(completion)
        matches = list(self._extract.finditer(completion))
        return self._normal(matches[-1].group(1 if self._extract.groups else 0) or "") if matches else None

    def _normal(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text
