"""The evaluator alone on a bus: what it requests, when it ends, and how it treats an earlier evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner import evaluation_round
from asyncrl.actors.learner.best_model import RESULT_FILE, BestModel
from asyncrl.actors.learner.evaluator import Evaluator
from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.errors import WeightsError
from asyncrl.messages import Heartbeat, VersionSpan, WeightVersion
from asyncrl.messages.evaluation import Answer, Evaluation, EvaluationAnswers
from asyncrl.messages.roles import EVALUATION_WORKER
from asyncrl.messages.topics import ACTORS, EVALUATION, EVALUATION_ANSWERS, EVALUATION_PROMPTS
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.evaluation.verdict import MOST_REFUSED
from asyncrl.policies.groups.table import GroupTable
from tests.harness.evaluation import section, sums
from tests.harness.fakes import Channel

pytestmark = pytest.mark.timeout(600)

LAST = Evaluation(number=3, weights=WeightVersion(incarnation=0, policy_version=20), num_prompts=5)
"""An evaluation that an earlier incarnation began."""


@pytest.fixture
def bus() -> MemoryBus:
    return FarBus(max_prompts=64, max_log_bytes=2**20, ack_seconds=30, max_message_bytes=2**20)


class FarBus(MemoryBus):
    """A bus whose log takes longer to read than a prompt takes to publish."""

    @contextlib.asynccontextmanager
    async def read(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        async with super().read(*arguments, **named) as records:

            async def slowly() -> AsyncIterator[Any]:
                async for record in records:
                    for _ in range(100):
                        await asyncio.sleep(0)
                    yield record

            yield slowly()


@dataclass
class Incarnation:
    """One incarnation of a learner, reduced to evaluations. Its results: version -> row."""

    bus: MemoryBus
    version: int = 20
    resume_points: Mapping[int, int] = field(default_factory=dict)
    its: EvaluationSet = field(default_factory=sums)
    channel: Channel = field(default_factory=Channel)
    enough: float = 1.0
    results: dict[tuple[float, int], Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(
            self.bus,
            section=section(every_steps=10, place="dedicated", timeout_seconds=0, at_end=False, enough=self.enough),
            sets=[self.its],
            seed=0,
            last_step=100,
            channel=self.channel,
            metrics=MetricsReporter(self.bus, [self]),
            table=GroupTable(step=self.version, resume_points=self.resume_points),
            waits=WaitTracker(),
        )

    def write(self, step: int, metrics: Any) -> None:
        """As a sink of metrics."""
        self.results[metrics["learner/incarnation"], step] = metrics

    def close(self) -> None: ...

    async def until_idle(self) -> None:
        """Finish the evaluations that were resumed or begun."""
        running = asyncio.create_task(self.evaluator.run())
        await self.evaluator.finish()
        running.cancel()
        await asyncio.wait((running,))

    async def newest(self) -> Evaluation:
        return (await self.bus.states(EVALUATION))[""]


async def answer(
    bus: MemoryBus, evaluation: Evaluation, *indices: int, version: int | None = None, pinned_seconds: float = 0.0
) -> None:
    """version: the version that sampled the answers; None: the evaluated one"""
    incarnation, own = evaluation.weights.version
    span = VersionSpan(start=0, incarnation=incarnation, policy_version=own if version is None else version)
    for index in indices:
        made = EvaluationAnswers(
            number=evaluation.number,
            group_id=evaluation.group_id(index),
            dataset="sums",
            answers=(Answer(reward=1.0, length=4, version_spans=(span,)),) * 2,
            worker="e0",
            pinned_seconds=pinned_seconds,
        )
        await bus.publish(EVALUATION_ANSWERS, made, key=f"{index}-{uuid.uuid4().hex}")


async def answer_what_is_asked(bus: MemoryBus, *, version: int | None = None) -> None:
    """Act as a worker until cancelled."""
    async with bus.consume(EVALUATION_PROMPTS) as deliveries:
        async for delivery in deliveries:
            evaluation = (await bus.states(EVALUATION))[""]
            assert delivery.message is not None
            index = evaluation.index(delivery.message.group_id)
            assert index is not None
            await answer(bus, evaluation, index, version=version)
            await delivery.ack()


async def say_unable(bus: MemoryBus, evaluation: Evaluation, worker: str) -> None:
    said = EvaluationAnswers(number=evaluation.number, group_id=None, error="no such folder", worker=worker)
    await bus.publish(EVALUATION_ANSWERS, said, key=f"unable-{worker}")


async def beats(bus: MemoryBus, *workers: str) -> None:
    for name in workers:
        await bus.put(ACTORS, Heartbeat(actor=name, role=EVALUATION_WORKER), key=name)


async def test_an_evaluation_that_is_taken_up_asks_only_for_what_is_missing(bus: MemoryBus) -> None:
    await bus.put(EVALUATION, LAST)
    # mixed versions: would be requested again without the later answer in the log
    await answer(bus, LAST, 0, version=19)
    await answer(bus, LAST, 0, 2, 4)
    incarnation = Incarnation(bus)
    await incarnation.evaluator.start()
    worker = asyncio.create_task(answer_what_is_asked(bus))
    await incarnation.until_idle()
    worker.cancel()
    assert await bus.last_sequence(EVALUATION_PROMPTS) == 2
    row = incarnation.results[0, 20]
    assert (row["evaluation/complete"], row["evaluation/mixed"]) == (1.0, 1.0)


@pytest.mark.parametrize(("enough", "num_answers"), [(0.6, 3), (0.61, 4), (1e-9, 1)])
async def test_an_evaluation_ends_once_enough_prompts_have_answers(
    bus: MemoryBus, enough: float, num_answers: int
) -> None:
    await bus.put(EVALUATION, LAST)
    await answer(bus, LAST, *range(num_answers))
    incarnation = Incarnation(bus, enough=enough)
    await incarnation.evaluator.start()
    await incarnation.until_idle()  # no worker answers the rest
    row = incarnation.results[0, 20]
    assert row["evaluation/complete"] == 0.0
    assert (row["evaluation/sums/prompts"], row["evaluation/sums/missing"]) == (5.0, 5.0 - num_answers)


async def test_an_engine_that_never_keeps_to_the_version_ends_its_evaluation_with_the_reason(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evaluation_round, "FULL_SECONDS", 0.01)
    await bus.put(EVALUATION, LAST)
    incarnation = Incarnation(bus)
    await incarnation.evaluator.start()
    worker = asyncio.create_task(answer_what_is_asked(bus, version=19))
    await incarnation.until_idle()
    worker.cancel()
    row = incarnation.results[0, 20]
    assert (row["evaluation/complete"], row["evaluation/sums/missing"]) == (0.0, 5.0)
    assert row["evaluation/mixed"] == 5 * MOST_REFUSED
    assert "given up after 16 rejected answers, the last from e0: not all of version 20" in caplog.text


async def test_after_a_fall_back_the_same_steps_are_due_again(bus: MemoryBus, caplog: pytest.LogCaptureFixture) -> None:
    await bus.put(EVALUATION, LAST)
    incarnation = Incarnation(bus, version=10, resume_points={1: 10})
    await incarnation.evaluator.start()
    assert (await incarnation.newest()).is_over, "nobody needs the rest of a rolled-back version"
    assert "lost when the learner fell back to version 10" in caplog.text
    await incarnation.evaluator.begin_if_due(WeightVersion(incarnation=1, policy_version=10))
    assert (await incarnation.newest()).weights.version == (0, 20), "version 10 is what it was"
    await incarnation.evaluator.begin_if_due(WeightVersion(incarnation=1, policy_version=20))
    newest = await incarnation.newest()
    assert (newest.weights.version, newest.number, newest.is_over) == ((1, 20), 4, False)
    worker = asyncio.create_task(answer_what_is_asked(bus))
    await incarnation.until_idle()
    worker.cancel()
    assert list(incarnation.results) == [(1, 20)]


class Gone(Channel):
    def verify(self, weights: WeightVersion) -> Path:
        raise WeightsError(f"{weights.uri} is gone")


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_version_that_nobody_can_load_ends_its_evaluation_at_once(
    bus: MemoryBus, is_gone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If the learner also misses the version, the first worker's report is enough; otherwise the last worker's is
    needed."""
    await bus.put(EVALUATION, LAST)
    await beats(bus, "e0", "e1")
    await answer(bus, LAST, 1)
    await say_unable(bus, LAST, "e0")
    incarnation = Incarnation(bus, channel=Gone() if is_gone else Channel())
    await incarnation.evaluator.start()
    if not is_gone:
        await say_unable(bus, LAST, "e1")
    await incarnation.until_idle()
    row = incarnation.results[0, 20]
    assert (row["evaluation/complete"], row["evaluation/sums/missing"]) == (0.0, 4.0)
    assert ("its weights are gone" if is_gone else "no worker can load it; e0: no such folder") in caplog.text


