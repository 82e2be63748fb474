"""reward.kind = "math": 1 if the answer in the completion equals the label, as math-verify finds and judges it.

The answer is the last box after the completion's thought; without one, what follows the last "answer is" and the like,
else the last formula or number.

A label is a formula with or without dollars ("36\\pi"), or a sentence, of which the last formula or number counts.
math-verify parses a label that is a choice ("A") or a word as a formula, but finds no formula in a completion that is
the same word. Therefore an answer whose text equals the label, boxed or alone, is right too.

Judging uses sympy, which can take minutes or never finish on the formulas that models write. It therefore runs in
separate processes, whose ``main`` is here. They enforce a time limit themselves, are killed if that fails, and
end with the worker.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.config.checks import Positive
from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import OPEN_BOX, after_thinking, bare, last_boxed, marked, without_settings
from asyncrl.rewards.judge_pool import BadLabel, JudgePool, serve
from asyncrl.rewards.labels import label_forms
from asyncrl.rewards.port import Sample

_DELIMITED: Final = re.compile(r"(?<!\\)(?:\$|\\[(\[])|\\boxed")
_WORDS: Final = re.compile(r"(?<!\S)(?!and\b)[A-Za-z]{3,}\b|\*\*|####")
_STATED: Final = re.compile(r"(?:\banswer\s*(?:is\b|[:：])|答案[是为]?[:：]?)[\s*_:]*([^\n]+)", re.IGNORECASE)
_CHOICE: Final = re.compile(r"\(?([A-Z])(?:[).:](?:\s|\\|$)|$)")
_BOX_WITHOUT_BRACES: Final = re.compile(r"\\boxed[ \t]*(-?\w+(?:[./]\w+)?)")
_IN_DIGITS: Final = re.compile(r"(?<=\d)(?:\\[,!;: ]|~|\{,\})(?=\d{3}(?!\d))")
_FRACTION: Final = re.compile("[¼-¾⅐-⅞]")
_POWER: Final = re.compile("[⁰¹²³⁴-⁻]+")
_ROOT: Final = re.compile(r"√\s*(?:\(([^()]*)\)|(\w+))")
_AFTER_WORD: Final = re.compile("(?<=[\u4e00-\u9fff])(?=[-\\d])")
_PLAIN: Final = {
    **{0xFF01 + n: chr(0x21 + n) for n in range(94)},  # of full width: ５ is 5
    **str.maketrans({"。": ". ", "×": "\\times ", "∞": "\\infty ", "°": "^\\circ ", "⁄": "/", "−": "-"}),
    **str.maketrans({"£": "", "€": "", "¥": "", "\u00a0": " ", "\u2009": " ", "\u202f": " "}),
}
_SPACED_NUMBER: Final = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED: Final = re.compile(r"(?<![\w.,^/\\])(\d+) +(\d{1,2}|\d{4,}) ?/ ?(\d+)(?![\w/]|\.\d)")
"""A mixed number without LaTeX, "2 1/2"; but 1 000/3 is a thousand."""
_SCIENTIFIC: Final = re.compile(r"(-?\d+(?:\.\d*)?)[eE]([+-]?\d+)")
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    processes: Positive[int] = 1
    """Number of judge processes per rollout worker, about 150 MB each."""
    timeout_seconds: Positive[int] = 2
    """Time limit for parsing one answer, and again for comparing it; an answer that takes longer is wrong. So is
    one that takes more than its share of reward.timeout_seconds."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("reward.kind = \"math\" needs math-verify: pip install 'asyncrl[math]'")


class MathReward:
    """Sends each group to a free judge."""

    needs_label = True

    def __init__(self, options: Options, *, name: str = "math") -> None:
        arguments = [str(options.timeout_seconds)]
        self._judges = JudgePool("asyncrl.rewards.math", arguments, name=name, processes=options.processes)

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return await self._judges.ask([[formula_of(sample.label), marked(sample.answer)] for sample in samples])

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        formula_of(label)

    def vote(self, completion: str) -> str:
        """Return the text in the last \\boxed{}, else the last number. Majority votes only test them for equality."""
        completion = marked(after_thinking(completion))
        if (found := last_boxed(completion)) is not None:
            return "".join(found.split())
        numbers = _NUMBER.findall(completion)
        return numbers[-1].replace(",", "") if numbers else ""

    def limit_groups(self, seconds: float) -> None:
        self._judges.seconds = seconds

    async def close(self) -> None:
        await self._judges.close()


def formula_of(label: Any) -> str:
    """Return the text of a label. Raises ValueError if it is none or empty, to which no answer can be equal."""
    text = label_forms(label)[0]
    boxed = last_boxed(text)
    if not bare(text if boxed is None else boxed):
        raise ValueError(f"the label {text!r} is empty")
    return text


# -- in a judge's process: a question is [label, completion] -----------------------------------------------------------


