"""reward.kind = "exact": 1 if the answer equals the label, else 0.

The answer is the completion after its thought, or what stands there in the last <answer>...</answer>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.checks import compile_pattern
from asyncrl.rewards.answers import after_thinking, marked
from asyncrl.rewards.labels import label_forms
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    strip: bool = True
    """Ignore whitespace around label and answer."""
    ignore_case: bool = False
    """Compare case-insensitively."""
    extract: str = ""
    """Regular expression; its last match in the whole completion is the answer (the first group, if it has one)."""

    def __post_init__(self) -> None:
        compile_pattern(self.extract, "extract")


class ExactReward:
    """Compares text. A label that is a number is compared as it is written."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self._extract = re.compile(options.extract) if options.extract else None

    def __call__(self, sample: Sample) -> float:
        labels = [*map(self._normal, label_forms(sample.label))]
        if self._extract is not None:
            return float((answer := self._answer(sample.completion)) in labels and bool(answer))
        answers = (self._normal(sample.answer), self._normal(marked(sample.answer)))
        return float(any(answer and answer in labels for answer in answers))

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        label_forms(label)

    def vote(self, completion: str) -> str:
        """Return the text that is compared with the label, for majority votes; "" if there is none."""
        return self._answer(completion)

    def _answer(self, completion: str) -> str:
        if self._extract is None:
            return self._normal(marked(after_thinking(completion)))
        matches = list(self._extract.finditer(completion))
        return self._normal(matches[-1].group(1 if self._extract.groups else 0) or "") if matches else ""

    def _normal(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text
