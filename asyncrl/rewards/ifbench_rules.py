"""Checkable instructions, under the names of IFBench (Pyatkin et al. 2025, arXiv 2507.02833).

Each kind is a function of the response and the named values of the data set's ``kwargs``. Where an instruction is
ambiguous, the rule follows IFBench's own scorer, so that numbers are comparable. The exceptions are cases where the
scorer rewards an answer that does nothing: a ratio of no sentences, sub-bullets without a bullet. Sentences, words,
stop words, syllables and emoji are recognised without the data that the scorer downloads (ifbench_text.py).
``words:start_verb`` is missing, because it needs a model that recognises verbs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrl.rewards import ifbench_format as form
from asyncrl.rewards import ifbench_words as words
from asyncrl.rewards import instructions

KINDS: Final[Mapping[str, Callable[..., bool]]] = {
    "count:word_count_range": words.word_count_range,
    "count:unique_word_count": words.unique_word_count,
    "count:conjunctions": words.conjunctions,
    "count:person_names": words.person_names,
    "count:numbers": words.numbers,
    "count:words_japanese": words.words_japanese,
    "count:pronouns": words.pronouns,
    "count:punctuation": words.punctuation,
    "count:keywords_multiple": words.keywords_multiple,
    "ratio:stop_words": words.stop_words,
    "ratio:sentence_type": words.sentence_type,
    "ratio:sentence_balance": words.sentence_balance,
    "ratio:overlap": words.overlap,
    "ratio:sentence_words": words.sentence_words,
    "words:alphabet": words.alphabet,
    "words:vowel": words.vowel,
    "words:consonants": words.consonants,
    "words:palindrome": words.palindrome,
    "words:prime_lengths": words.prime_lengths,
    "words:repeats": words.repeats,
    "words:odd_even_syllables": words.odd_even_syllables,
    "words:last_first": words.last_first,
    "words:paragraph_last_first": words.paragraph_last_first,
    "words:no_consecutive": words.no_consecutive,
    "words:keywords_specific_position": words.keywords_specific_position,
    "words:words_position": words.words_position,
    "sentence:alliteration_increment": words.alliteration_increment,
    "sentence:keyword": words.sentence_keyword,
    "sentence:increment": words.increment,
    "format:parentheses": form.parentheses,
    "format:quotes": form.quotes,
    "format:options": form.options,
    "format:newline": form.newline,
    "format:emoji": form.emoji,
    "format:line_indent": form.line_indent,
    "format:quote_unquote": form.quote_unquote,
    "format:list": form.marked_list,
    "format:thesis": form.thesis,
    "format:sub-bullets": form.sub_bullets,
    "format:no_bullets_bullets": form.no_bullets_bullets,
    "format:title_case": form.title_case,
    "format:output_template": form.output_template,
    "format:no_whitespace": form.no_whitespace,
    "repeat:repeat_change": form.repeat_change,
    "repeat:repeat_simple": form.repeat_simple,
    "repeat:repeat_span": form.repeat_span,
    "custom:multiples": form.multiples,
    "custom:mcq_count_length": form.mcq_count_length,
    "custom:reverse_newline": form.reverse_newline,
    "custom:word_reverse": form.word_reverse,
    "custom:character_reverse": form.character_reverse,
    "custom:sentence_alphabet": form.sentence_alphabet,
    "custom:european_capitals_sort": form.european_capitals_sort,
    "custom:csv_city": form.csv_city,
    "custom:csv_special_character": form.csv_special_character,
    "custom:csv_quotes": form.csv_quotes,
    "custom:date_format_list": form.date_format_list,
}

UNCHECKED: Final[Mapping[str, str]] = {
    "words:start_verb": "it needs a model that tells verbs; leave out its rows",
}


def follows(response: str, kind: str, values: Mapping[str, Any]) -> bool:
    """Whether ``response`` follows an instruction of IFBench or IFEval. An empty response follows none.

    Raises ValueError for an unknown kind and for invalid values, naming them.
    """
    if kind in instructions.KINDS:
        return instructions.follows(response, kind, values)
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
