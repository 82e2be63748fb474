"""Each token has its own text, and the texts add up to the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.groups.token_text import token_texts


def of_bytes(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer: a letter may take several tokens."""
    return bytes(tokens).decode(errors="replace")


def of_words(tokens: Sequence[int]) -> str:
    """A tokenizer that puts a space between words, but not before the first."""
    return " ".join(f"w{token}" for token in tokens)


def test_a_letter_of_several_tokens_comes_with_its_last_one() -> None:
    assert token_texts(list("aé€".encode()), of_bytes) == ["a", "", "é", "", "", "€"]


def test_what_a_token_gives_may_depend_on_the_one_before() -> None:
    assert token_texts([1, 2, 3], of_words) == ["w1", " w2", " w3"]


def test_an_answer_that_was_cut_within_a_letter_shows_so() -> None:
    assert token_texts(list("a€".encode())[:-1], of_bytes) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


@given(st.text(max_size=60))
def test_together_they_are_the_text(text: str) -> None:
    tokens = list(text.encode())
    assert "".join(token_texts(tokens, of_bytes)) == text
    assert len(token_texts(tokens, of_bytes)) == len(tokens)
