"""What SGLang answers, whole or in chunks, as tokens with the versions that sampled them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.engines.sglang.reply import Reply
from asyncrl.errors import EngineError
from asyncrl.protocols import Generation


def body(tokens: list[int], *, total: int | None = None, **meta: Any) -> dict[str, Any]:
    """A reply, or a chunk that brings the count of tokens to ``total``; each token's logprob is -token/10."""
    entries = [[-token / 10, token, None] for token in tokens]
    return {"meta_info": {"completion_tokens": total or len(tokens), "output_token_logprobs": entries, **meta}}


def finished(generation: Generation) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens, and (start, policy version) of the spans."""
    return generation.tokens.tolist(), [(span.start, span.policy_version) for span in generation.version_spans]


def new_reply(*, sent: int = 0) -> Reply:
    return Reply(sent_version=(0, sent), first_version=(0, 0))


LENGTH = {"type": "length", "length": 4}


@pytest.mark.parametrize(("late_tokens", "start"), [(0, 2), (1, 3)])
def test_spans_start_a_token_late_under_the_overlap_scheduler(late_tokens: int, start: int) -> None:
    """The token sampled but not yet counted when the weights changed is the old weights' (measured, 0.5.23)."""
    spans = [{"version": "0:1", "start": 0, "end": 2}, {"version": "0:2", "start": 2, "end": 4}]
    reply = new_reply(sent=1)
    reply.take_whole(body([5, 6, 7, 8], weight_versions=spans, finish_reason=LENGTH), late_tokens=late_tokens)
    assert finished(reply.generation()) == ([5, 6, 7, 8], [(0, 1), (start, 2)])


def test_a_request_overtaken_by_a_load_owns_its_first_token_to_the_old_weights() -> None:
    """No token was counted when the weights changed, so the server knows one span; one token was sampled already."""
    reply = new_reply(sent=1)
    spans = [{"version": "0:2", "start": 0, "end": 3}]
    reply.take_whole(body([5, 6, 7], weight_versions=spans, finish_reason=LENGTH), late_tokens=1)
    assert finished(reply.generation())[1] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_chunk_is_labelled_with_the_version_of_the_chunk_before(is_incremental: bool) -> None:
    """Chunks of 2, stamped 1, 2, 2: tokens 2 and 3 came when version 2 was there already, but may be older."""
    reply = new_reply(sent=1)
    tokens = [5, 6, 7, 8, 9, 10]
    for end, stamp in ((2, "0:1"), (4, "0:2"), (6, "0:2")):
        carried = tokens[end - 2 : end] if is_incremental else tokens[:end]
        reason = LENGTH if end == 6 else None
        reply.take_chunk(body(carried, total=end, weight_version=stamp, finish_reason=reason))
    assert finished(reply.generation()) == (tokens, [(0, 1), (4, 2)])
    np.testing.assert_allclose(reply.generation().logprobs, -np.array(tokens) / 10, rtol=1e-6)


def test_a_version_string_that_is_not_ours_counts_as_the_first_version() -> None:
    reply = Reply(sent_version=(3, 4), first_version=(3, 4))
    reply.take_chunk(body([5], weight_version="default", finish_reason=None))
    reply.take_chunk(body([6], total=2, weight_version="v1.2", finish_reason=LENGTH))
    assert [(span.incarnation, span.policy_version) for span in reply.generation().version_spans] == [(3, 4)]


@pytest.mark.parametrize("kind", ["stop", "length", "abort"])
def test_finish_reasons_are_kept(kind: str) -> None:
    reply = new_reply()
    reply.take_chunk(body([5], finish_reason={"type": kind}))
    assert reply.generation().finish_reason == kind


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (body([5], finish_reason=None), "ended before"),
        (body([], finish_reason={"type": "abort", "message": "too long"}), "too long"),
        (body([5], finish_reason={"type": "abort", "message": "boom", "status_code": 500}), "boom"),
        (body([5], finish_reason={"type": "vanished"}), "vanished"),
        (body([5], total=3, finish_reason=LENGTH), "skipped"),
        ({"error": {"message": "bad request"}}, "bad request"),
        (
            {
                "meta_info": {
                    "completion_tokens": 1,
                    "output_token_logprobs": [[None, 5, None]],
                    "finish_reason": LENGTH,
                }
            },
            "NaN",
        ),
    ],
)
def test_a_reply_that_is_no_answer_is_an_error(chunk: dict[str, Any], problem: str) -> None:
    reply = new_reply()
    with pytest.raises(EngineError, match=problem):
        reply.take_chunk(chunk)
        reply.generation()
