"""SGLang's replies, whole or in chunks, as tokens with the versions that sampled them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest

from asyncrl.data.model_folder import ExpertCounts
from asyncrl.engines.generation import Generation, RequestReport
from asyncrl.engines.sglang import checks
from asyncrl.engines.sglang.client import lines
from asyncrl.engines.sglang.reply import Reply, names_experts, sampling_params
from asyncrl.engines.sglang.versions import Stamps
from asyncrl.errors import ConfigError, EngineError, PromptError
from asyncrl.messages import SamplingParams


def body(tokens: list[int], *, total: int | None = None, **meta: Any) -> dict[str, Any]:
    """A reply, or a chunk that brings the count of tokens to ``total``; each token's logprob is -token/10."""
    entries = [[-token / 10, token, None] for token in tokens]
    return {"meta_info": {"completion_tokens": total or len(tokens), "output_token_logprobs": entries, **meta}}


def finished(generation: Generation) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the tokens, and (start, policy version) of the spans."""
    return generation.tokens.tolist(), [(span.start, span.policy_version) for span in generation.version_spans]


NEWEST = (9, 9)
"""Every version has settled."""


def new_reply(*, sent: int = 0) -> Reply:
    return Reply(sent_version=(0, sent), stamps=Stamps(first_version=(0, 0)))


LENGTH = {"type": "length", "length": 4}


@pytest.mark.parametrize(
    ("info", "start"),
    [
        ({"disable_overlap_schedule": True}, 2),
        ({"speculative_num_draft_tokens": None}, 3),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 2}, 4),
        ({"speculative_algorithm": "NGRAM", "disable_overlap_schedule": True, "speculative_num_draft_tokens": 2}, 2),
    ],
)
def test_spans_start_a_step_late_under_the_overlap_scheduler(info: Mapping[str, Any], start: int) -> None:
    """Tokens sampled but not yet counted when the weights changed belong to the old weights (measured without
    speculation, 0.5.23): one, or as many as a step may accept."""
    spans = [{"version": "0:1", "start": 0, "end": 2}, {"version": "0:2", "start": 2, "end": 5}]
    reply = new_reply(sent=1)
    whole = body([5, 6, 7, 8, 9], weight_versions=spans, finish_reason=LENGTH)
    reply.take_whole(whole, late_tokens=checks.late_tokens(info))
    assert finished(reply.generation()) == ([5, 6, 7, 8, 9], [(0, 1), (start, 2)])


def test_a_request_overtaken_by_a_load_owns_its_first_token_to_the_old_weights() -> None:
    """No token was counted when the weights changed, so the server reports one span; one token was already sampled."""
    reply = new_reply(sent=1)
    spans = [{"version": "0:2", "start": 0, "end": 3}]
    reply.take_whole(body([5, 6, 7], weight_versions=spans, finish_reason=LENGTH), late_tokens=1)
    assert finished(reply.generation())[1] == [(0, 1), (1, 2)]


def test_what_the_server_says_of_a_request_is_kept() -> None:
    times = {"queue_time": 0.5, "first_token_latency": 0.75}
    drafts = {"spec_num_proposed_drafts": 8, "spec_num_correct_drafts": 6}
    reply = Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), held_seconds=2.0)
    reply.take_whole(body([5], finish_reason=LENGTH, cached_tokens=32, **times, **drafts), late_tokens=0)
    assert reply.generation().report == RequestReport(
        cached_tokens=32, queue_seconds=2.5, first_token_seconds=2.75, drafted_tokens=8, accepted_tokens=6
    )
    bare = new_reply()
    bare.take_whole(body([5], finish_reason=LENGTH), late_tokens=0)
    assert bare.generation().report == RequestReport()


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_chunk_is_labelled_with_the_version_of_the_chunk_before(is_incremental: bool) -> None:
    """Chunks of 2, stamped 1, 2, 2. Tokens 2 and 3 came after version 2 was loaded, but may be older."""
    reply = new_reply(sent=1)
    tokens = [5, 6, 7, 8, 9, 10]
    for end, stamp in ((2, "0:1"), (4, "0:2"), (6, "0:2")):
        carried = tokens[end - 2 : end] if is_incremental else tokens[:end]
        reason = LENGTH if end == 6 else None
        reply.take_chunk(body(carried, total=end, weight_version=stamp, finish_reason=reason), newest=NEWEST)
    assert finished(reply.generation()) == (tokens, [(0, 1), (4, 2)])
    np.testing.assert_allclose(reply.generation().logprobs, -np.array(tokens) / 10, rtol=1e-6)


def test_a_stamp_is_believed_once_its_version_has_settled() -> None:
    """The second chunk is stamped 2, but all of it is from the old weights: the load's acknowledgement overtook it."""
    reply = new_reply(sent=1)
    for end, stamp, settled in ((2, "0:1", 1), (4, "0:2", 1), (6, "0:2", 2), (8, "0:3", 2), (10, "0:3", 3)):
        chunk = body([5, 5], total=end, weight_version=stamp, finish_reason=LENGTH if end == 10 else None)
        assert reply.take_chunk(chunk, newest=(0, settled)) == (0, int(stamp[2:]))
    assert finished(reply.generation())[1] == [(0, 1), (6, 2)]


