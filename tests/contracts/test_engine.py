"""The contract of the Engine port, over every adapter: in-process, SGLang launched, SGLang attached and streamed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from asyncrl.adapters import registry
from asyncrl.config import EngineSection
from asyncrl.engines.generation import Generation, PartialGeneration, Version
from asyncrl.engines.port import Engine, Pauses
from asyncrl.engines.sglang.reply import Reply
from asyncrl.errors import ConfigError, EngineError, PromptError, WeightsError
from asyncrl.messages import SamplingParams, VersionSpan, WeightVersion
from tests.contracts.conftest import SAMPLERS
from tests.harness import contract_adapters
from tests.harness.engines import (
    LONG,
    PROMPT,
    SHORT,
    TOLERANCE,
    Check,
    Model,
    announce,
    switched_logprobs,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]


async def in_progress(engine: Engine, tasks: asyncio.TaskGroup) -> asyncio.Task[Generation]:
    """Return a long generation that has some tokens, because a short one that began with it is done."""
    task = tasks.create_task(engine.generate(PROMPT, LONG, seed=1))
    await engine.generate(PROMPT, SHORT, seed=2)
    assert not task.done()
    return task


# -- what is sampled ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, old: Model, temperature: float
) -> None:
    sampling = SamplingParams(max_new_tokens=120, temperature=temperature, ignore_eos=True)
    generation = await engine.generate(PROMPT, sampling, seed=3)
    assert len(generation.tokens) == 120
    assert Check(old, temperature)(generation) < TOLERANCE


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
async def test_tokens_follow_the_distribution(engine: Engine, old: Model) -> None:
    """Compare 2000 first tokens with the model's softmax: with 40-odd cells, a chi-square above 110 has p < 1e-6."""
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    generations = await asyncio.gather(*(engine.generate(PROMPT, sampling, seed=n) for n in range(2000)))
    vocabulary = old.network.config.vocab_size
    ids = np.arange(vocabulary, dtype=np.int32)
    expected = 2000 * np.exp([old.logprobs(PROMPT, ids[n : n + 1])[0] for n in range(vocabulary)])
    counts = np.bincount([int(generation.tokens[0]) for generation in generations], minlength=vocabulary)
    cells = expected > 5
    assert ((counts[cells] - expected[cells]) ** 2 / expected[cells]).sum() < 110


async def test_the_end_token_is_part_of_the_answer(engine: Engine, old: Model) -> None:
    sampling = SamplingParams(max_new_tokens=2000)
    generations = await asyncio.gather(*(engine.generate(PROMPT, sampling, seed=n) for n in range(8)))
    stopped = [generation for generation in generations if generation.finish_reason == "stop"]
    assert stopped, "2000 tokens of a nearly flat distribution over 44 tokens hold an end token"
    for generation in stopped:
        assert generation.tokens[-1] == old.end_token
        assert old.end_token not in generation.tokens[:-1]
        assert len(generation.logprobs) == len(generation.tokens)
        assert Check(old)(generation) < TOLERANCE


async def test_an_answer_that_is_cut_off_says_length(engine: Engine) -> None:
    generation = await engine.generate(PROMPT, SHORT, seed=0)
    assert (generation.finish_reason, len(generation.tokens)) == ("length", 20)


