"""reward.kind = "f1": words in common with the label, as in SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250).

Text is lower-cased; punctuation and the articles a, an, the are removed, but never the whole text: the label "A" is not
equal to an empty answer. F1 is the harmonic mean of precision (share of the answer's words that are in the label) and
recall (share of the label's words that are in the answer). Repeated words count as often as they occur.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.config.checks import compile_pattern
from asyncrl.rewards.answers import after_thinking, marked
from asyncrl.rewards.labels import label_texts
from asyncrl.rewards.port import Reward, Sample

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_CLOSED: Final = ("yes", "no", "noanswer")
"""Answers that must match as a whole (HotpotQA, Yang et al. 2018)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    metric: Literal["f1", "exact_match"] = "f1"
    """Which one is the reward; both are metrics."""
    extract: str = ""
    """Regular expression; its last match in the completion is the answer (the first group, if it has one). A completion
    without a match gets 0. Empty: the text after </think>, or all of it."""

    def __post_init__(self) -> None:
        compile_pattern(self.extract, "extract")


class F1Reward:
    """If the label is a list, the best score over its labels counts."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        self._metric = options.metric
        self._extract = re.compile(options.extract, re.DOTALL) if options.extract else None

    def __call__(self, sample: Sample) -> Reward:
        answer = marked(sample.answer) if self._extract is None else self._answer(sample.completion)
        labels = label_texts(sample.label)
        if not answer.strip():
            return Reward(value=0.0, parts={"f1": 0.0, "exact_match": 0.0})
        parts = {
            "f1": max(f1(answer, label) for label in labels),
            "exact_match": max(float(normal(answer) == normal(label)) for label in labels),
        }
        return Reward(value=parts[self._metric], parts=parts)

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        label_texts(label)

    def vote(self, completion: str) -> str:
        """Return the normalised answer; "" if there is none."""
        return normal(self._answer(completion))

    def _answer(self, completion: str) -> str:
        """Return the answer; "" if ``extract`` does not match."""
        if self._extract is None:
            return marked(after_thinking(completion))
        matches = list(self._extract.finditer(completion))
        return (matches[-1].group(1 if self._extract.groups else 0) or "") if matches else ""


def normal(text: str) -> str:
    """Return a text as it is compared. A step of normalisation that would leave nothing ("A", "+") is not applied."""
    lowered = text.lower()
    plain = lowered.translate(_PUNCTUATION)
    forms = (_ARTICLES.sub(" ", plain), plain, lowered)
    return next((" ".join(form.split()) for form in forms if form.strip()), "")


def f1(answer: str, label: str) -> float:
    """Return the F1 score in 0..1; 0 for an empty answer."""
    answer, label = normal(answer), normal(label)
    if answer == label != "":
        return 1.0
    if answer in _CLOSED or label in _CLOSED:
        return 0.0
    words, expected = answer.split(), label.split()
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected)) if common else 0.0
