"""reward.kind = "regex": the completion matches a pattern, or the captured text equals the label."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.checks import compile_pattern
from asyncrl.rewards.port import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    pattern: str
    """Regular expression, searched anywhere in the completion; "." also matches line ends. A pattern with endless
    backtracking stops the whole worker, because Python's re cannot be interrupted."""
    compare: Literal["label", "match"] = "label"
    """label: 1 if the first group of the last match (or the whole match) equals the label. match: 1 if the pattern
    matches."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern, "pattern")


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
        """Return the text that is compared with the label, for majority votes; "" if there is none."""
        matches = list(self._pattern.finditer(completion))
        return self._captured(matches[-1]) if matches else ""

    def _captured(self, match: re.Match[str]) -> str:
        return (match.group(1 if self._pattern.groups else 0) or "").strip()
