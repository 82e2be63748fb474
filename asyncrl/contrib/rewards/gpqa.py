"""reward.kind = "gpqa": the completion chooses the label's letter (multiple choice, GPQA, MMLU).

The letter is taken from where models usually put it after </think>: from the last \\boxed{}, else from after the last
"answer is" or "Answer:" (with "option" or marks before the letter or not), else from the last line, alone or at its
start ("B) ..."). Letters elsewhere do not count ("A good start"). The order of the choices comes from the data, so
shuffle them there.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import after_thinking, bare, last_boxed, marked, without_settings
from asyncrl.rewards.labels import refuse_table
from asyncrl.rewards.port import Sample

_MARKS: Final = r"(?:[\s*_:=$\"'`“‘]|\\?[(\[])*"
_STATED: Final = (
    r"(?:(?i:answer|choice|option)[\s*_\"']*(?:(?i:is)\b|[:=])|答案[\s*_]*[是为:]?)"
    + _MARKS
    + rf"(?:(?i:choice|option){_MARKS})?(?:\\(?:text|textbf|mathrm|mathbf)\{{{{{_MARKS})?"
    # A lower-case letter only counts at the end of a line: "a" is also an article.
    r"(?:([{letters}])(?![A-Za-z])|([{small}])(?=[^\w\n]*$))"
)
_ALONE: Final = r"[\s*$(\[]*([{letters}])[\s*$)\].:]*"
_LEADING: Final = r"\s*\(?([{letters}])[).:](?:\s|\\).*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    letters: str = "ABCD"
    """The choices, in order; a label that is a number indexes them from 0."""

    def __post_init__(self) -> None:
        if not self.letters.isalpha() or not self.letters.isascii() or len(set(self.letters)) != len(self.letters):
            raise ConfigError(f"letters must be different letters, such as ABCD, got {self.letters!r}")


class GpqaReward:
    needs_label = True

    def __init__(self, options: Options) -> None:
        self._letters = letters = options.letters.upper()
        self._stated = re.compile(_STATED.format(letters=letters, small=letters.lower()), re.MULTILINE)
        self._alone = re.compile(_ALONE.format(letters=letters + letters.lower()))
        self._leading = re.compile(_LEADING.format(letters=letters), re.DOTALL)

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        self._letter(label, metadata)

    def __call__(self, sample: Sample) -> float:
        return float(self.vote(sample.answer) == self._letter(sample.label, sample.metadata))

    def vote(self, completion: str) -> str:
        """Return the chosen letter; "" if there is none."""
        # Letters, colons and brackets of full width are those of Chinese answers.
        text = unicodedata.normalize("NFKC", marked(after_thinking(completion)))
        if (boxed := last_boxed(text)) is not None:
            return self._of(bare(without_settings(boxed)))
        if stated := self._stated.findall(text):
            return "".join(stated[-1]).upper()
        lines = text.strip().splitlines()
        return self._of(lines[-1]) if lines else ""

    def _of(self, text: str) -> str:
        found = self._alone.fullmatch(text) or self._leading.fullmatch(text)
        return found[1].upper() if found else ""

    def _letter(self, label: Any, metadata: Mapping[str, Any]) -> str:
        """Return the letter of a label: a letter, "(B)", a number from 0, or the text of one of metadata["choices"], a
        list or a table in their order. metadata["correct_letter"], which rows of slime may have, replaces the label."""
        choices = metadata.get("choices")
        if isinstance(choices, Mapping):
            choices = list(choices.values())
        if metadata.get("correct_letter") is not None:
            label = metadata["correct_letter"]
        refuse_table(label)
        if isinstance(label, list | tuple) and len(label) == 1:
            label = label[0]
        if isinstance(label, float) and label.is_integer():  # a column with gaps
            label = int(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self._letters):
            if not isinstance(choices, list | tuple):
                return self._letters[label]
            if label < len(choices) and choices[label] != label in choices:
                raise ValueError(f"the label {label} is a choice and the number of another; write its letter")
            if label < len(choices):
                return self._letters[label]
        if isinstance(label, str) and (letter := bare(label).upper()) and len(letter) == 1 and letter in self._letters:
            return letter
        if isinstance(choices, list | tuple) and label in choices and list(choices).index(label) < len(self._letters):
            return self._letters[list(choices).index(label)]
        raise ValueError(
            f"the label {str(label)[:60]!r} is none of {', '.join(self._letters)} (letters in the reward's options), "
            "nor of metadata's choices"
        )
