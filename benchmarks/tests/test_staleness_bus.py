"""The staleness benchmark on the real loop: its lag is forced, and its parts follow the run file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.adapters import registry
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.engines.generation import Generation
from asyncrl.messages import SamplingParams
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence
from asyncrl.tensors.snapshot import Snapshot
from benchmarks import staleness_bus
from benchmarks.delayed_channel import SPARE, DelayedChannel
from benchmarks.staleness_bus import ARMS, Arm
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.packing import pack
from tests.harness.tiny import engine as tiny_engine
from tests.harness.tiny import files as tiny_files
from tests.harness.tiny import task as staleness_task
from tests.harness.tiny.engine import TinyEngine
from tests.harness.tiny.task import LENGTH, Policy


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.new(torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    tiny_files.write(made, policy)
    return made


# -- the lag -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_a_delay_as_long_as_the_bound_every_token_is_as_old_as_the_bound() -> None:
    row = staleness_bus.run(Arm(name="forced", max_staleness=4, delay=4), seed=0, steps=14)
    assert sum(row["lag_histogram"]) == 14 * 16 * 8 * LENGTH
    assert row["lag_max"] == 4
    assert row["lags"][:5] == [0, 1, 2, 3, 4]  # the first window is version 0's
    # Between the two are groups of versions 1 to 4, which the publisher may pass over on a slow disk.
    assert row["lags"][9:] == [4] * 5
    assert row["dropped_groups"] == row["failed_groups"] == 0


@pytest.mark.slow
def test_with_a_shorter_delay_the_bound_holds_while_everybody_races() -> None:
    row = staleness_bus.run(Arm(name="racing", max_staleness=4, delay=2), seed=0, steps=14)
    assert row["lag_max"] <= 4
    assert row["lag_histogram"][5:] == [0] * 12
    assert row["lag_mean"] > 1


def test_a_version_is_announced_as_late_as_asked(policy: Policy, folder: Path, tmp_path: Path) -> None:
    channel = DelayedChannel(tmp_path, keep=2 + SPARE, model_path=folder / "model")
    snapshot = Snapshot.from_tensors(policy.named_parameters.items())
    announced = [channel.publish(snapshot, incarnation=0, policy_version=version) for version in range(1, 12)]
    assert [weights.policy_version for weights in announced] == [0, 0, *range(1, 10)]
    assert channel.verify(announced[-1]).is_dir()


def test_a_version_that_was_never_written_does_not_hold_up_its_groups(
    policy: Policy, folder: Path, tmp_path: Path
) -> None:
    channel = DelayedChannel(tmp_path, keep=2 + SPARE, model_path=folder / "model")
    snapshot = Snapshot.from_tensors(policy.named_parameters.items())
    announced = [channel.publish(snapshot, incarnation=0, policy_version=version) for version in (1, 3, 4)]
    assert [weights.policy_version for weights in announced] == [0, 1, 3]


def test_broken_promises_are_named() -> None:
    rows = [
        {
            "arm": name,
            "reward": reward,
            "lag_mean": lag,
            "lag_max": lag,
            "steps": 1000,
            "steps_per_second": 5.0,
        }
        for name, reward, lag in (("sync", 0.9, 0), ("none", 0.5, 16), ("tis_token", 0.5, 17), ("small", 0.9, 1))
    ]
    arms = {str(row["arm"]): row for row in rows}
    # The forced lag's mean over 1000 steps is 16 - 136 / 1000 = 15.86.
    assert list(staleness_bus.broken_promises(arms)) == [
        "tis_token: a token was 17 versions old; the bound is 16",
        "tis_token: the mean lag is 17.00; it was to be 15.86",
        "tis_token keeps 0.56 of the reward of sync; it must keep 0.85",
        "none keeps 0.56 of the reward of sync; it must fall to 0.4",
    ]


# -- engine and backend ------------------------------------------------------------------------------------------------


async def generated(folder: Path, *, behavior: str = "right", seeds: range = range(8)) -> list[Generation]:
    options = tiny_engine.Options(behavior=behavior)  # type: ignore[arg-type]
    engine = TinyEngine(folder / "model", device="cpu", dtype="float32", version=(0, 0), options=options)
    await engine.start()
    prompt = np.array([3, 5], np.int32) + tiny_files.FIRST_DIGIT
    sampling = SamplingParams(max_new_tokens=LENGTH)
    return list(await asyncio.gather(*(engine.generate(prompt, sampling, seed=seed) for seed in seeds)))


async def test_the_engine_reports_the_logprobs_of_what_it_sampled(policy: Policy, folder: Path) -> None:
    answers = await generated(folder)
    tokens = torch.from_numpy(np.stack([answer.tokens for answer in answers])).long() - tiny_files.FIRST_DIGIT
    expected = policy.logprobs(torch.tensor([[3, 5]] * 8), tokens)
    torch.testing.assert_close(torch.from_numpy(np.stack([answer.logprobs for answer in answers])), expected)


async def test_a_sample_depends_on_its_seed_and_not_on_what_runs_beside_it(folder: Path) -> None:
    together = await generated(folder)
    (alone,) = await generated(folder, seeds=range(5, 6))
    assert np.array_equal(alone.tokens, together[5].tokens)
    assert len({answer.tokens.tobytes() for answer in together}) > 1


async def test_a_lying_engine_samples_the_same_and_reports_something_else(folder: Path) -> None:
    right = await generated(folder)
    shifted = await generated(folder, behavior="shifted")
    shuffled = await generated(folder, behavior="shuffled")
    for answer, other in zip(right, shifted, strict=True):
        assert np.array_equal(answer.tokens, other.tokens)
        assert np.array_equal(answer.logprobs[:-1], other.logprobs[1:])
    known = {answer.logprobs.tobytes() for answer in right}
    assert all(answer.logprobs.tobytes() in known for answer in shuffled)
    assert any(not np.array_equal(a.logprobs, b.logprobs) for a, b in zip(right, shuffled, strict=True))


def test_every_arm_is_a_run_file_that_a_run_accepts(folder: Path) -> None:
    for arm in ARMS.values():
        run = arm.run_file(folder, seed=0, steps=30)
        assert registry.engine_class(run).options(run) is not None
        assert registry.backend(run) is not None
        assert registry.channel(run, bus=MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)) is not None
        assert registry.load_reward(run) is not None


def test_the_backend_goes_on_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = ARMS["tis_token"].run_file(folder, seed=0, steps=30)
    batches = [[micro_batch(seed)] for seed in range(3)]
    straight, first, second = registry.backend(run), registry.backend(run), registry.backend(run)
    for backend in (straight, first, second):
        backend.start()
    for batch in batches:
        expected = straight.step([batch], learning_rate=1e-2)
    for batch in batches[:2]:
        first.step([batch], learning_rate=1e-2)
    first.save(tmp_path / "state")
    second.restore(tmp_path / "state")
    assert second.step([batches[2]], learning_rate=1e-2).metrics == expected.metrics


def micro_batch(seed: int) -> MicroBatch:
    generator = np.random.default_rng(seed)
    mask = np.arange(2 + LENGTH) >= 2

    def sequence() -> TrainingSequence:
        def per_token(values: Any) -> Any:
            return np.where(mask, values, 0).astype(np.float32)

        return TrainingSequence(
            tokens=(generator.integers(0, staleness_task.SIZE, 2 + LENGTH) + tiny_files.FIRST_DIGIT).astype(np.int32),
            response_mask=mask,
            behavior_logprobs=per_token(-2.0),
            advantages=per_token(generator.normal()),
            loss_weights=per_token(1 / 24),
            staleness=np.zeros(2 + LENGTH, np.int32),
        )

    (made,) = pack([sequence() for _ in range(4)], max_tokens=1024)
    return made
