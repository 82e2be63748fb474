"""slime's fully asynchronous rollout: its worker, queue and requeueing, in the order of its train_async.py.

``python -m benchmarks.peers`` runs this file with a clone of slime's source.
"""

from __future__ import annotations

import asyncio
import enum
import json
import sys
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.peers.learner import TimedLearner, jobs_of, prompt_of
from benchmarks.peers.scene import PROMPT_TOKENS, Job

COMMIT: Final = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
REQUIREMENTS: Final = ()
SOURCES: Final = (("https://github.com/THUDM/slime", COMMIT, (".",)),)

ADAPTATIONS: Final = (
    "sglang_server_concurrency is the engine's capacity: so many samples run, so many groups are begun",
    "slime.rollout.sglang_rollout is a stand-in: a semaphore, one request a sample, what was aborted goes on when its "
    "group comes again, as there; Sample is a stand-in; no Ray, no router",
    "the worker looks for free places once a second: 1 s / speed here",
    "slime has no bound on staleness: update_weights_interval = 1, the next batch is awaited before an update",
    "pause_generation (abort), load and continue_generation are called from here, as update_weights does",
)


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    ABORTED = "aborted"


@dataclass(slots=True)
class Sample:
    index: int
    input_ids: list[int]
    status: Status = Status.PENDING


Sample.Status = Status  # type: ignore[attr-defined]  # as slime names it


@dataclass(slots=True)
class Buffer:
    """The data buffer: returned samples first, then new prompts."""

    group_size: int
    returned: deque[list[Sample]] = field(default_factory=deque)
    next_group: int = 0

    def get_samples(self, count: int) -> list[list[Sample]]:
        return [self.returned.popleft() if self.returned else self._new() for _ in range(count)]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.returned.extend(groups)

    def _new(self) -> list[Sample]:
        group = self.next_group
        self.next_group += 1
        return [Sample(group * self.group_size + i, prompt_of(group)) for i in range(self.group_size)]


class Generating:
    """The replacement of sglang_rollout."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._semaphore = asyncio.Semaphore(job.scene.capacity)
        self._session: Any = None

    async def group(self, args: Any, group: list[Sample], **_: Any) -> list[Sample]:
        return await asyncio.gather(*map(self._sample, group))

    async def _sample(self, sample: Sample) -> Sample:
        import aiohttp

        if sample.status == Status.COMPLETED:
            return sample
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=600)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        async with self._semaphore:
            url = self._job.engine + "/generate"
            async with self._session.post(url, json={"input_ids": sample.input_ids}) as reply:
                answer = json.loads(await reply.read())
        sample.input_ids = [*sample.input_ids, *answer["output_ids"]]
        aborted = answer["meta_info"]["finish_reason"]["type"] == "abort"
        sample.status = Status.ABORTED if aborted else Status.COMPLETED
        return sample


def stand_in(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    return module


def main() -> None:
    state = types.SimpleNamespace(sampling_params={})
    stand_in("slime.rollout.sglang_rollout", GenerateState=lambda args: state, generate_and_rm_group=None)
    stand_in("slime.utils.http_utils", get_rollout_num_engines=lambda args: 1)
    stand_in("slime.utils.types", Sample=Sample)
    for job in jobs_of(sys.argv):
        drive(job)


def drive(job: Job) -> None:
    from slime.rollout import fully_async_rollout

    scene, learner, buffer = job.scene, TimedLearner(job), Buffer(job.scene.group_size)
    fully_async_rollout.generate_and_rm_group = Generating(job).group
    args = types.SimpleNamespace(
        rollout_global_dataset=True,
        rollout_batch_size=scene.groups_per_batch,
        sglang_server_concurrency=scene.capacity,
    )
    worker = fully_async_rollout._get_global_worker(args, buffer)
    worker.poll_interval = 1.0 / scene.speed
    with ThreadPoolExecutor(1) as rollout_manager:

        def generate() -> list[list[Sample]]:
            groups: list[list[Sample]] = fully_async_rollout.generate_rollout_fully_async(args, learner.version, buffer)
            return groups

        learner.waits()
        batch = rollout_manager.submit(generate).result()
        while not learner.is_done:
            upcoming = rollout_manager.submit(generate)
            learner.train([sample.input_ids[PROMPT_TOKENS:] for group in batch for sample in group])
            learner.waits()
            batch = upcoming.result()  # the next batch is complete before the weights change
            learner.post("/pause_generation", {})
            learner.load()
            learner.post("/continue_generation", {})
        learner.write({"versions": {"slime": COMMIT}, "adaptations": ADAPTATIONS})
    fully_async_rollout._stop_global_worker()


if __name__ == "__main__":
    main()
