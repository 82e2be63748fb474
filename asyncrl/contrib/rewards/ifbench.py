"""reward.kind = "ifbench": the completion follows instructions of IFBench that a program can check.

IFBench (Pyatkin et al. 2025, arXiv 2507.02833) has 58 instructions beyond those of `ifeval`. Rows have the same format
as for `ifeval` and may also name instructions of IFEval. A row whose instructions cannot be checked is refused before
the run starts.

Each kind is a function of the response and the named values of the data set's ``kwargs``. Where an instruction is
ambiguous, the rule follows IFBench's own scorer, so that numbers are comparable. The exceptions are cases where the
scorer rewards an answer that does nothing: a ratio of no sentences, sub-bullets without a bullet. Sentences, words,
stop words, syllables and emoji are recognised without the data that the scorer downloads (ifbench_checks.py).
``words:start_verb`` is missing, because it needs a model that recognises verbs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrl.contrib.rewards import ifbench_checks as checks
from asyncrl.contrib.rewards import ifeval
from asyncrl.contrib.rewards.ifeval import IfEvalReward, Options

__all__ = ["IfBenchReward", "Options"]


KINDS: Final[Mapping[str, Callable[..., bool]]] = {
    "count:word_count_range": checks.word_count_range,
    "count:unique_word_count": checks.unique_word_count,
    "count:conjunctions": checks.conjunctions,
    "count:person_names": checks.person_names,
    "count:numbers": checks.numbers,
    "count:words_japanese": checks.words_japanese,
    "count:pronouns": checks.pronouns,
    "count:punctuation": checks.punctuation,
    "count:keywords_multiple": checks.keywords_multiple,
    "ratio:stop_words": checks.stop_words,
    "ratio:sentence_type": checks.sentence_type,
    "ratio:sentence_balance": checks.sentence_balance,
    "ratio:overlap": checks.overlap,
    "ratio:sentence_words": checks.sentence_words,
    "words:alphabet": checks.alphabet,
    "words:vowel": checks.vowel,
    "words:consonants": checks.consonants,
    "words:palindrome": checks.palindrome,
    "words:prime_lengths": checks.prime_lengths,
    "words:repeats": checks.repeats,
    "words:odd_even_syllables": checks.odd_even_syllables,
    "words:last_first": checks.last_first,
    "words:paragraph_last_first": checks.paragraph_last_first,
    "words:no_consecutive": checks.no_consecutive,
    "words:keywords_specific_position": checks.keywords_specific_position,
    "words:words_position": checks.words_position,
    "sentence:alliteration_increment": checks.alliteration_increment,
    "sentence:keyword": checks.sentence_keyword,
    "sentence:increment": checks.increment,
    "format:parentheses": checks.parentheses,
    "format:quotes": checks.quotes,
    "format:options": checks.options,
    "format:newline": checks.newline,
    "format:emoji": checks.emoji,
    "format:line_indent": checks.line_indent,
    "format:quote_unquote": checks.quote_unquote,
    "format:list": checks.marked_list,
    "format:thesis": checks.thesis,
    "format:sub-bullets": checks.sub_bullets,
    "format:no_bullets_bullets": checks.no_bullets_bullets,
    "format:title_case": checks.title_case,
    "format:output_template": checks.output_template,
    "format:no_whitespace": checks.no_whitespace,
    "repeat:repeat_change": checks.repeat_change,
    "repeat:repeat_simple": checks.repeat_simple,
    "repeat:repeat_span": checks.repeat_span,
    "custom:multiples": checks.multiples,
    "custom:mcq_count_length": checks.mcq_count_length,
    "custom:reverse_newline": checks.reverse_newline,
    "custom:word_reverse": checks.word_reverse,
    "custom:character_reverse": checks.character_reverse,
    "custom:sentence_alphabet": checks.sentence_alphabet,
    "custom:european_capitals_sort": checks.european_capitals_sort,
    "custom:csv_city": checks.csv_city,
    "custom:csv_special_character": checks.csv_special_character,
    "custom:csv_quotes": checks.csv_quotes,
    "custom:date_format_list": checks.date_format_list,
}

UNCHECKED: Final[Mapping[str, str]] = {
    "words:start_verb": "it needs a model that tells verbs; leave out its rows",
}


def follows(response: str, kind: str, values: Mapping[str, Any]) -> bool:
    """Whether ``response`` follows an instruction of IFBench or IFEval. An empty response follows none.

    Raises ValueError for an unknown kind and for invalid values, naming them.
    """
    if kind in ifeval.KINDS:
        return ifeval.follows(response, kind, values)
    given = _checked(kind, values)
    try:
        return KINDS[kind](response, **given) and bool(response.strip())
    except ValueError as error:
        raise ValueError(f"the instruction {kind!r}: {error}") from None


def _checked(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a rule, converted to their types. Raises ValueError."""
    if kind in UNCHECKED:
        raise ValueError(f"the instruction {kind!r} is not checked here: {UNCHECKED[kind]}")
    if kind not in KINDS:
        raise ValueError(f"the instruction {kind!r} is not known; those of IFEval are, and: {', '.join(KINDS)}")
    given = {name: value for name, value in values.items() if value is not None}
    wanted = [one for one in inspect.signature(KINDS[kind]).parameters.values() if one.kind is one.KEYWORD_ONLY]
    if missing := [one.name for one in wanted if one.name not in given]:
        raise ValueError(f"the instruction {kind!r} needs {', '.join(missing)} in its kwargs, got {given!r}")
    if unknown := sorted(given.keys() - {one.name for one in wanted}):
        raise ValueError(f"the instruction {kind!r} cannot take {', '.join(unknown)}")
    where = f"the instruction {kind!r}"
    return {one.name: _typed(given[one.name], one, where) for one in wanted}


def _typed(value: Any, parameter: inspect.Parameter, where: str) -> Any:
    """Check and convert one value. Data sets write 3 as 3.0."""
    if parameter.annotation == "str":
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: {parameter.name} must be a text, is {value!r}")
        return value
    is_whole = value.is_integer() if isinstance(value, float) else type(value) is int
    if not is_whole or value < 0:
        raise ValueError(f"{where}: {parameter.name} must be a whole number, is {value!r}")
    return int(value)


class IfBenchReward(IfEvalReward):
    follows = staticmethod(follows)
