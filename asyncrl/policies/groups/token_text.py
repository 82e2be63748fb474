"""The text of each token of an answer. Pure. Tests: tests/unit/policies/groups/test_sample.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from asyncrl.policies.groups.sample import Decode

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return one text per token; their concatenation is the text of all tokens.

    A token may be part of a character, and its text may depend on the token before. So each token is decoded after a
    few earlier ones. A token that ends within a character gives ""; the token that completes it gives the text of both.
    """
    texts: list[str] = []
    begin = known = 0  # tokens[begin:known] precede the next token when it is decoded
    for end in range(1, len(tokens) + 1):
        before, text = decode(tokens[begin:known]), decode(tokens[begin:end])
        is_whole = len(text) > len(before) and not text.endswith(_UNFINISHED)
        is_last = end == len(tokens)
        texts.append(text[len(before) :] if is_whole or is_last else "")
        if is_whole:
            begin, known = known, end
    return texts
