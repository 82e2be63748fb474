"""A stop string ends an answer at the first token that completes it, however the text is cut into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.engines.generation import Generation
from asyncrl.engines.stopping import StopStrings, cut_at_stop
from asyncrl.messages import SamplingParams, VersionSpan

PIECES = ["a", "b", ";", "ab", "b;", ";;a", "", "ba;", " "]


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


WIDE = [*(bytes([byte]) for byte in "é中🎉".encode()), "中".encode()[1:] + b"a", b"a", b"b", "é".encode(), b" ", b"\n"]
"""Letters of two, three and four bytes as single-byte tokens, and tokens with a part of a letter."""


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode like byte-level BPE: an incomplete letter becomes one or more U+FFFD."""
    return b"".join(WIDE[token] for token in tokens).decode(errors="replace")


def decode_with_fallback(tokens: Sequence[int]) -> str:
    """Decode like SentencePiece: a run of bytes is letters only if all are valid; the first word loses its space."""
    text, run = "", b""
    for piece in [*(WIDE[token] for token in tokens), None]:
        if piece is not None and len(piece) == 1 and piece[0] >= 128:
            run += piece
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\N{REPLACEMENT CHARACTER}" * len(run)
        run = b""
        text += "" if piece is None else piece.decode(errors="replace")
    return text.removeprefix(" ")


def plain_length(tokens: list[int], strings: list[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """The definition: the fewest tokens whose text contains a stop string."""
    return next(
        (n for n in range(1, len(tokens) + 1) if any(text in decode(tokens[:n]) for text in strings)),
        None,
    )


def watched_length(tokens: list[int], strings: list[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """The length that an engine finds when it checks every token as it arrives."""
    watch = StopStrings(strings, decode).watch()
    return next((n for n, token in enumerate(tokens, 1) if watch.is_ended_by(token)), None)


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    st.lists(st.sampled_from(["b;", ";;", "ab", "a;;a", " "]), min_size=1, max_size=3),
)
@example([0] + [6] * 40 + [1], ["ab"])  # tokens without text between the letters
def test_the_answer_ends_at_the_first_token_with_which_its_text_holds_a_stop_string(
    tokens: list[int], strings: list[str]
) -> None:
    expected = plain_length(tokens, strings, decode)
    assert StopStrings(strings, decode).length(tokens) == expected
    assert watched_length(tokens, strings, decode) == expected


@pytest.mark.parametrize("decode", [decode_bytes, decode_with_fallback])
@given(
    st.lists(st.integers(0, len(WIDE) - 1), max_size=60),
    st.lists(st.sampled_from(["中", "é", "🎉", "中é", "a中", "b a", "é🎉", "\n", "a"]), min_size=1, max_size=3),
)
@settings(max_examples=100)
def test_letters_of_several_tokens_are_seen_when_they_are_whole(
    decode: Callable[[Sequence[int]], str], tokens: list[int], strings: list[str]
) -> None:
    expected = plain_length(tokens, strings, decode)
    assert StopStrings(strings, decode).length(tokens) == expected
    assert watched_length(tokens, strings, decode) == expected


@given(st.integers(0, 1200), st.sampled_from(["🎉", "中é", "ab"]), st.integers(0, 9))
def test_a_long_answer_ends_at_the_same_token_wherever_its_blocks_end(before: int, stop: str, behind: int) -> None:
    """Each token of the stop string is a single byte, so any block may end within the stop string."""
    tokens = [WIDE.index(b"b")] * before
    tokens += [WIDE.index(bytes([byte])) for byte in stop.encode()]
    end = len(tokens)
    tokens += [WIDE.index(b" ")] * behind
    for decode in (decode_bytes, decode_with_fallback):
        assert StopStrings([stop], decode).length(tokens) == end


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=200),
    st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    st.sampled_from(["b;", ";;", "ab", "a;;a"]),
)
def test_a_stop_string_may_begin_in_the_tokens_before(before: list[int], tokens: list[int], stop: str) -> None:
    before = [token for token in before if PIECES[token]]
    while (found := plain_length(before, [stop], decode)) is not None:
        before = before[: found - 1]
    watch = StopStrings([stop], decode).watch(before)
    found = next((n for n, token in enumerate(tokens, 1) if watch.is_ended_by(token)), None)
    expected = plain_length(before + tokens, [stop], decode)
    assert found == (None if expected is None else expected - len(before))


def generation(tokens: list[int], reason: str) -> Generation:
    return Generation(
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32),
        version_spans=(
            VersionSpan(start=0, incarnation=0, policy_version=1),
            VersionSpan(start=4, incarnation=0, policy_version=2),
        ),
        finish_reason=reason,
    )


def test_what_follows_the_stop_string_is_cut_with_its_logprobs_and_versions() -> None:
    sampling = SamplingParams(max_new_tokens=9, stop=(";;",))
    answer = cut_at_stop(generation([0, 4, 2, 0, 1], "length"), sampling, StopStrings(sampling.stop, decode))
    assert (answer.tokens.tolist(), answer.logprobs.tolist()) == ([0, 4, 2], [-1, -2, -3])
    assert (answer.finish_reason, len(answer.version_spans)) == ("stop", 1)


@pytest.mark.parametrize(("reason", "expected"), [("length", "stop"), ("abort", "abort")])
def test_an_answer_that_ends_with_a_stop_token_stopped_unless_it_was_aborted(reason: str, expected: str) -> None:
    sampling = SamplingParams(max_new_tokens=5, stop_token_ids=(3,))
    assert cut_at_stop(generation([0, 0, 0, 0, 3], reason), sampling, None).finish_reason == expected