def test_no_chunk_is_newer_than_an_older_version_that_was_loaded_during_it() -> None:
    """An evaluation loads version 5 into an engine that had 9: chunks stamped 9, 5, 5, then 10 again."""
    reply = new_reply(sent=9)
    for end, stamp in ((2, "0:9"), (4, "0:5"), (6, "0:5"), (8, "0:10"), (10, "0:10")):
        chunk = body([5, 5], total=end, weight_version=stamp, finish_reason=LENGTH if end == 10 else None)
        reply.take_chunk(chunk, newest=(0, 10))
    assert finished(reply.generation())[1] == [(0, 9), (2, 5), (8, 10)]


def test_a_span_of_an_older_version_starts_where_the_server_says() -> None:
    """Its first token may be of the weights before, or not: a label may be too old, but not too new."""
    spans = [{"version": "0:9", "start": 0}, {"version": "0:5", "start": 2}, {"version": "0:10", "start": 4}]
    reply = new_reply(sent=9)
    reply.take_whole(body([5] * 6, weight_versions=spans, finish_reason=LENGTH), late_tokens=1)
    assert finished(reply.generation())[1] == [(0, 9), (2, 5), (5, 10)]


def test_a_request_that_was_aborted_in_the_queue_fails_alone() -> None:
    """It has no token, and so no span of a version."""
    reply = new_reply()
    reply.take_whole(body([], finish_reason={"type": "abort", "message": "Abort in waiting queue"}), late_tokens=1)
    with pytest.raises(EngineError, match="Abort in waiting queue"):
        reply.generation()


@pytest.mark.parametrize("kind", ["stop", "length", "abort"])
def test_finish_reasons_are_kept(kind: str) -> None:
    reply = new_reply()
    reply.take_chunk(body([5], finish_reason={"type": kind}), newest=NEWEST)
    assert reply.generation().finish_reason == kind


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (body([5], finish_reason=None), "ended before"),
        (body([], finish_reason={"type": "abort", "message": "too long"}), "too long"),
        (body([5], finish_reason={"type": "abort", "message": "boom", "status_code": 500}), "boom"),
        (body([5], finish_reason={"type": "vanished"}), "vanished"),
        (body([5], total=3, finish_reason=LENGTH), "skipped"),
        ({"error": {"message": "overloaded", "code": 503}}, "the server failed the request: overloaded"),
        ({"error": "boom"}, "the server failed the request: boom"),
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
        reply.take_chunk(chunk, newest=NEWEST)
        reply.generation()


@pytest.mark.parametrize(
    "chunk",
    [
        # SGLang counts a token of the refused request, and carries none
        body([], total=1, finish_reason={"type": "abort", "message": "Input length (9 tokens)", "status_code": 400}),
        {"error": {"message": "Input length (9 tokens)", "type": "invalid_request_error", "code": 400}},
    ],
)
def test_a_request_that_the_server_refuses_in_a_stream_fails_its_prompt_with_the_servers_words(
    chunk: dict[str, Any],
) -> None:
    with pytest.raises(PromptError, match=r"^the server failed the request: Input length \(9 tokens\)$"):
        new_reply().take_chunk(chunk, newest=NEWEST)


async def test_a_line_may_come_in_any_pieces_and_be_of_any_length() -> None:
    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for piece in (b"data: a", b"b\n\nda", b"ta: " + bytes(2**20), bytes(2**20) + b"\n"):
                yield piece

    found = [line async for line in lines(Content())]  # type: ignore[arg-type]
    assert found == [b"data: ab", b"", b"data: " + bytes(2**21), b""]


# -- experts -----------------------------------------------------------------------------------------------------------

COUNTS = ExpertCounts(num_experts=8, num_layers=2, experts_per_token=2)


def told(*tokens: list[list[int]]) -> str:
    return base64.b64encode(np.array(tokens, "<i4").tobytes()).decode()


def with_experts() -> Reply:
    return Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), experts=COUNTS, num_prompt_tokens=2)


TOLD = told([[0, 0], [1, 2]], [[0, 0], [3, 0]], [[0, 0], [7, 1]])
"""Experts of a prompt of 2 and an answer of 2. The first layer is dense; the server leaves zeros for it."""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_experts_are_of_prompt_and_answer_and_dense_layers_and_the_last_token_have_none(is_streamed: bool) -> None:
    reply, none = with_experts(), [255, 255]
    if is_streamed:
        reply.take_chunk(body([5], finish_reason=None), newest=NEWEST)
        assert len(reply.so_far().experts) == 0  # the server reports experts at the end
        reply.take_chunk(body([6], total=2, finish_reason=LENGTH, routed_experts=TOLD), newest=NEWEST)
    else:
        spans = [{"version": "0:0", "start": 0, "end": 2}]
        whole = body([5, 6], weight_versions=spans, finish_reason=LENGTH, routed_experts=TOLD)
        reply.take_whole(whole, late_tokens=1)
    found = reply.generation().experts
    assert found.dtype == np.uint8
    assert found.tolist() == [[none, [1, 2]], [none, [3, 0]], [none, [7, 1]], [none, none]]
    assert reply.so_far(1).experts.tolist() == found[2:].tolist()  # the token before, and the rest


