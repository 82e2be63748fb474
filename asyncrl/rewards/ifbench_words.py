"""IFBench rules about counts, ratios, words and sentences (ifbench_rules.py names and explains them)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from string import ascii_lowercase
from typing import Final

from asyncrl.rewards.ifbench_text import (
    FUNCTION_WORDS,
    PRONOUNS,
    end_of,
    listed,
    sentences,
    stripped,
    syllables,
    without_marks,
)

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
