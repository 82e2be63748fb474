"""The text of each token of an answer. Pure. Tests: tests/unit/policies/groups/test_token_text.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncrl.policies.groups.sample import Decode

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """A text a token; together they are the text of all.

    A token may be a part of a letter, and what one gives may depend on the one before: each is decoded behind a few
    others, and one that ends within a letter gives "", which comes with the token that completes it.
    """
    texts: list[str] = []
    begin = known = 0  # tokens[begin:known] are those that the next is decoded behind
    for end in range(1, len(tokens) + 1):
        before, text = decode(tokens[begin:known]), decode(tokens[begin:end])
        is_whole = len(text) > len(before) and not text.endswith(_UNFINISHED)
        is_last = end == len(tokens)
        texts.append(text[len(before) :] if is_whole or is_last else "")
        if is_whole:
            begin, known = known, end
    return texts
