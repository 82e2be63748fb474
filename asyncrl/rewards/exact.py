"""reward.kind = "exact": 1 if the completion equals the label, else 0."""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncrl.config.checks import compile_pattern
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    strip: bool = True
    """Ignore whitespace around label and answer."""
    ignore_case: bool = False
    """Compare case-insensitively."""
    extract: str = ""
    """Regular expression; its last match in the completion is the answer (the first group, if it has one)."""

    def __post_init__(self) -> None:
        compile_pattern(self.extract, "extract")


class ExactReward:
    """Compares text. A label that is not text is compared as str(label)."""

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
        """Return the text that is compared with the label, for majority votes; "" if there is none."""
        return self._answer(completion) or ""

    def _answer(self, completion: str) -> str | None:
        if self._extract is None:
            return self._normal(completion)
        matches = list(self._extract.finditer(completion))
        return self._normal(matches[-1].group(1 if self._extract.groups else 0) or "") if matches else None

    def _normal(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text