async def test_many_generations_run_at_once_and_each_is_right(engine: Engine, old: Model) -> None:
    prompts = [np.arange(4, 5 + n % 30, dtype=np.int32) for n in range(48)]
    samplings = [SamplingParams(max_new_tokens=1 + 7 * (n % 9), ignore_eos=True) for n in range(48)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(engine.generate(prompt, sampling, seed=n))
            for n, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
        ]
    for prompt, sampling, task in zip(prompts, samplings, tasks, strict=True):
        assert len(task.result().tokens) == sampling.max_new_tokens
        assert Check(old)(task.result(), prompt) < TOLERANCE
    assert engine.stats().running == engine.stats().queued == 0
    assert engine.stats().tokens_generated >= sum(sampling.max_new_tokens for sampling in samplings)


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
async def test_an_answer_has_all_its_tokens_in_what_the_engine_takes_of_the_context(
    engine: Engine, adapter: tuple[str, Any], old: Model, tmp_path: Path
) -> None:
    of_model = old.network.config.max_position_embeddings
    section = EngineSection(kind=adapter[0].removesuffix("-stream"), device="cpu")
    run = contract_adapters.run_of(model=old.folder, directory=tmp_path, engine=section)
    most = registry.engine_class(run).context_tokens(run, of_model=of_model)
    assert most <= of_model
    for num_new in (1, 2, 12):
        prompt, sampling = np.full(most - num_new, 4, np.int32), SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        for partial in (None, PartialGeneration()):
            answer = await engine.generate(prompt, sampling, seed=0, partial=partial)
            assert (len(answer.tokens), answer.finish_reason) == (num_new, "length")
        with pytest.raises(PromptError):
            await engine.generate(np.append(prompt, prompt[:1]), sampling, seed=0)


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
async def test_training_refuses_penalties(engine: Engine, penalty: str) -> None:
    with pytest.raises(ConfigError, match=f"{penalty}=0.5 changes every logit"):
        await engine.generate(PROMPT, SamplingParams(max_new_tokens=4, **{penalty: 0.5}), seed=0)


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 12}])
async def test_a_trained_token_says_what_it_was_sampled_from(
    engine: Engine, old: Model, truncation: dict[str, float]
) -> None:
    """Its logprob is among these tokens, so that a trainer with the same weights and tokens has the same number. A
    temperature of its own, and tokens of an earlier engine, change nothing about that."""
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.8, **truncation)
    first = await engine.generate(PROMPT, sampling, seed=1)
    begun = PartialGeneration(first.first(9))
    for answer in (first, await engine.generate(PROMPT, sampling, seed=2, partial=begun)):
        assert len(answer.support.counts) == len(answer.tokens) == 24
        free = old.logprobs(PROMPT, answer.tokens, temperature=0.8)
        kept = np.split(answer.support.tokens, np.cumsum(answer.support.counts)[:-1])
        for n, (token, tokens) in enumerate(zip(answer.tokens, kept, strict=True)):
            assert token in tokens
            assert len(tokens) <= truncation.get("top_k", 200)
            of_kept = old.distribution(PROMPT, answer.tokens[:n], temperature=0.8)[tokens]
            assert of_kept.sum() > truncation.get("top_p", 0.0) - 1e-4 or len(tokens) == truncation["top_k"]
            assert answer.logprobs[n] == pytest.approx(free[n] - np.log(of_kept.sum()), abs=TOLERANCE)
    assert begun.prefix.support.counts[:9].tolist() == first.support.counts[:9].tolist()


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
async def test_a_trained_token_carries_the_likeliest_at_its_place(engine: Engine, old: Model) -> None:
    """With the logprobs that they had for the sampler, also where an earlier engine began the answer."""
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, top_logprobs=4)
    first = await engine.generate(PROMPT, sampling, seed=1)
    begun = PartialGeneration(first.first(5))
    for answer in (first, await engine.generate(PROMPT, sampling, seed=2, partial=begun)):
        assert answer.likeliest.tokens.shape == (12, 4)
        for n, (tokens, logprobs) in enumerate(zip(answer.likeliest.tokens, answer.likeliest.logprobs, strict=True)):
            every = old.distribution(PROMPT, answer.tokens[:n], temperature=0.8)
            np.testing.assert_allclose(logprobs, np.log(np.sort(every)[::-1][:4]), atol=TOLERANCE)
            np.testing.assert_allclose(logprobs, np.log(every[tokens]), atol=TOLERANCE)


@pytest.mark.parametrize("adapter", SAMPLERS, indirect=True)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
async def test_logprobs_of_an_evaluation_are_of_the_tokens_left_and_with_sglang_of_all(
    engine: Engine, adapter: tuple[str, Any], old: Model, options: dict[str, float]
) -> None:
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True, is_trained=False, **options)
    answer = await engine.generate(PROMPT, sampling, seed=0)
    if adapter[0].startswith("sglang"):
        assert Check(old)(answer) < TOLERANCE
    else:  # one token is left
        np.testing.assert_allclose(answer.logprobs, 0, atol=TOLERANCE)


