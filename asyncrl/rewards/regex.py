"""reward.kind = "regex": does the completion match a pattern, or does what it captures equal the label?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import compiled
from asyncrl.protocols import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    pattern: str
    """Searched for anywhere in the completion; "." matches line ends too. A pattern that backtracks without end stops
    the whole worker: Python's re cannot be interrupted."""
    compare: Literal["label", "match"] = "label"
    """label: 1 when the last match's first group (or all of it) is the label. match: 1 when there is a match."""

    def __post_init__(self) -> None:
        compiled(self.pattern, "pattern")


class RegexReward:
    def __init__(self, options: Options) -> None:
        self._pattern = re.compile(options.pattern, re.DOTALL)
        self._compare = options.compare
        self.needs_label = options.compare == "label"

    def __call__(self, sample: Sample) -> float:
        matches = list(self._pattern.finditer(sample.completion))
        if not matches or self._compare == "match":
            return float(bool(matches))
        if sample.label is None:
            raise ValueError('the prompt has no label; use compare = "match"')
        return float(self._captured(matches[-1]) == str(sample.label).strip())

    def vote(self, completion: str) -> str:
        """What is compared with the label, for majorities; "" if there is nothing."""
        matches = list(self._pattern.finditer(completion))
        return self._captured(matches[-1]) if matches else ""

    def _captured(self, match: re.Match[str]) -> str:
        return (match.group(1 if self._pattern.groups else 0) or "").strip()
