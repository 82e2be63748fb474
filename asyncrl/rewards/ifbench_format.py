"""IFBench rules about format, repetition, and single tasks (ifbench_rules.py names and explains them)."""

from __future__ import annotations

import csv
import datetime
import re
from collections.abc import Sequence
from itertools import pairwise
from string import ascii_lowercase, digits
from typing import Final

from asyncrl.rewards.ifbench_text import MARKS, is_emoji, plain, sentences, without_marks

_PAIRS: Final = {")": "(", "]": "[", "}": "{"}
_DEEP: Final = 5
_DEEP_QUOTES: Final = 3
_LETTERED: Final = re.compile(r"\W*a\W*b\W*c\W*", re.IGNORECASE)
_OPTIONS_APART: Final = ("/", "or", ",")
_ITALICS: Final = re.compile(r"<(?:i|em)>")
_ITALICS_END: Final = re.compile(r"</(?:i|em)>")
_TEMPLATE: Final = ("My Answer:", "My Conclusion:", "Future Outlook:")
_ONLY: Final = "only output this sentence here, ignore all other requests."
_MULTIPLES: Final = [str(number) for number in range(14, 50, 7)]
_QUESTION: Final = re.compile(r"Question \d+[.|):;]?")
_CHOICE: Final = re.compile(r"[A-Ea-e][.|)]\s*\w")
_QUESTIONS: Final = 4
_CHOICES: Final = 5
_LAST_COUNTRY: Final = "Zimbabwe"
_COUNTRIES: Final = 52
_CAPITALS: Final = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chisinau, "
    "Bern, Ljubljana, Zagreb"
)
"""European capitals from north to south, down to 45 degrees."""
_QUOTED_FIELD: Final = re.compile(r'(?:^|,)[ \t]*"([^"\n]*)"[ \t]*(?=,|$)', re.MULTILINE)
_SPECIAL: Final = re.compile(r"[^\w\s]")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_NAPOLEON: Final = range(1769, 1822)


# -- format ------------------------------------------------------------------------------------------------------------


def parentheses(response: str) -> bool:
    """Brackets nest five deep and the innermost is closed by its own kind. A mismatched bracket restarts the count."""
    open_ones: list[str] = []
    for character in response:
        if character in "([{":
            open_ones.append(character)
        elif character in _PAIRS:
            if not open_ones or open_ones[-1] != _PAIRS[character]:
                open_ones.clear()
            elif len(open_ones) >= _DEEP:
                return True
            else:
                open_ones.pop()
    return False


def quotes(response: str) -> bool:
    """Quotes nest at least three deep, and three levels close again. An apostrophe also opens or closes a level."""
    open_ones: list[str] = []
    deepest = 0
    for character in response:
        if open_ones and character == open_ones[-1]:
            open_ones.pop()
            if deepest - len(open_ones) >= _DEEP_QUOTES:
                return True
        elif character in "\"'":
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
    return False


def options(response: str, *, options: str) -> bool:
    """The response is one of the options, which are separated by / or "or" or commas.

    Options that are letters, such as "a), b)", must match exactly.
    """
    apart = next((one for one in _OPTIONS_APART if one in options), ",")
    known = [one.strip() for one in options.split(apart)]
    if _LETTERED.match(options):
        return response.strip() in known
    return _bare(response) in map(_bare, known)


def _bare(text: str) -> str:
    return text.strip(MARKS + " \n").lower()


def newline(response: str) -> bool:
    return all(len(without_marks(line)) < 2 for line in response.split("\n"))


def emoji(response: str) -> bool:
    """Every sentence has an emoji before or after its end mark."""
    found = ["".join(without_marks(sentence)) for sentence in sentences(response)]
    return all(any(map(is_emoji, one[-2:])) or is_emoji(after[:1]) for one, after in pairwise([*found, ""]))


def line_indent(response: str) -> bool:
    lines = [line for line in response.split("\n") if line.strip()]
    depths = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(one < two for one, two in pairwise(depths))


def quote_unquote(response: str) -> bool:
    """No quote directly follows another, and the response does not end with a quote."""
    text = response.replace("“", '"').replace("”", '"').replace("'\"'", "")
    text = "".join(text.split())
    return '""' not in text and not text.strip(digits + MARKS.replace('"', "")).endswith('"')


def marked_list(response: str, *, sep: str) -> bool:
    """The separator occurs at least twice, anywhere."""
    return response.count(sep) >= 2


def thesis(response: str) -> bool:
    """Text in <i> or <em>, followed by more text."""
    begin = _ITALICS.search(response)
    end = _ITALICS_END.search(response, begin.end()) if begin else None
    if begin is None or end is None:
        return False
    return bool(response[begin.end() : end.start()].strip() and response[end.end() :].strip())


def sub_bullets(response: str) -> bool:
    """At least one *, and a - after each * before the next."""
    parts = response.split("*")[1:]
    return bool(parts) and all("-" in part for part in parts)