@pytest.mark.parametrize("prompt", [[], [4, 10_000], [4] * 5000])
async def test_a_prompt_the_model_cannot_continue_fails_alone(engine: Engine, prompt: list[int]) -> None:
    with pytest.raises(EngineError):
        await engine.generate(np.array(prompt, dtype=np.int32), SHORT, seed=0)
    assert len((await engine.generate(PROMPT, SHORT, seed=0)).tokens) == 20


# -- versions ----------------------------------------------------------------------------------------------------------


async def test_tokens_carry_the_version_that_sampled_them(engine: Engine, new: Model) -> None:
    before = await engine.generate(PROMPT, SHORT, seed=0)
    await engine.load(new.version(2))
    after = await engine.generate(PROMPT, SHORT, seed=0)
    assert before.version_spans == (VersionSpan(start=0, incarnation=0, policy_version=1),)
    assert after.version_spans == (VersionSpan(start=0, incarnation=0, policy_version=2),)
    assert engine.version == (0, 2)


async def test_a_new_generation_sees_nothing_of_the_old_weights(engine: Engine, old: Model, new: Model) -> None:
    """Generate from the same long prompt before and after: the prefix cache must not reuse keys of the old weights."""
    prompt = np.tile(PROMPT, 20)
    assert Check(old)(await engine.generate(prompt, SHORT, seed=0), prompt) < TOLERANCE
    await engine.load(new.version(2))
    assert Check(new)(await engine.generate(prompt, SHORT, seed=0), prompt) < TOLERANCE
    await engine.load(old.version(2))  # the same version number, with other weights
    assert Check(old)(await engine.generate(prompt, SHORT, seed=0), prompt) < TOLERANCE


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[int, int]]]:
    """Record for each reply the end of every streamed chunk and the newest settled policy version."""
    found: dict[int, list[tuple[int, int]]] = {}
    take = Reply.take_chunk

    def noting(reply: Reply, body: Mapping[str, Any], *, newest: Version, **options: Any) -> Version:
        stamp = take(reply, body, newest=newest, **options)
        found.setdefault(id(reply), []).append((len(reply), min(stamp, newest)[1]))
        return stamp

    monkeypatch.setattr(Reply, "take_chunk", noting)
    return found


def is_labelled_rightly(
    label: int, boundary: int, chunks: dict[int, list[tuple[int, int]]], *, is_streamed: bool
) -> bool:
    """The label never starts before the boundary. For a streamed answer, it starts right after the chunk in which
    version 2 had settled."""
    if not is_streamed:
        return label == boundary
    of_longest = max(chunks.values(), key=lambda found: found[-1])
    return boundary <= label == next(end for end, settled in of_longest if settled == 2)


async def test_a_generation_goes_on_through_a_load(
    engine: Engine, adapter: tuple[str, object], old: Model, new: Model, chunks: dict[int, list[tuple[int, int]]]
) -> None:
    """Up to the boundary, logprobs are the old model's. From there on, they are the new weights' on the old keys."""
    async with asyncio.TaskGroup() as tasks:
        task = await in_progress(engine, tasks)
        report = await engine.load(new.version(2))
        assert not task.done()
    generation = task.result()
    assert 0 <= report.pause_seconds <= report.load_seconds
    assert len(generation.tokens) == LONG.max_new_tokens
    first, second = generation.version_spans
    assert (first.policy_version, second.policy_version) == (1, 2)
    distance = np.abs(old.logprobs(PROMPT, generation.tokens) - generation.logprobs)
    boundary = int(np.argmax(distance > 1e-3))
    is_streamed = adapter[0] == "sglang-stream"
    assert is_labelled_rightly(second.start, boundary, chunks, is_streamed=is_streamed)
    expected = switched_logprobs(old, new, PROMPT, generation.tokens, boundary=boundary)
    assert np.abs(expected - generation.logprobs[boundary:]).max() < TOLERANCE


async def test_several_loads_pass_under_one_generation(engine: Engine, old: Model, new: Model) -> None:
    async with asyncio.TaskGroup() as tasks:
        task = await in_progress(engine, tasks)
        for version, model in ((2, new), (3, old), (4, new)):
            await engine.load(model.version(version))
            await engine.generate(PROMPT, SHORT, seed=version)
    versions = [span.policy_version for span in task.result().version_spans]
    assert versions == [1, 2, 3, 4]