@pytest.mark.parametrize("text", ["AAAA", "%%"])
def test_experts_of_another_model_are_an_error(text: str) -> None:
    with pytest.raises(EngineError, match="routed experts are not those of this model"):
        with_experts().take_chunk(body([5], finish_reason=LENGTH, routed_experts=text), newest=NEWEST)


def test_a_reply_of_zeros_alone_names_no_experts() -> None:
    """A kernel that routes by itself tells nobody."""
    zeros = base64.b64encode(bytes(3 * 2 * 2 * 4)).decode()
    replies = [{"routed_experts": TOLD}, {"routed_experts": zeros}, {}]
    assert [names_experts(meta, COUNTS, num_tokens=4) for meta in replies] == [True, False, False]


# -- what each token was sampled from ----------------------------------------------------------------------------------


def masks(*supports: list[int]) -> dict[str, Any]:
    """What the server says for ``return_sampling_mask``; the logprob of token n among its support is -n/2."""
    logprobs = [-n / 2 for n in range(len(supports))]
    return {"output_token_sampling_mask": [*supports], "output_token_sampling_logprobs": logprobs}


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_token_has_its_support_and_its_logprob_among_it(is_incremental: bool) -> None:
    reply = Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), has_support=True)
    tokens, supports = [5, 6, 7, 8], [[5], [6, 9], [1, 2, 7], [8, 3]]
    for begin, end in ((0, 1), (1, 4)):
        here = slice(begin if is_incremental else 0, end)
        meta = masks(*supports)
        chunk = {name: values[here] for name, values in meta.items()}
        reply.take_chunk(body(tokens[here], total=end, finish_reason=LENGTH, **chunk), newest=NEWEST)
        assert reply.so_far().support.counts.tolist() == [1, 2, 3, 2][:end]
    generation = reply.generation()
    assert generation.support.tokens.tolist() == [5, 6, 9, 1, 2, 7, 8, 3]
    np.testing.assert_allclose(generation.logprobs, [0.0, -0.5, -1.0, -1.5])
    assert reply.so_far(2).support.tokens.tolist() == generation.after(2).support.tokens.tolist() == [1, 2, 7, 8, 3]


def test_a_server_that_does_not_say_what_it_sampled_from_is_refused_in_one_line() -> None:
    reply = Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), has_support=True)
    with pytest.raises(ConfigError, match=r"rollout.top_p, top_k: this SGLang does not say .* or a newer SGLang"):
        reply.take_whole(body([5], finish_reason=LENGTH), late_tokens=0)
    with pytest.raises(EngineError, match="the server's supports are of 2 tokens, of 1"):
        reply.take_whole(body([5], finish_reason=LENGTH, **masks([5], [6])), late_tokens=0)


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_place_has_its_likeliest_tokens(is_incremental: bool) -> None:
    reply = Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), has_likeliest=True)
    tokens = [5, 6, 7, 8]
    places = [[[-0.5, token, None], [-1.5, token + 10, None]] for token in tokens]
    for begin, end in ((0, 1), (1, 4)):
        here = slice(begin if is_incremental else 0, end)
        chunk = body(tokens[here], total=end, finish_reason=LENGTH, output_top_logprobs=places[here])
        reply.take_chunk(chunk, newest=NEWEST)
        assert len(reply.so_far().likeliest) == end
    generation = reply.generation()
    assert generation.likeliest.tokens.tolist() == [[5, 15], [6, 16], [7, 17], [8, 18]]
    assert reply.so_far(2).likeliest.tokens.tolist() == [[7, 17], [8, 18]]
    silent = Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), has_likeliest=True)
    with pytest.raises(EngineError, match="the likeliest tokens at 0 places, of 1"):
        silent.take_whole(body([5], finish_reason=LENGTH), late_tokens=0)
    broken = Reply(sent_version=(0, 0), stamps=Stamps(first_version=(0, 0)), has_likeliest=True)
    nulls = body([5], finish_reason=LENGTH, output_top_logprobs=[[[None, 5, None]]])  # of weights that make NaN
    nulls["meta_info"]["output_token_logprobs"][0][0] = None
    broken.take_whole(nulls, late_tokens=0)
    with pytest.raises(EngineError, match="NaN logprobs"):
        broken.generation()


def test_a_cut_distribution_is_asked_for_with_the_most_tokens_that_may_be_left() -> None:
    asked = sampling_params(SamplingParams(max_new_tokens=4, top_p=0.9), vocabulary_size=5000)
    assert (asked["top_p"], asked["top_k"]) == (0.9, 1024)
    assert sampling_params(SamplingParams(max_new_tokens=4, top_p=0.9), vocabulary_size=50)["top_k"] == 50
    assert sampling_params(SamplingParams(max_new_tokens=4), vocabulary_size=5000)["top_k"] == -1
    free = SamplingParams(max_new_tokens=4, top_p=0.9, is_trained=False)
    assert sampling_params(free, vocabulary_size=5000)["top_k"] == -1
