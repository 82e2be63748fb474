"""reward.kind = "ifeval": the completion follows instructions that a program can check.

IFEval (Zhou et al. 2023, arXiv 2311.07911). The row's metadata hold the data set's fields ``instruction_id_list`` and
``kwargs``, one table of values per instruction. The label may hold them instead, as a table or as JSON text. The text
after </think> is checked. An unknown instruction fails its group with an error that names it; it never counts as
followed or not followed.

Where the paper is ambiguous (is "cats" the keyword "cat"? is "[]" a placeholder?), a rule follows the paper's own
scorer, so that numbers are comparable. There are three differences from the scorer: sentences end at . ! or ? before a
space (abbreviations are not recognised), words in capitals are found without a tokenizer, and the rules for capital and
small letters do not check that the text is English. The rules work on plain text, in time linear in the response.
``language:response_language`` is missing, because it needs a model that recognises languages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.rewards.port import Reward, Sample

Check = Callable[..., bool]

_WORD: Final = re.compile(r"\w+")
_JOINED_WORD: Final = re.compile(r"\w+(?:[-./]\w+)*")
_FIRST_WORD: Final = re.compile(r"'*\"*([^\s.,?!'\"]*)")
_SENTENCE_END: Final = re.compile(r"[.!?](?=[\s\"'”’)\]]|$)")
_PLACEHOLDER: Final = re.compile(r"\[[^\]\n]*(\]?)")
"""An unclosed placeholder is matched up to the end of its line; otherwise every further [ would be tried."""
_BULLET: Final = re.compile(r"^[^\S\n]*(?:\*[^*]|-)", re.MULTILINE)
_HIGHLIGHT: Final = re.compile(r"\*([^*\n]*)\*")
_BOLD: Final = re.compile(r"\*\*([^*\n]*)\*\*")
_FENCE: Final = re.compile(r"^```(?:json)?|```$", re.IGNORECASE)
_CHOICES: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SEPARATOR: Final = "***"
_TWO_ANSWERS: Final = "******"


def follows(response: str, kind: str, values: Mapping[str, Any]) -> bool:
    """Whether ``response`` follows an instruction. An empty response follows none.

    Raises ValueError for an unknown kind and for invalid values, naming them.
    """
    if kind not in KINDS:
        raise ValueError(f"the instruction {kind!r} is not known; these are: {', '.join(KINDS)}")
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name.endswith("frequency") or name.startswith(("num_", "nth_")):
            _is_count(value, f"the instruction {kind!r}: {name}")
    try:
        followed = KINDS[kind](response, **given)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the instruction {kind!r} cannot take {given!r}: {error}") from None
    return followed and bool(response.strip())


def _holds(count: int, bound: int, relation: str) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation {relation!r} must be 'at least' or 'less than'")
    return count >= bound if relation == "at least" else count < bound


def _is_count(value: Any, where: str) -> None:
    """Raise ValueError unless ``value`` is a whole number >= 0. Data sets write 3 as 3.0.

    A text would never equal a count, so no response could follow the instruction.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise ValueError(f"{where} must be a whole number, is {value!r}")


def _listed(words: Any) -> Sequence[str]:
    """Return a list of words. Raises ValueError for a text, which would count as a list of its letters."""
    if not isinstance(words, list | tuple) or not words:
        raise ValueError(f"{words!r} must be a list of words")
    return words


def _existence(response: str, *, keywords: Sequence[str]) -> bool:
    """Contains all keywords, also inside other words and in any case."""
    return all(word.lower() in response.lower() for word in _listed(keywords))


def _frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Counts the keyword also inside other words and in any case."""
    return _holds(response.lower().count(keyword.strip().lower()), frequency, relation)


def _forbidden(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """Contains none of the words as a separate word, in any case."""
    any_of = "|".join(re.escape(word) for word in _listed(forbidden_words))
    return not re.search(rf"(?<!\w)(?:{any_of})(?!\w)", response, re.IGNORECASE)


def _letters(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    if len(letter) != 1:
        raise ValueError(f"letter must be one letter, is {letter!r}")
    return _holds(response.lower().count(letter.lower()), let_frequency, let_relation)


def _sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    """A sentence ends at . ! or ? before a space; text after the last end mark also counts as one."""
    ends = [match.end() for match in _SENTENCE_END.finditer(response)]
    rest = _WORD.search(response, ends[-1] if ends else 0)
    return _holds(len(ends) + bool(rest), num_sentences, relation)


def _words(response: str, *, num_words: int, relation: str) -> bool:
    return _holds(len(_WORD.findall(response)), num_words, relation)


def _paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Paragraphs are separated by ***, which may also precede the first and follow the last."""
    parts = _apart(response, _SEPARATOR)
    return len(parts) == num_paragraphs and all(parts)


def _apart(response: str, separator: str) -> list[str]:
    parts = [part.strip() for part in response.split(separator)]
    return parts[not parts[0] : len(parts) - (not parts[-1])]


def _first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """The nth part between empty lines, from 1, begins with the word. Extra empty lines make empty parts."""
    parts = [part.strip() for part in response.split("\n\n")]
    if sum(map(bool, parts)) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = _FIRST_WORD.match(parts[int(nth_paragraph) - 1])
    return word is not None and word[1].lower() == first_word.strip().lower()


def _placeholders(response: str, *, num_placeholders: int) -> bool:
    return _PLACEHOLDER.findall(response).count("]") >= num_placeholders


def _postscript(response: str, *, postscript_marker: str) -> bool:
    """Contains the marker anywhere, in any case; "P. S." equals "P.S."."""
    letters = re.escape(postscript_marker.strip()).replace(r"\.", r"\.\s?").removesuffix(r"\s?")
    return bool(re.search(letters, response, re.IGNORECASE))


def _bullets(response: str, *, num_bullets: int) -> bool:
    return len(_BULLET.findall(response)) == num_bullets


def _choice(response: str) -> bool:
    return any(choice in response for choice in _CHOICES)


def _highlights(response: str, *, num_highlights: int) -> bool:
    found = _HIGHLIGHT.findall(response) + _BOLD.findall(response)
    return sum(bool(text.strip()) for text in found) >= num_highlights


def _sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """The data set spells ``section_spliter`` this way."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections


def _json(response: str) -> bool:
    """The response is JSON, with or without ``` around it."""
    try:
        json.loads(_FENCE.sub("", response.strip()))
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str) -> bool:
    """Contains <<text>> within one line."""
    return any(
        line[line.find("<<") : line.rfind(">>") + 2].lstrip("<").rstrip(">").strip()
        for line in response.split("\n")
        if 0 <= line.find("<<") < line.rfind(">>")
    )


def _two_answers(response: str) -> bool:
    """Two different answers separated by ******, which may also precede the first and follow the second."""
    answers = _apart(response, _TWO_ANSWERS)
    return len(answers) == 2 and all(answers) and answers[0] != answers[1]


def _repeats(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends(response: str, *, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capitals(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _holds(sum(word.isupper() for word in _JOINED_WORD.findall(response)), capital_frequency, capital_relation)


KINDS: Final[Mapping[str, Check]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _choice,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_answers,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda response: "," not in response,
}


# -- the reward --------------------------------------------------------------------------------------------------------

_NAMES: Final = "instruction_id_list"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    score: Literal["all", "share"] = "all"
    """all: 1 if every instruction is followed, else 0. share: the share of instructions that are followed."""
    loose: bool = False
    """Also accept an instruction if the completion follows it without its first line, its last line, both, or without
    asterisks (the paper's loose accuracy)."""


class IfEvalReward:
    follows = staticmethod(follows)

    def __init__(self, options: Options) -> None:
        self._options = options

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        for kind, given in zip(*instructions_of(label, metadata), strict=True):
            self.follows("a", kind, given)

    def __call__(self, sample: Sample) -> Reward:
        kinds, values = instructions_of(sample.label, sample.metadata)
        response = sample.answer
        texts = _variants(response) if self._options.loose else [response]
        followed = [
            any([self.follows(text, kind, given) for text in texts]) for kind, given in zip(kinds, values, strict=True)
        ]
        share = sum(followed) / len(followed)
        return Reward(
            value=share if self._options.score == "share" else float(all(followed)), parts={"followed": share}
        )


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    cuts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(cut).strip() for cut in cuts]
    return [*texts, *(text.replace("*", "") for text in texts)]


def instructions_of(label: Any, metadata: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Mapping[str, Any]]]:
    """Return the instructions of a row and the values of each. Raises ValueError if there are none."""
    table: Any = metadata if _NAMES in metadata else label
    if isinstance(table, str):
        try:
            table = json.loads(table)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the label is not a table of instructions: {error}") from None
    kinds = table.get(_NAMES) if isinstance(table, Mapping) else None
    if not isinstance(kinds, list | tuple) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"metadata or label must hold {_NAMES}, a list of names; the label is {str(table)[:60]!r}")
    values = table.get("kwargs") or [{}] * len(kinds)
    if not isinstance(values, list | tuple) or len(values) != len(kinds):
        raise ValueError(f"kwargs must be a list of {len(kinds)} tables, one for each of {_NAMES}")
    if not all(isinstance(given, Mapping | None) for given in values):
        raise ValueError("kwargs must be tables")
    return kinds, [given or {} for given in values]