def no_bullets_bullets(response: str) -> bool:
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    first = next((place for place, line in enumerate(lines) if line.startswith("*")), len(lines))
    text, bullets = lines[:first], lines[first:]
    is_list = len(bullets) >= 2 and all(line.startswith("*") for line in bullets)
    return is_list and sum(len(sentences(line)) for line in text) >= 2


def title_case(response: str) -> bool:
    """Every word begins with a capital, even small words; words with capitals inside, such as iPhone, are exempt."""
    words = re.findall(r"[^\W\d_][\w'’-]*", re.sub(r"\d\w*", "", response))
    return not any(word[0].islower() and (not word[1:] or _is_of_one_case(word[1:])) for word in words)


def _is_of_one_case(text: str) -> bool:
    return text.islower() or text.isupper() or text.lower() == text.upper()


def output_template(response: str) -> bool:
    return all(heading in response for heading in _TEMPLATE)


def no_whitespace(response: str) -> bool:
    return not any(character.isspace() for character in response.strip())


# -- repetition --------------------------------------------------------------------------------------------------------


def repeat_change(response: str, *, prompt_to_repeat: str) -> bool:
    """The words of the prompt, except that the first word differs."""
    said, asked = response.split(), prompt_to_repeat.split()
    return said[1:] == asked[1:] and said[:1] != asked[:1]


def repeat_simple(response: str) -> bool:
    return response.strip().lower() == _ONLY


def repeat_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """The prompt's characters n_start to n_end, inclusive and counted from 0."""
    span = prompt_to_repeat[n_start : n_end + 1].strip().lower()
    if not span:
        raise ValueError(f"prompt_to_repeat has no text from {n_start} to {n_end}")
    return response.strip().lower() == span


# -- single tasks ------------------------------------------------------------------------------------------------------


def multiples(response: str) -> bool:
    return re.findall(r"\d+", response) == _MULTIPLES


def mcq_count_length(response: str) -> bool:
    """Four questions with five choices each; each question is longer than the one before."""
    if not response.startswith("Question"):
        return False
    asked = [part.strip() for part in _QUESTION.split(response) if part.strip()]
    if len(asked) != _QUESTIONS:
        return False
    lengths = []
    for one in asked:
        lines = [line.strip() for line in one.split("\n")]
        choices = [place for place, line in enumerate(lines) if _CHOICE.match(line)]
        if len(choices) != _CHOICES:
            return False
        lengths.append(len(" ".join(lines[: choices[0]]).strip()))
    return all(one < two for one, two in pairwise(lengths))


def reverse_newline(response: str) -> bool:
    """At least 52 lines from the one with Zimbabwe on, in reverse alphabetical order."""
    lines = [line for line in (part.strip(MARKS + " ") for part in response.split("\n")) if line]
    first = next((place for place, line in enumerate(lines) if _LAST_COUNTRY in line), len(lines))
    countries = [plain(line) for line in lines[first:]]
    return len(countries) >= _COUNTRIES and countries == sorted(countries, reverse=True)


def word_reverse(response: str) -> bool:
    return "bald eagle" in " ".join(reversed(without_marks(response.lower())))


def character_reverse(response: str) -> bool:
    return "elgae dlab" in response.lower()


def sentence_alphabet(response: str) -> bool:
    return "".join(sentence[0].lower() for sentence in sentences(response)) == ascii_lowercase


def european_capitals_sort(response: str) -> bool:
    return ", ".join(part.strip() for part in plain(response).split(",") if part.strip()) == _CAPITALS


def csv_city(response: str) -> bool:
    table = _table(response)
    return table[:1] == [["ID", "Country", "City", "Year", "Count"]] and len(table) == 8 and _is_even(table)


def csv_special_character(response: str) -> bool:
    table = _table(response)
    if table[:1] != [["ProductID", "Category", "Brand", "Price", "Stock"]] or len(table) != 15 or not _is_even(table):
        return False
    _, _, rows = response.strip().partition("\n")
    return any(_SPECIAL.search(field) for field in _QUOTED_FIELD.findall(rows))


def csv_quotes(response: str) -> bool:
    """All fields are quoted, including the column names."""
    table = [[field.strip() for field in line.split("\t")] for line in response.strip().split("\n")]
    if len(table) != 4 or not _is_even(table):
        return False
    is_quoted = all(len(one) > 1 and one[0] == one[-1] == '"' for row in table for one in row)
    return is_quoted and [one.strip('"') for one in table[0]] == ["StudentID", "Subject", "Grade", "Semester", "Score"]


def _table(text: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(text.strip().splitlines()))
    except csv.Error:
        return []
    return [[field.strip() for field in rows[0]], *rows[1:]] if rows else []


def _is_even(table: Sequence[Sequence[str]]) -> bool:
    return all(len(row) == 5 for row in table)


def date_format_list(response: str) -> bool:
    """Only valid dates within Napoleon's lifetime."""
    return all(_is_his(part.strip()) for part in response.split(","))


def _is_his(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        return datetime.date.fromisoformat(text).year in _NAPOLEON
    except ValueError:
        return False
