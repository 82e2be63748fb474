"""The rules of IFBench (ifbench.py names and explains them), and the words and sentences that they count.

A sentence ends at . ! or ? before a space, or before a closing quote or bracket and a space; abbreviations are not
recognised. A contraction is one word. No data are downloaded: function words and pronouns are listed, syllables are
counted by rules, and emoji are recognised by Unicode block.
"""

from __future__ import annotations

import csv
import datetime
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from string import ascii_lowercase, digits
from typing import Final

MARKS: Final = string.punctuation
CLOSERS: Final = "\"'”’)]"
_REMOVED: Final = str.maketrans("", "", MARKS)
_END: Final = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)")
_VOWELS: Final = re.compile(r"[aeiouy]+")
_SILENT_E: Final = re.compile(r"[^aeiouyl]e$|[aeiouy]le$|[^aeiouytd]ed$|[^aeiouyszxcgh]es$")
_EMOJI: Final = re.compile(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935"
    "\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)


def listed(words: str) -> frozenset[str]:
    """Return the words of a list separated by spaces."""
    return frozenset(words.split())


FUNCTION_WORDS: Final = listed(
    # articles, conjunctions, prepositions
    "a an the and but if or nor because as until while so than of at by for with about against between into through "
    "during before after above below to from up down in out on off over under "
    # pronouns and determiners
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself "
    "it its itself they them their theirs themselves what which who whom this that these those all any both each few "
    "more most other some such own same "
    # auxiliary verbs
    "am is are was were be been being have has had having do does did doing can will should "
    # adverbs
    "again further then once here there when where why how no not only too very just now "
    # parts of contractions around the apostrophe
    "s t d ll m o re ve y don ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn "
    "weren won wouldn"
)
"""Also called stop words."""

PRONOUNS: Final = listed(
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves this that these those who whom whose which what whoever "
    "whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing somebody someone "
    "something each either neither both all some any none"
)


def sentences(text: str) -> list[str]:
    """Split a text into sentences with their end marks; text after the last end mark is also a sentence."""
    found, begin = [], 0
    for match in _END.finditer(text):
        found.append(text[begin : match.end()].strip())
        begin = match.end()
    return [one for one in (*found, text[begin:].strip()) if one]


def end_of(sentence: str) -> str:
    """Return the last character of a sentence, before closing quotes and brackets."""
    return sentence.rstrip(CLOSERS)[-1:]


def without_marks(text: str) -> list[str]:
    """Return the words with all ASCII punctuation removed: "well-known" becomes wellknown."""
    return text.translate(_REMOVED).split()


def stripped(text: str) -> list[str]:
    """Return the words without surrounding punctuation; skip tokens that are only punctuation."""
    return [word for word in (part.strip(MARKS + "“”‘’…") for part in text.split()) if word]


def plain(text: str) -> str:
    """Return the text without accents: "São Tomé" becomes Sao Tome."""
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def is_emoji(character: str) -> bool:
    return _EMOJI.fullmatch(character) is not None


def syllables(word: str) -> int:
    """Count an English word's syllables by its vowel groups; an e at the end, or in -es and -ed, is mostly silent."""
    word = plain(word.lower())
    count = len(_VOWELS.findall(word))
    return max(count - (_SILENT_E.search(word) is not None), 1)


# -- words and sentences -----------------------------------------------------------------------------------------------


_CONJUNCTIONS: Final = listed("and but for nor or so yet")
_NAMES: Final = listed(
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)
"""The names that prompts ask for."""
_INTERROBANGS: Final = ("?!", "!?", "‽")
_CLUSTER: Final = re.compile(r"[b-df-hj-np-tv-z]{2}")
_JAPANESE: Final = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_TIMES: Final = (1, 2, 3, 5, 7)
_TOLERANCE: Final = 2
"""In percentage points."""


def _words(response: str) -> list[str]:
    """Return runs of letters, digits and _; "don't" gives two."""
    return re.findall(r"\w+", response.lower())


# -- counts ------------------------------------------------------------------------------------------------------------


def word_count_range(response: str, *, min_words: int, max_words: int) -> bool:
    if min_words > max_words:
        raise ValueError(f"min_words {min_words} is above max_words {max_words}")
    return min_words <= len(_words(response)) <= max_words


def unique_word_count(response: str, *, N: int) -> bool:  # noqa: N803 - the data set's name
    return len(set(stripped(response.lower()))) >= N


def conjunctions(response: str, *, small_n: int) -> bool:
    return len(_CONJUNCTIONS & set(stripped(response.lower()))) >= small_n


def person_names(response: str, *, N: int) -> bool:  # noqa: N803
    """At least N different names, spelt with a capital."""
    return len(_NAMES & set(re.findall(r"\w+", response))) >= N


def numbers(response: str, *, N: int) -> bool:  # noqa: N803
    """Exactly N numbers. Punctuation is removed first, so 1,234.5 and 2020-21 count as one each."""
    return sum(len(re.findall(r"\d+", word)) for word in without_marks(response)) == N


def words_japanese(response: str, *, N: int) -> bool:  # noqa: N803
    """Every N-th word is Japanese. Numbers and tokens of only punctuation also count as Japanese."""
    _is_place(N, "N")
    every = response.split()[N - 1 :: N]
    return all(word.isdigit() or _JAPANESE.search(word) for part in every for word in stripped(part))


def pronouns(response: str, *, N: int) -> bool:  # noqa: N803
    return sum(word in PRONOUNS for word in re.findall(r"[^\W\d_]+", response.lower())) >= N


def punctuation(response: str) -> bool:
    """Contains each of . , ! ? ; : and an interrobang; the interrobang's own marks do not count for the others."""
    found = next((mark for mark in _INTERROBANGS if mark in response), None)
    return found is not None and set(".,!?;:") <= set(response.replace(found, "", 1))


def keywords_multiple(
    response: str, *, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    """Each keyword occurs its number of times, also inside other words and in any case."""
    text = response.lower()
    given = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(text.count(word.strip().lower()) == times for word, times in zip(given, _TIMES, strict=True))


# -- ratios ------------------------------------------------------------------------------------------------------------


def stop_words(response: str, *, percentage: int) -> bool:
    words = _words(response)
    return bool(words) and 100 * sum(word in FUNCTION_WORDS for word in words) <= percentage * len(words)


def sentence_type(response: str) -> bool:
    ends = Counter(map(end_of, sentences(response)))
    return ends["?"] > 0 and ends["."] == 2 * ends["?"]


def sentence_balance(response: str) -> bool:
    ends = Counter(map(end_of, sentences(response)))
    return 0 < ends["."] == ends["?"] == ends["!"]


def overlap(response: str, *, reference_text: str, percentage: int) -> bool:
    """``percentage`` of the response's character trigrams occur in the reference, within the tolerance."""
    own, theirs = _trigrams(response), _trigrams(reference_text)
    return bool(own) and abs(100 * len(own & theirs) / len(own) - percentage) <= _TOLERANCE


def _trigrams(text: str) -> set[str]:
    return {text[place : place + 3] for place in range(len(text) - 2)}


def sentence_words(response: str) -> bool:
    """Three sentences of the same length. As in IFBench's scorer, their words need not differ."""
    found = sentences(response)
    return len(found) == 3 and len(set(map(len, found))) == 1


# -- words -------------------------------------------------------------------------------------------------------------


def alphabet(response: str) -> bool:
    """Words begin with consecutive letters of the alphabet; the first word may begin with any letter."""
    places = [ascii_lowercase.find(word[0].lower()) for word in without_marks(response)]
    return min(places, default=-1) >= 0 and all(two == (one + 1) % 26 for one, two in pairwise(places))


def vowel(response: str) -> bool:
    """One line with at most three of a, e, i, o, u."""
    text = response.strip().lower()
    return "\n" not in text and len(set("aeiou") & set(text)) <= 3


def consonants(response: str) -> bool:
    """Every word has two consonants in a row; y is a consonant."""
    return all(_CLUSTER.search(word) for word in response.lower().split())


def palindrome(response: str) -> bool:
    """At least ten palindromes of five or more letters; repetitions count."""
    words = without_marks(response.lower())
    return sum(len(word) >= 5 and word == word[::-1] for word in words) >= 10


def prime_lengths(response: str) -> bool:
    lengths = set(map(len, without_marks(response)))
    return bool(lengths) and all(map(_is_prime, lengths))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def repeats(response: str, *, small_n: int) -> bool:
    return max(Counter(without_marks(response.lower())).values(), default=0) <= small_n


def odd_even_syllables(response: str) -> bool:
    parities = [syllables(word) % 2 for word in without_marks(response)]
    return all(one != two for one, two in pairwise(parities))


def last_first(response: str) -> bool:
    return all(
        one and two and one[-1] == two[0]
        for one, two in pairwise([stripped(sentence.lower()) for sentence in sentences(response)])
    )


def paragraph_last_first(response: str) -> bool:
    paragraphs = [stripped(line.lower()) for line in response.split("\n")]
    return all(words[0] == words[-1] for words in paragraphs if words)


def no_consecutive(response: str) -> bool:
    return all(one[0] != two[0] for one, two in pairwise(without_marks(response.lower())))


def keywords_specific_position(response: str, *, keyword: str, n: int, m: int) -> bool:
    """Word m of sentence n is the keyword; both count from 1."""
    words = _nth_sentence(response, n, "n", m, "m")
    return len(words) >= m and words[m - 1].lower() == keyword.strip().lower()


def _nth_sentence(response: str, n: int, name: str, m: int, other: str) -> Sequence[str]:
    _is_place(n, name)
    _is_place(m, other)
    found = sentences(response)
    return stripped(found[n - 1]) if len(found) >= n else ()


def words_position(response: str, *, keyword: str) -> bool:
    """The second word and the last but one are the keyword."""
    words = stripped(response.lower())
    return len(words) > 1 and words[1] == words[-2] == keyword.strip().lower()


# -- sentences ---------------------------------------------------------------------------------------------------------


def alliteration_increment(response: str) -> bool:
    """From sentence to sentence, more words have a neighbour that begins with the same letter."""
    counts = [_alliterative(stripped(sentence.lower())) for sentence in sentences(response)]
    return all(one < two for one, two in pairwise(counts))


def _alliterative(words: Sequence[str]) -> int:
    same = [False, *(one[0] == two[0] for one, two in pairwise(words)), False]
    return sum(before or after for before, after in pairwise(same))


def sentence_keyword(response: str, *, word: str, N: int) -> bool:  # noqa: N803
    """Sentence N contains the word as a separate word, in any case."""
    _is_place(N, "N")
    found = sentences(response)
    pattern = rf"(?<!\w){re.escape(word.strip())}(?!\w)"
    return len(found) >= N and re.search(pattern, found[N - 1], re.IGNORECASE) is not None


def increment(response: str, *, small_n: int) -> bool:
    counts = [len(without_marks(sentence)) for sentence in sentences(response)]
    return all(two == one + small_n for one, two in pairwise(counts))


def _is_place(number: int, name: str) -> None:
    if number < 1:
        raise ValueError(f"{name} counts from 1, is {number}")


# -- format ------------------------------------------------------------------------------------------------------------


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
