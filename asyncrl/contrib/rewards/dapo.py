"""reward.kind = "dapo": the text after the last "Answer:" equals the label (DAPO, Yu et al. 2025, arXiv 2503.14476).

The reward is 1 for a right answer and -1 for a wrong one, as in the paper (equation 7). Both sides are first normalised
by the rules of Minerva's paper (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D.1): no units, no words around a
formula, \\frac{a}{b} for \\frac ab, no commas in whole numbers. Unlike the paper's code, this drops \\( and \\) and the
asterisks of Markdown, and does not take x <= 5 for 5. An equal answer that is still written differently is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.rewards.answers import after_thinking, last_boxed, marked
from asyncrl.rewards.labels import label_forms
from asyncrl.rewards.port import Reward, Sample

_TAIL_CHARACTERS: Final = 300
"""At the end of a completion, which are searched for the answer."""
_ANSWER: Final = re.compile(r"answer\s*[:：]\s*([^\n]+)", re.IGNORECASE)
_EQUALS: Final = re.compile(r"(?<![<>!])=")
_WORDS: Final = (
    *("square units", "integers", "dollars", "mph", "inches", "ft", "hours", "hour", "km", "units", "points", "feet"),
    *("minutes", "digits", "cents", "degrees", "degree", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("children", "childrentickets", "multiples", "tickets", "ounces", "square", "sq"),
)
"""Units and nouns that may follow a number."""
_UNIT: Final = re.compile(r"(?<![A-Za-z\\])(?:" + "|".join(sorted(_WORDS, key=len, reverse=True)) + r")(?![A-Za-z])")
_ARTICLE: Final = re.compile(r"(?<![A-Za-z\\])(?:an|a|the)\s+")
_SETTING: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf|overline)\{([^{}]*)\}")
_DROPPED: Final = (
    *("\\left", "\\right", "\\(", "\\)", "\\!", "\\,", "\\;", "\\ "),
    *("\\$", "$", "\\%", "%", "^\\circ", "^{\\circ}", '"'),
)
_SHORT_FRACTION: Final = re.compile(r"\\frac\s*([^\s{\\])\s*([^\s{\\])")
_SHORT_ROOT: Final = re.compile(r"\\sqrt\s*([^\s{\[\\])")
_WHOLE: Final = re.compile(r"-?\d{1,3}(?:,\d{3})+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    right: float = 1.0
    """Reward of a right answer."""
    wrong: float = -1.0
    """Reward of any other answer."""
    boxed: bool = False
    """Take the answer from the last \\boxed{} instead of after "Answer:"."""


class DapoReward:
    needs_label = True

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, sample: Sample) -> Reward:
        labels, answer = _labels(sample.label), self.vote(sample.answer)
        is_right = bool(answer) and answer in labels
        value = self._options.right if is_right else self._options.wrong
        return Reward(value=value, parts={"accuracy": float(is_right)})

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        _labels(label)

    def vote(self, completion: str) -> str:
        """Return the normalised answer; "" if there is none."""
        tail = marked(after_thinking(completion))[-_TAIL_CHARACTERS:]
        if self._options.boxed:
            return normal(last_boxed(tail) or "")
        answers = _ANSWER.findall(tail)
        return normal(answers[-1]) if answers else ""


def _labels(label: Any) -> list[str]:
    """Return the normalised forms of a label. Raises ValueError if nothing is left of it."""
    forms = [normal(form) for form in label_forms(label)]
    if not all(forms):
        raise ValueError(f"the label {str(label)[:60]!r} says nothing beside units and marks")
    return forms


def normal(answer: str) -> str:
    """Normalise an answer by Minerva's rules."""
    answer = _EQUALS.split(answer.replace("−", "-"))[-1].lstrip("* ").rstrip("*. ")
    boxed = last_boxed(answer)
    answer = answer if boxed is None else boxed
    while (bare := _SETTING.sub(r"\1", answer)) != answer:
        answer = bare
    answer = answer.replace("tfrac", "frac").replace("dfrac", "frac")
    for text in _DROPPED:
        answer = answer.replace(text, "")
    answer = _UNIT.sub("", _ARTICLE.sub("", answer)).replace(" and ", ",")
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", answer))
    answer = "".join(answer.split()).rstrip(".").replace(",\\text{}", "")
    return answer.replace(",", "") if _WHOLE.fullmatch(answer) else answer
