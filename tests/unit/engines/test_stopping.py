"""Stop strings end an answer at the first token that completes one, however the text is cut into tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.stopping import StopStrings, ended
from asyncrl.messages import SamplingParams, VersionSpan
from asyncrl.protocols import Generation

PIECES = ["a", "b", ";", "ab", "b;", ";;a", "", "ba;", " "]


def decode(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


@given(
    st.lists(st.integers(0, len(PIECES) - 1).filter(lambda token: PIECES[token]), max_size=60),
    st.lists(st.sampled_from(["b;", ";;", "ab", "a;;a", " "]), min_size=1, max_size=3),
)
def test_the_answer_ends_at_the_first_token_with_which_its_text_holds_a_stop_string(
    tokens: list[int], strings: list[str]
) -> None:
    stop = StopStrings(strings, decode)
    expected = next(
        (n for n in range(len(tokens) + 1) if any(text in decode(tokens[:n]) for text in strings)),
        None,
    )
    one_by_one = next((n for n in range(1, len(tokens) + 1) if stop.is_ended_by_last(tokens[:n])), None)
    assert stop.length(tokens) == one_by_one == expected


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
    answer = ended(generation([0, 4, 2, 0, 1], "length"), sampling, StopStrings(sampling.stop, decode))
    assert (answer.tokens.tolist(), answer.logprobs.tolist()) == ([0, 4, 2], [-1, -2, -3])
    assert (answer.finish_reason, len(answer.version_spans)) == ("stop", 1)


def test_text_behind_the_stop_string_in_its_last_token_stays() -> None:
    sampling = SamplingParams(max_new_tokens=9, stop=(";",))
    answer = ended(generation([0, 0, 1, 0, 5], "length"), sampling, StopStrings(sampling.stop, decode))
    assert decode(answer.tokens.tolist()) == "aaba;;a"
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(("reason", "expected"), [("length", "stop"), ("abort", "abort")])
def test_an_answer_that_ends_with_a_stop_token_stopped_unless_it_was_aborted(reason: str, expected: str) -> None:
    sampling = SamplingParams(max_new_tokens=5, stop_token_ids=(3,))
    assert ended(generation([0, 0, 0, 0, 3], reason), sampling, None).finish_reason == expected
