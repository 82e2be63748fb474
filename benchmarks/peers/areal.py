"""AReaL: its SGLang client, WorkflowExecutor and StalenessManager, driven as its PPOTrainer drives them.

``python -m benchmarks.peers`` runs this file in a separate environment.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final

from benchmarks.peers.learner import TimedLearner, as_ints, jobs_of, prompt_of, response_of, versions_of

REQUIREMENTS: Final = (
    "areal==1.0.4",
    "omegaconf==2.4.0.dev2",
    "hydra-core==1.4.0.dev1",
    "torchdata==0.11.0",
    "aiofiles==25.1.0",
    "colorlog==6.12.0",
    "tenacity==9.2.1",
    "flask==3.1.3",
    "blinker==1.9.0",
    "itsdangerous==2.2.0",
    "lark==1.3.1",
    "numba==0.68.1",
    "llvmlite==0.50.0",
)
"""Installed without dependencies; our environment has everything else that they import."""

ADAPTATIONS: Final = (
    "max_concurrent_rollouts keeps the engine full: twice capacity / group size groups",
    "a RolloutWorkflow of 20 lines instead of RLVRWorkflow: no tokenizer, no reward",
    "the trainer's loop (prepare_batch, pause, pause_generation, update, continue_generation, set_version, resume) is "
    "called from here, as areal/trainer/rl_trainer.py does; the update itself is the engine's load",
    "one process: SPMD mode, no controller and no RPC",
    "an aborted request asks every 0.5 s whether the update is over: 0.5 s / speed here",
)


class QuickAsyncio:
    """The asyncio module with shorter sleeps."""

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)


class Prompts:
    """The part of a dataloader that prepare_batch needs: endless batches, and their size."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._next = 0

    def __iter__(self) -> Any:
        while True:
            batch = [{"group": group} for group in range(self._next, self._next + self.batch_size)]
            self._next += self.batch_size
            yield batch


def main() -> None:
    import torch
    from areal.api import ModelRequest, RolloutWorkflow
    from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
    from areal.engine.sglang_remote import RemoteSGLangEngine
    from areal.infra import remote_inf_engine

    class OneAnswer(RolloutWorkflow):  # type: ignore[misc]
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            sampling = GenerationHyperparameters(n_samples=1, max_new_tokens=100_000, max_tokens=200_000)
            request = ModelRequest(input_ids=prompt_of(data["group"]), gconfig=sampling)
            answer = await engine.agenerate(request)
            tokens = [*answer.input_tokens, *answer.output_tokens]
            return {
                "input_ids": torch.tensor([tokens], dtype=torch.int32),
                "attention_mask": torch.ones((1, len(tokens)), dtype=torch.bool),
                "versions": torch.tensor([[-1] * answer.input_len + answer.output_versions], dtype=torch.int32),
            }

    for job in jobs_of(sys.argv):
        scene, learner = job.scene, TimedLearner(job)
        remote_inf_engine.asyncio = QuickAsyncio(scene.speed)
        config = InferenceEngineConfig(
            backend="sglang:d1",
            consumer_batch_size=scene.groups_per_batch,
            max_concurrent_rollouts=scene.whole_groups_at_once,
            max_head_offpolicyness=scene.max_staleness,
            request_timeout=600,
        )
        engine = RemoteSGLangEngine(config)
        engine.initialize(addr=job.engine.removeprefix("http://"))
        prompts, workflow = Prompts(scene.groups_per_batch), OneAnswer()
        while not learner.is_done:
            learner.waits()
            batch = engine.prepare_batch(prompts, workflow=workflow, group_size=scene.group_size)
            learner.train([response_of(as_ints(row)) for group in batch for row in group["input_ids"]])
            engine.pause()
            engine.pause_generation()
            learner.load()
            engine.continue_generation()
            engine.set_version(learner.version)
            engine.resume()
        learner.write({"versions": versions_of("areal", "torch", "aiohttp"), "adaptations": ADAPTATIONS})
        engine.destroy()


if __name__ == "__main__":
    main()
