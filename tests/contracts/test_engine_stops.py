"""Where an answer ends, in every engine: stop strings, stop tokens, min_new_tokens. Also sampling options of
evaluations."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.data.tiny_model import CHARACTERS, SPECIAL_TOKENS
from asyncrl.engines.generation import PartialGeneration
from asyncrl.engines.port import Engine
from asyncrl.messages import SamplingParams
from tests.contracts.conftest import SAMPLERS
from tests.harness.engines import PROMPT, TOLERANCE, Check, Model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]

STOP_IDS = (11, 12, 13)


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(engine: Engine, old: Model) -> None:
    sampling = SamplingParams(max_new_tokens=300, stop_token_ids=STOP_IDS)
    generations = await asyncio.gather(*(engine.generate(PROMPT, sampling, seed=n) for n in range(8)))
    assert any(generation.tokens[-1] in STOP_IDS for generation in generations)
    for generation in generations:
        assert generation.finish_reason == "stop"
        assert generation.tokens[-1] in (*STOP_IDS, old.end_token)
        assert not set(generation.tokens[:-1].tolist()) & {*STOP_IDS, old.end_token}
        assert Check(old)(generation) < TOLERANCE


async def test_a_stop_string_ends_the_answer_and_its_tokens_are_in_it(engine: Engine, old: Model) -> None:
    """Use texts of two tokens. One is a line end, which decoding must not clean up."""
    stop = ("3\n", "e7", "zz", "a ", "?b", "10", "<user>")
    sampling = SamplingParams(max_new_tokens=2000, stop=stop)
    generations = await asyncio.gather(*(engine.generate(PROMPT, sampling, seed=n) for n in range(48)))
    stopped = [generation for generation in generations if generation.tokens[-1] != old.end_token]
    assert stopped  # about a third; engines sample differently for the same seed
    for generation in stopped:
        assert generation.finish_reason == "stop"
        assert old.text(generation.tokens).endswith(stop)
        assert not any(text in old.text(generation.tokens[:-1]) for text in stop)
        assert len(generation.logprobs) == len(generation.tokens)
        assert Check(old)(generation) < TOLERANCE


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
async def test_a_stop_string_that_begins_in_what_was_known_ends_the_answer(engine: Engine, old: Model) -> None:
    """The stop strings combine the prefix's last token with each of the 32 likeliest next tokens.

    That last token occurs only once in the prefix. The prefix has no special tokens, because a text such as "<user>"
    contains stop strings such as "se".
    """
    length = seed = 0
    while not length:
        seed += 1
        generation = await engine.generate(PROMPT, SamplingParams(max_new_tokens=60, ignore_eos=True), seed=seed)
        whole = generation.tokens.tolist()
        plain = next((n for n, token in enumerate(whole) if token < len(SPECIAL_TOKENS)), 50)
        length = max((n for n in range(1, plain + 1) if whole[n - 1] not in whole[: n - 1]), default=0)
    known = generation.first(length)
    context = np.concatenate([PROMPT, known.tokens]).astype(np.int32)
    ids = np.arange(len(SPECIAL_TOKENS) + len(CHARACTERS), dtype=np.int32)
    likeliest = sorted(ids, key=lambda token: -old.logprobs(context, ids[token : token + 1])[0])[:32]
    last = old.text(known.tokens[-1:])
    sampling = SamplingParams(max_new_tokens=60, stop=tuple(last + old.text(ids[n : n + 1]) for n in likeliest))
    answers = await asyncio.gather(
        *(engine.generate(PROMPT, sampling, seed=n, partial=PartialGeneration(known)) for n in range(8))
    )
    assert any(len(answer.tokens) == length + 1 for answer in answers)
    for answer in answers:
        assert (len(answer.tokens) == length + 1) == (answer.tokens[length] in [*likeliest, old.end_token])
        assert len(answer.logprobs) == len(answer.tokens)
        assert Check(old)(answer) < TOLERANCE


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
async def test_no_answer_is_shorter_than_min_new_tokens(engine: Engine, old: Model) -> None:
    """Stop tokens have a quarter of the probability. The logprobs of the tokens sampled instead must reflect that."""
    ends = [*range(4, 14), old.end_token]
    sampling = SamplingParams(max_new_tokens=40, min_new_tokens=8, stop_token_ids=tuple(range(4, 14)))
    generations = await asyncio.gather(*(engine.generate(PROMPT, sampling, seed=n) for n in range(32)))
    lengths = [len(generation.tokens) for generation in generations]
    assert 9 in lengths
    assert min(lengths) >= 9
    for generation in generations:
        free = old.logprobs(PROMPT, generation.tokens)
        before = old.probability_of(ends, PROMPT, generation.tokens)
        expected = free - np.log1p(-before) * (np.arange(len(free)) < 8)
        assert np.abs(expected - generation.logprobs).max() < TOLERANCE


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"repetition_penalty": 1.5}])
async def test_an_evaluation_may_sample_from_another_distribution(
    engine: Engine, old: Model, options: dict[str, float]
) -> None:
    sampling = SamplingParams(max_new_tokens=40, ignore_eos=True, is_trained=False, **options)
    first, second = [(await engine.generate(PROMPT, sampling, seed=n)).tokens.tolist() for n in range(2)]
    assert (first == second) == ("repetition_penalty" not in options)
