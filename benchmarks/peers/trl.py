"""TRL's asynchronous GRPO: its rollout worker (a separate process), queue and staleness rule, in its trainer's order.

``python -m benchmarks.peers`` runs this file in a separate environment.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.peers.learner import TimedLearner, as_ints, jobs_of, prompt_of, response_of, versions_of
from benchmarks.peers.scene import Job

REQUIREMENTS: Final = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "multiprocess==0.70.19")
"""Installed without dependencies; our environment has everything else that they import."""

ADAPTATIONS: Final = (
    "max_inflight_tasks fills the engine (capacity) instead of max_staleness x batch, which would queue in it",
    "queue_maxsize is (max_staleness - 2) batches instead of 1,024 samples: more would wait there until too old",
    "the check that vLLM is installed says yes; the engine answers as vLLM's server does",
    "a tokenizer of 20 lines, a reward that costs nothing",
    "batches are taken from RolloutQueueDataset without the DataLoader around it, whose dispatcher asks a batch ahead",
    "weight sync (pause keeping what runs, transfer, resume, next version) is called from here, as _sync_weight_merged "
    "does; the transfer is the engine's load",
)


class Tokenizer:
    """A tokenizer for messages whose content is the number of their group."""

    response_template = "none"
    response_schema = None
    eos_token = "</s>"
    pad_token_id = 0

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> list[int]:
        return prompt_of(int(messages[0]["content"]))

    def parse_response(self, ids: Sequence[int], **_: Any) -> dict[str, str]:
        return {"role": "assistant", "content": ""}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def even_length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """The reward function."""
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


class Watched:
    """The rollout queue. ``taken`` lists everything taken from it since ``taken`` was cleared, trained or not."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.taken: list[list[int]] = []

    def get(self, timeout: float) -> Any:
        sample = self._queue.get(timeout=timeout)
        self.taken.append(response_of(as_ints(sample.input_ids)))
        return sample

    def qsize(self) -> int:
        return int(self._queue.qsize())


def main() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from accelerate.state import PartialState
    from trl.experimental.async_grpo import async_rollout_worker

    PartialState()
    async_rollout_worker.is_vllm_available = lambda: True
    for job in jobs_of(sys.argv):
        drive(job)


def drive(job: Job) -> None:
    from trl.experimental.async_grpo import async_rollout_worker
    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    scene, learner = job.scene, TimedLearner(job)
    worker = async_rollout_worker.AsyncRolloutWorker(
        model_name="scripted",
        dataset=[{"prompt": [{"role": "user", "content": str(group)}]} for group in range(10_000)],
        reward_funcs=[even_length],
        processing_class=Tokenizer(),
        eos_token_ids=[1],
        num_generations=scene.group_size,
        max_inflight_tasks=scene.capacity,
        queue_maxsize=max(1, scene.max_staleness - 2) * scene.samples,
        vllm_server_url=job.engine,
        max_tokens=100_000,
        request_timeout=600,
    )
    worker.start()
    queue = Watched(worker.rollout_buffer)
    samples = iter(
        RolloutQueueDataset(
            rollout_queue=queue,
            model_version_fn=lambda: learner.version,
            check_health_fn=worker.check_health,
            stale_after_s=300.0,
            metrics=defaultdict(list),
            max_staleness=scene.max_staleness,
        )
    )
    try:
        while not learner.is_done:
            learner.waits()
            batch = [response_of(as_ints(next(samples)["input_ids"])) for _ in range(scene.samples)]
            learner.throw_away(_without(queue.taken, batch))
            queue.taken.clear()
            learner.train(batch)
            learner.post("/pause?mode=keep", {})
            learner.load()
            learner.post("/resume", {})
            worker.update_model_version(learner.version)
        learner.write({"versions": versions_of("trl", "torch", "accelerate", "aiohttp"), "adaptations": ADAPTATIONS})
    finally:
        worker.stop()


def _without(taken: Sequence[list[int]], trained: Sequence[list[int]]) -> list[list[int]]:
    """Return what was taken but not trained; both lists are in the same order."""
    rest = iter(trained)
    upcoming = next(rest, None)
    thrown = []
    for answer in taken:
        if answer == upcoming:
            upcoming = next(rest, None)
        else:
            thrown.append(answer)
    return thrown


if __name__ == "__main__":
    main()
