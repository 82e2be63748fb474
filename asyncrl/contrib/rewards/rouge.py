"""reward.kind = "rouge": overlap with a reference text, ROUGE-1, -2 or -L (Lin 2004, "ROUGE: A Package for Automatic
Evaluation of Summaries").

Words are runs of letters and digits of any script, lower-cased and not stemmed. A text written without spaces (Chinese)
is one word between punctuation marks, so that only whole clauses match. The reward is the F-measure with equal weights
of the common n-grams (repetitions count), or of the longest common subsequence of words over the whole text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.rewards.answers import marked
from asyncrl.rewards.labels import label_texts
from asyncrl.rewards.port import Reward, Sample

_WORD: Final = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    metric: Literal["rouge1", "rouge2", "rougeL"] = "rougeL"
    """Which one is the reward; all three are metrics."""


class RougeReward:
    """If the label is a list, the best score over its labels counts."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        self._metric = options.metric

    def __call__(self, sample: Sample) -> Reward:
        found = words(marked(sample.answer))
        scores = [scored(found, label) for label in _labels(sample.label)]
        parts = {name: max(score[name] for score in scores) for name in scores[0]}
        return Reward(value=parts[self._metric], parts=parts)

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        _labels(label)


def _labels(label: Any) -> list[list[str]]:
    """Return the words of each label. Raises ValueError for one without words."""
    found = [words(text) for text in label_texts(label)]
    if not all(found):
        raise ValueError(f"the label {str(label)[:60]!r} has no words")
    return found


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def scored(found: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Return all three F-measures, each in 0..1."""
    scores = {f"rouge{size}": _of_ngrams(found, expected, size) for size in (1, 2)}
    return {**scores, "rougeL": _f_measure(longest_common(found, expected), len(found), len(expected))}


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence. Bit-parallel (Hyyrö 2004): each row is one integer."""
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    all_ones = (1 << len(first)) - 1
    row = all_ones
    for word in second:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & all_ones
    return len(first) - row.bit_count()


def _of_ngrams(found: Sequence[str], expected: Sequence[str], size: int) -> float:
    counts = [Counter(zip(*(text[start:] for start in range(size)), strict=False)) for text in (found, expected)]
    return _f_measure((counts[0] & counts[1]).total(), counts[0].total(), counts[1].total())


def _f_measure(common: int, num_found: int, num_expected: int) -> float:
    return 2 * common / (num_found + num_expected) if common else 0.0
