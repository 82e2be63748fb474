"""What each token was sampled from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import MessageError
from asyncrl.messages.support import WHOLE, Support, check_support, join

TEXTS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=9)


def lists(support: Support, num_tokens: int) -> list[list[int]]:
    if not len(support.counts):
        return [[]] * num_tokens
    return [one.tolist() for one in np.split(support.tokens, np.cumsum(support.counts)[:-1])]


@given(TEXTS, st.integers(0, 9))
def test_cutting_and_joining_keeps_what_each_token_was_sampled_from(text: list[list[int]], at: int) -> None:
    whole, at = Support.of(text), min(at, len(text))
    first, rest = whole.first(at), whole.after(at)
    assert lists(first, at) == text[:at]
    assert lists(rest, len(text) - at) == text[at:]
    again = join([(at, first), (0, WHOLE), (len(text) - at, rest)])
    assert lists(again, len(text)) == text
    check_support(again, num_tokens=len(text))


@given(TEXTS, st.data())
def test_rows_have_their_own_supports(text: list[list[int]], data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, len(text) - 1), unique=True)) if text else [], np.int64)
    numbers, tokens = Support.of(text).of_rows(rows)
    expected = [(n, token) for n, row in enumerate(rows) for token in text[row]]
    assert list(zip(numbers.tolist(), tokens.tolist(), strict=True)) == expected


def test_counts_that_do_not_add_up_are_no_message() -> None:
    with pytest.raises(MessageError, match="has 1 tokens, and its counts say 2"):
        Support(counts=np.array([2], np.int32), tokens=np.array([4], np.int32))
    with pytest.raises(MessageError, match="below 0"):
        Support(counts=np.array([2, -1], np.int32), tokens=np.array([4], np.int32))
    with pytest.raises(MessageError, match="of 1 tokens, and the text has 3"):
        check_support(Support.of([[4]]), num_tokens=3)