def main() -> None:
    timeout_seconds = int(sys.argv[1])
    logging.disable(logging.ERROR)  # math-verify logs a traceback for every timeout; the reward is just 0
    serve(
        lambda pair: judge(*pair, timeout_seconds=timeout_seconds),
        warm_up=lambda: judge("1", "2", timeout_seconds=60),  # imports and compiles
    )


def judge(label: str, completion: str, *, timeout_seconds: int) -> float:
    """Return 1.0 if the last answer in ``completion`` equals ``label``, else 0.0. Boxed answers take precedence."""
    from math_verify import verify
    from math_verify.errors import TimeoutException

    label, completion = _in_latex(label), _BOX_WITHOUT_BRACES.sub(r"\\boxed{\1}", _in_latex(completion))
    boxed = last_boxed(completion)
    if _says(completion if boxed is None else boxed, label):
        return 1.0
    if boxed is None and (stated := _STATED.findall(completion)) and _says(stated[-1], label):
        return 1.0
    gold = next(filter(None, (_parse(form, timeout_seconds) for form in _forms(label))), None)
    if gold is None:
        raise BadLabel(f"the label {label[:60]!r} holds no number or formula")
    answer = OPEN_BOX.sub(r"\\boxed{", completion)
    if boxed is not None:
        formula = without_settings(boxed).strip("* \n")
        if number := _SCIENTIFIC.fullmatch(formula):
            formula = _power_of_ten(number)
        elif _SPACED_NUMBER.fullmatch(formula):
            formula = formula.replace(" ", "")
        if formula != boxed:
            answer = rf"\boxed{{{formula}}}"
    try:
        zeros = _leading_zeros(gold[0])
        found = _parse(_without_mixed(answer), timeout_seconds)
        # math-verify rounds to 6 decimals, and takes differences below 1e-15 for 0: then 1/2004! would be 1/2006!.
        digits = {"float_rounding": max(6, zeros + 2), "numeric_precision": max(15, zeros + 15)}
        return float(bool(found) and verify(gold, found, timeout_seconds=timeout_seconds, **digits))
    except (TimeoutException, RecursionError, MemoryError):
        return 0.0


def _says(answer: str, label: str) -> bool:
    """Whether an answer is the label's own text, or begins with the label's letter: "**(B)**", "(B) 5"."""
    answer, label = bare(answer.strip().strip("*_")), bare(label)
    if answer == label != "":
        return True
    choice = _CHOICE.match(without_settings(answer))
    return choice is not None and choice[1] == label


def _in_latex(text: str) -> str:
    """Write what Unicode has for formulas as LaTeX: "1½" becomes "1 1/2", "2√3" "2\\sqrt{3}", "x²" "x^{2}"."""
    text = _FRACTION.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = _POWER.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text.translate(_PLAIN))
    return _IN_DIGITS.sub("", _AFTER_WORD.sub(" ", text))


def _parse(text: str, timeout_seconds: int) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    found: list[Any] = parse(text, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=timeout_seconds)
    return found


def _leading_zeros(gold: Any) -> int:
    """Return the zeros between the point and the first digit of a number, or of the smallest of several."""
    import sympy  # type: ignore[import-untyped]

    several = isinstance(gold, sympy.Tuple | sympy.Set | sympy.core.relational.Relational)
    numbers = [one for one in (gold.args if several else (gold,)) if getattr(one, "is_number", False)]
    sizes = [abs(one.doit().evalf()) for one in numbers]
    return max([int(-sympy.log(size, 10).evalf()) for size in sizes if size.is_Float and 0 < size < 1], default=0)


def _without_mixed(text: str) -> str:
    """Write mixed numbers as fractions: "2 1/2" becomes "5/2"."""

    def improper(number: re.Match[str]) -> str:
        whole, part, of = map(int, number.groups())
        return f"{whole * of + part}/{of}" if 0 < part < of else number[0]

    return _MIXED.sub(improper, text.replace("~", " "))  # LaTeX's other space


def _power_of_ten(number: re.Match[str]) -> str:
    return rf"{number[1]} \cdot 10^{{{number[2]}}}"


def _forms(label: str) -> tuple[str, str]:
    """Return what to parse as the label, the better form first.

    Labels are mostly formulas without dollars ("36\\pi"), of which math-verify finds only a number (36) unless dollars
    are put around them. In a sentence it finds the number at the end, but not with dollars.
    """
    label = _without_mixed(label.strip())
    if number := _SCIENTIFIC.fullmatch(label):
        label = _power_of_ten(number)
    is_sentence = "\\" not in label and _WORDS.search(label) is not None
    if is_sentence or _DELIMITED.search(label) or _SPACED_NUMBER.fullmatch(label):
        return label, f"${label}$"
    return f"${label}$", label


if __name__ == "__main__":
    main()