async def test_versions_may_be_skipped_and_epochs_change(engine: Engine, new: Model) -> None:
    await engine.load(new.version(7, incarnation=2))
    generation = await engine.generate(PROMPT, SHORT, seed=0)
    assert engine.version == (2, 7)
    assert generation.version_spans == (VersionSpan(start=0, incarnation=2, policy_version=7),)


async def test_weights_that_cannot_be_read_leave_the_old_ones(
    engine: Engine, old: Model, new: Model, tmp_path: Path
) -> None:
    """All kinds of damage in turn, during a single generation."""
    versions = [damaged(new, tmp_path / damage, damage) for damage in DAMAGES]
    async with asyncio.TaskGroup() as tasks:
        task = await in_progress(engine, tasks)
        for damage, version in zip(DAMAGES, versions, strict=True):
            with pytest.raises(WeightsError):
                await engine.load(version)
                pytest.fail(f"weights were loaded from a folder that is {damage}")
            assert engine.version == (0, 1), damage
            assert Check(old)(await engine.generate(PROMPT, SHORT, seed=3)) < TOLERANCE, damage
    assert [span.policy_version for span in task.result().version_spans] == [1]
    assert Check(old)(task.result()) < TOLERANCE


DAMAGES = ("missing", "torn", "cut", "mis-shaped", "incomplete", "foreign")


def damaged(model: Model, folder: Path, damage: str) -> WeightVersion:
    """Return a version whose folder is incomplete or has too much."""
    shutil.copytree(model.folder, folder)
    file = folder / "model.safetensors"
    message = announce(folder, 2)
    if damage == "missing":
        shutil.rmtree(folder)
        return message
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:1000])
        return message
    tensors = safetensors.torch.load_file(file)
    name = sorted(tensors)[-1]
    if damage == "mis-shaped":
        tensors[name] = tensors[name][:-1].clone()
    elif damage == "incomplete":
        del tensors[name]
    elif damage == "foreign":
        tensors["somebody.weight"] = tensors[name].clone()
    safetensors.torch.save_file(tensors, file)
    if damage == "cut":  # announced with its cut length, unlike "torn"
        file.write_bytes(file.read_bytes()[:1000])
    return announce(folder, 2)


# -- in parts ----------------------------------------------------------------------------------------------------------


async def test_a_generation_in_progress_can_be_seen(engine: Engine) -> None:
    async with asyncio.TaskGroup() as tasks:
        partial = PartialGeneration()
        task = tasks.create_task(engine.generate(PROMPT, LONG, seed=1, partial=partial))
        await engine.generate(PROMPT, SHORT, seed=2)
        while partial.num_tokens < 2:
            await asyncio.sleep(0.001)
        seen = partial.so_far()
        assert not task.done()
    whole, count = task.result(), len(seen.tokens)
    assert 0 < count < len(whole.tokens)
    assert not seen.finish_reason
    assert seen.tokens.tolist() == whole.tokens[:count].tolist()
    assert seen.logprobs.tolist() == whole.logprobs[:count].tolist()
    assert seen.version_spans == whole.version_spans == (VersionSpan(start=0, incarnation=0, policy_version=1),)


@pytest.mark.parametrize("cut", [1, 19, 59])
async def test_a_generation_cut_anywhere_goes_on_from_there(
    engine: Engine, adapter: tuple[str, object], old: Model, cut: int
) -> None:
    sampling = SamplingParams(max_new_tokens=60, ignore_eos=True)
    whole = await engine.generate(PROMPT, sampling, seed=4)
    partial = PartialGeneration(whole.first(cut))
    resumed = await engine.generate(PROMPT, sampling, seed=4, partial=partial)
    assert (len(resumed.tokens), resumed.finish_reason) == (60, "length")
    assert resumed.tokens[:cut].tolist() == whole.tokens[:cut].tolist()
    assert resumed.logprobs[:cut].tolist() == whole.logprobs[:cut].tolist()
    assert resumed.version_spans == whole.version_spans
    assert Check(old)(resumed) < TOLERANCE
    assert partial.num_tokens >= cut
    if adapter[0] == "inprocess":  # its random numbers depend only on the position
        assert resumed.tokens.tolist() == whole.tokens.tolist()


