"""verl's fully asynchronous trainer: its Rollouter's loops and its MessageQueue, in its Trainer's order, without Ray.

``python -m benchmarks.peers`` runs this file in a separate environment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from benchmarks.peers.learner import TimedLearner, jobs_of, prompt_of, versions_of
from benchmarks.peers.scene import PROMPT_TOKENS, Job

REQUIREMENTS: Final = (
    "verl==0.9.1",
    "accelerate==1.15.0",
    "antlr4-python3-runtime==4.9.3",
    "cachetools==8.0.2",
    "cloudpickle==3.1.3",
    "codetiming==1.4.0",
    "datasets==5.2.0",
    "hydra-core==1.3.8",
    "multiprocess==0.70.19",
    "omegaconf==2.4.0",
    "peft==0.21.2",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "torchdata==0.11.0",
)
"""Installed without dependencies; our environment has everything else that they import, including Ray."""

ADAPTATIONS: Final = (
    "trigger_parameter_sync_step = 1 and staleness_threshold = max_staleness: a bound in steps, as the others have",
    "concurrent_samples_per_replica keeps the engine full: twice capacity / group size groups",
    "Ray's actors become objects of one event loop; the Rollouter is made without datasets and servers, its feeding, "
    "processing, pausing and reset are its own",
    "the client that resumes after an abort is a copy in words of FullyAsyncLLMServerClient: abort, 1 s (divided by "
    "speed), the rest of the answer",
    "the Trainer takes batches and updates weights (abort, load, resume, reset_staleness) here, in its order",
)


class Group:
    """A prompt's group as the Rollouter passes it on; in verl it is a DataProto."""

    def __init__(self, group: int, size: int) -> None:
        self.group, self._size = group, size
        self.non_tensor_batch: dict[str, Any] = {}
        self.answers: list[list[int]] = []

    def __len__(self) -> int:
        return self._size


class Generating:
    """The agent loop manager: generates all answers of a group, and resumes each after an abort."""

    def __init__(self, job: Job, session: Any) -> None:
        self._job, self._session = job, session

    async def generate_sequences_single(self, group: Group) -> Group:
        group.answers = await asyncio.gather(*(self._answer(group.group) for _ in range(len(group))))
        return group

    async def _answer(self, group: int) -> list[int]:
        input_ids = prompt_of(group)
        while True:
            async with self._session.post(self._job.engine + "/generate", json={"input_ids": input_ids}) as reply:
                answer = json.loads(await reply.read())
            input_ids = [*input_ids, *answer["output_ids"]]
            if answer["meta_info"]["finish_reason"]["type"] != "abort":
                return input_ids[PROMPT_TOKENS:]
            await asyncio.sleep(1 / self._job.scene.speed)


def main() -> None:
    for job in jobs_of(sys.argv):
        asyncio.run(drive(job))


async def drive(job: Job) -> None:
    import aiohttp
    import ray
    from verl.experimental.fully_async_policy import fully_async_rollouter, message_queue

    fully_async_rollouter.prepare_single_generation_data = lambda group, config: group
    rollouter_class = fully_async_rollouter.FullyAsyncRollouter.__ray_metadata__.modified_class
    queue_class = message_queue.MessageQueue.__ray_metadata__.modified_class
    scene, learner = job.scene, TimedLearner(job)

    class Rollouter(rollouter_class):  # type: ignore[misc, valid-type]
        def _create_continuous_iterator(self) -> Iterator[tuple[int, Group]]:
            for group in range(100_000):
                yield 0, Group(group, scene.group_size)

    rollouter = object.__new__(Rollouter)
    rollouter.__dict__.update(_rollouter_state(scene.groups_per_batch))
    rollouter.config = SimpleNamespace(async_training=SimpleNamespace(trigger_parameter_sync_step=1))
    rollouter.staleness_threshold = scene.max_staleness
    rollouter.concurrent_samples_per_replica = scene.whole_groups_at_once
    rollouter.llm_server_manager = SimpleNamespace(get_active_server_count=lambda: 1)
    rollouter._init_async_objects()
    await rollouter.set_max_required_samples()
    queue = queue_class(rollouter.config, rollouter.max_queue_size)
    await rollouter.set_message_queue_client(queue)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        rollouter.async_rollout_manager = Generating(job, session)
        fitting = asyncio.create_task(rollouter.fit())
        while not learner.is_done:
            learner.waits()
            samples = [(await queue.get_sample())[0] for _ in range(scene.groups_per_batch)]
            groups = [ray.cloudpickle.loads(sample).full_batch for sample in samples]
            await asyncio.to_thread(learner.train, [answer for group in groups for answer in group.answers])
            await asyncio.to_thread(learner.post, "/pause_generation", {})
            await asyncio.to_thread(learner.load)
            await asyncio.to_thread(learner.post, "/continue_generation", {})
            await rollouter.reset_staleness()
        counts = await queue.get_statistics()
        learner.write(
            {
                "versions": versions_of("verl", "torch", "ray"),
                "adaptations": ADAPTATIONS,
                "dropped_by_queue": counts["dropped_samples"],
            }
        )
        fitting.cancel()
        await asyncio.gather(fitting, return_exceptions=True)


def _rollouter_state(groups_per_batch: int) -> dict[str, Any]:
    """Return the attributes that FullyAsyncRollouter.__init__ sets, except datasets and servers."""
    import collections
    import time

    now = time.time()
    return {
        "total_rollout_steps": 100_000,
        "required_samples": groups_per_batch,
        "require_batches": 1,
        "max_required_samples": None,
        "max_concurrent_samples": None,
        "max_queue_size": None,
        "total_generated_samples": 0,
        "staleness_samples": 0,
        "dropped_stale_samples": 0,
        "processed_sample_count": 0,
        "_step_generated_samples": 0,
        "_STEP_HISTORY_SIZE": 10,
        "_step_samples_history": collections.deque(maxlen=10),
        "_completed_steps": 1,
        "global_steps": 1,
        "idle_start_time": now,
        "step_start_time": now,
        "paused": False,
        "running": True,
        "dataloader_lock": asyncio.Lock(),
        "pending_queue": asyncio.Queue(maxsize=128),
        "active_tasks": set(),
        "_active_count_history": [(now, 0, 0)],
        "message_queue_client": None,
        "feed_task": None,
        "processor_task": None,
    }


if __name__ == "__main__":
    main()