@pytest.mark.parametrize("up", [["e0", "e1"], []], ids=["another is up", "it has ended, and another will come"])
async def test_a_worker_that_cannot_load_a_version_leaves_it_to_others(bus: MemoryBus, up: list[str]) -> None:
    await bus.put(EVALUATION, LAST)
    await beats(bus, *up)
    await say_unable(bus, LAST, "e0")
    incarnation = Incarnation(bus)
    await incarnation.evaluator.start()
    worker = asyncio.create_task(answer_what_is_asked(bus))
    await incarnation.until_idle()
    worker.cancel()
    assert incarnation.results[0, 20]["evaluation/complete"] == 1.0


def version(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(text)
    return folder


def test_a_better_model_takes_the_place_of_the_best(tmp_path: Path) -> None:
    best = BestModel(tmp_path / "best", metric="aime/mean@8")
    for step, value in enumerate([0.2, 0.5, 0.5, 0.4]):
        best.keep_if_better(
            version(tmp_path / f"0-{step}", f"weights {step}"), {"evaluation/aime/mean@8": value}, version=(0, step)
        )
    assert (tmp_path / "best" / "model.safetensors").read_text() == "weights 1"
    assert json.loads((tmp_path / "best" / RESULT_FILE).read_text())["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-0", "0-1", "0-2", "0-3", "best"]


def test_a_resumed_run_knows_how_good_the_best_was(tmp_path: Path) -> None:
    BestModel(tmp_path / "best", metric="a/mean@1").keep_if_better(
        version(tmp_path / "0-1", "one"), {"evaluation/a/mean@1": 0.5}, version=(0, 1)
    )
    again = BestModel(tmp_path / "best", metric="a/mean@1")
    assert not again.keep_if_better(version(tmp_path / "1-2", "two"), {"evaluation/a/mean@1": 0.4}, version=(1, 2))
    other = BestModel(tmp_path / "best", metric="a/pass@1")  # another metric: its values cannot be compared
    assert other.keep_if_better(tmp_path / "1-2", {"evaluation/a/pass@1": 0.1}, version=(1, 2))
    assert (tmp_path / "best" / "model.safetensors").read_text() == "two"


def test_a_learner_that_died_between_two_renames_has_lost_nothing(tmp_path: Path) -> None:
    measured = {"evaluation/a/mean@1": 0.5}
    BestModel(tmp_path / "best", metric="a/mean@1").keep_if_better(
        version(tmp_path / "0-1", "one"), measured, version=(0, 1)
    )
    (tmp_path / "best").rename(tmp_path / ".best-old")
    again = BestModel(tmp_path / "best", metric="a/mean@1")
    assert not again.keep_if_better(version(tmp_path / "1-2", "two"), {"evaluation/a/mean@1": 0.4}, version=(1, 2))
    assert (tmp_path / "best" / "model.safetensors").read_text() == "one"


@pytest.mark.parametrize("metrics", [{}, {"evaluation/b/mean@1": 1.0}])
def test_without_the_metric_nothing_is_kept(metrics: dict[str, float], tmp_path: Path) -> None:
    assert not BestModel(tmp_path / "best", metric="a/mean@1").keep_if_better(tmp_path, metrics, version=(0, 1))
    assert not (tmp_path / "best").exists()