async def test_what_goes_on_with_other_weights_says_so(engine: Engine, new: Model) -> None:
    begun = await engine.generate(PROMPT, SHORT, seed=0)
    await engine.load(new.version(2))
    sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
    generation = await engine.generate(PROMPT, sampling, seed=0, partial=PartialGeneration(begun.first(20)))
    assert [(span.start, span.policy_version) for span in generation.version_spans] == [(0, 1), (20, 2)]
    rest = generation.tokens[20:]
    expected = new.logprobs(np.concatenate([PROMPT, begun.tokens]), rest)
    assert np.abs(expected - generation.logprobs[20:]).max() < TOLERANCE


async def test_an_answer_that_goes_on_ends_at_its_end_token(engine: Engine, old: Model) -> None:
    sampling = SamplingParams(max_new_tokens=2000)
    begun = await engine.generate(PROMPT, SHORT, seed=0)
    prefix = begun.first(20)
    generations = await asyncio.gather(
        *(engine.generate(PROMPT, sampling, seed=n, partial=PartialGeneration(prefix)) for n in range(8))
    )
    for generation in generations:
        assert generation.tokens[:20].tolist() == prefix.tokens.tolist()
        assert (generation.tokens[-1] == old.end_token) == (generation.finish_reason == "stop")


async def test_a_watched_generation_knows_where_the_weights_changed(
    engine: Engine, adapter: tuple[str, object], old: Model, new: Model, chunks: dict[int, list[tuple[int, int]]]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(engine.generate(PROMPT, LONG, seed=1, partial=PartialGeneration()))
        await engine.generate(PROMPT, SHORT, seed=2)
        await engine.load(new.version(2))
    generation = task.result()
    first, second = generation.version_spans
    assert (first.policy_version, second.policy_version) == (1, 2)
    boundary = int(np.argmax(np.abs(old.logprobs(PROMPT, generation.tokens) - generation.logprobs) > 1e-3))
    is_streamed = adapter[0] == "sglang-stream"
    assert is_labelled_rightly(second.start, boundary, chunks, is_streamed=is_streamed)


@pytest.mark.parametrize("adapter", ["sglang", "sglang-stream"], indirect=True)
async def test_a_paused_engine_samples_nothing_takes_new_weights_and_goes_on(
    engine: Engine, old: Model, new: Model
) -> None:
    assert isinstance(engine, Pauses)
    async with asyncio.TaskGroup() as tasks:
        partial = PartialGeneration()
        task = tasks.create_task(engine.generate(PROMPT, LONG, seed=1, partial=partial))
        while partial.num_tokens < 2:
            await asyncio.sleep(0.001)
        await engine.pause()
        assert engine.stats().is_away
        await engine.load(new.version(2))  # whatever was on its way is here by now
        seen = partial.num_tokens
        late = tasks.create_task(engine.generate(PROMPT, SHORT, seed=2))
        await engine.load(old.version(3))
        assert (partial.num_tokens, late.done()) == (seen, False)
        await engine.unpause()
    assert not engine.stats().is_away
    assert len(task.result().tokens) > seen
    assert [span.policy_version for span in task.result().version_spans] == [1, 3]
    assert [span.policy_version for span in late.result().version_spans] == [3]


# -- life and death ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["inprocess"], indirect=True)
async def test_a_request_says_how_long_it_waited_and_when_its_first_token_came(engine: Engine) -> None:
    """SGLang's server says so with enable-metrics alone (test_reply.py)."""
    report = (await engine.generate(PROMPT, SHORT, seed=4)).report
    assert report.queue_seconds is not None
    assert report.first_token_seconds is not None
    assert 0 <= report.queue_seconds < report.first_token_seconds


async def test_a_cancelled_generation_frees_its_place(engine: Engine, adapter: tuple[str, int]) -> None:
    forever = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(engine.generate(PROMPT, forever, seed=n)) for n in range(8)]
        await engine.generate(PROMPT, SHORT, seed=9)
        while adapter[0] in ("inprocess", "sglang-stream") and engine.stats().context_tokens <= 8 * len(PROMPT):
            await asyncio.sleep(0.001)
        for task in running:
            task.cancel()
    await engine.generate(PROMPT, SHORT, seed=9)
    assert all(task.cancelled() for task in running)
    assert engine.stats().running == engine.stats().context_tokens == 0
