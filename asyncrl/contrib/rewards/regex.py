"""reward.kind = "regex": the completion matches a pattern, or the captured text equals the label."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.checks import compile_pattern
from asyncrl.rewards.labels import label_forms
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
        if self._compare == "match":
            return float(self._pattern.search(sample.completion) is not None)
        right = [form.strip() for form in label_forms(sample.label)]
        found = self.vote(sample.completion)
        return float(bool(found) and found in right)

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        if self._compare == "label":
            label_forms(label)

    def vote(self, completion: str) -> str:
        """Return the text that is compared with the label, for majority votes; "" if there is none."""
        matches = list(self._pattern.finditer(completion))
        return self._captured(matches[-1]) if matches else ""

    def _captured(self, match: re.Match[str]) -> str:
        return (match.group(1 if self._pattern.groups else 0) or "").strip()
