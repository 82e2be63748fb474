"""prime-rl's orchestrator: its own Dispatcher, with its sink's sweep, batch hold and dispatch gate reimplemented here.

``python -m benchmarks.peers`` runs this file with a clone of prime-rl's source.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import types
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.peers.learner import TimedLearner, jobs_of, prompt_of
from benchmarks.peers.scene import Job

COMMIT: Final = "559b44772e471d1538537b8805cc77f3824a5e64"
REQUIREMENTS: Final = ("aiolimiter==1.2.1",)
SOURCES: Final = (("https://github.com/PrimeIntellect-ai/prime-rl", COMMIT, ("src",)),)
TARGET_LAG: Final = 1  # as in orchestrator.py

ADAPTATIONS: Final = (
    "the Dispatcher is its own; verifiers and its other modules' types are stand-ins",
    "TrainSink's sweep of what is too old, the hold of a batch until v(step - 2) is there, and the gate that stops "
    "dispatching at a lead over 1 are told again here",
    "a fixed cap on episodes that fills the engine (capacity) instead of the controller on the KV cache",
    "the burst window of 5 s is 5 s / speed",
    "weights: what runs is kept (pause, load, resume); stale groups are cancelled before, as WeightWatcher does",
)


class Loose:
    """A type with the fields that it is created with."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@dataclass
class Policy:
    version: int = 0
    model_name: str = "scripted"


@dataclass
class Progress:
    step: int = 1


@dataclass
class Cancellation:
    kind: str
    env_name: str
    group_id: str
    count: int
    reason: str


@dataclass
class Inflight:
    kind: str
    env_name: str
    group_id: uuid.UUID
    task: Any
    policy_version: int
    step: int
    client_config: Any = None
    started_at: float = 0.0


@dataclass
class GroupState:
    kind: str
    env_name: str
    task: Any
    step: int
    episodes_to_schedule: int
    target_episodes: int
    emitted: int = 0
    pinned_client: Any = None
    policy_version_at_start: int = 0


class Task:
    """One prompt."""

    def __init__(self, group: int) -> None:
        self.key = self.hash = str(group)
        self.data = Loose(model_dump=lambda mode: group)


class Episode:
    """One answer, with the Dispatcher's stamps."""

    def __init__(self, task: int, tokens: list[int]) -> None:
        self.task = Loose(key=str(task), hash=str(task))
        self.tokens, self.num_total_tokens = tokens, len(tokens)
        self.ok, self.env = True, Loose()
        self.errors: list[Any] = []
        self.traces = [Loose(has_error=False, num_turns=1)]
        self.group: Any = None
        self.started = 0

    def record_run(self, run: Any) -> None:
        self.started = run.work.policy.start


@dataclass
class Environment:
    job: Job
    session: Any
    config: Any = None
    generation_source: Any = None

    def __post_init__(self) -> None:
        self.config = Loose(group_size=self.job.scene.group_size)
        self.generation_source = Loose(uses_live_policy=True, pool=Loose(train_client=None))

    def get(self, name: str) -> Environment:
        return self

    def __iter__(self) -> Any:
        return iter([self])

    async def run(self, *, task_data: int, **_: Any) -> Episode:
        input_ids = prompt_of(task_data)
        async with self.session.post(self.job.engine + "/generate", json={"input_ids": input_ids}) as reply:
            return Episode(task_data, json.loads(await reply.read())["output_ids"])


@dataclass
class Source:
    next_group: int = 0

    def next_task(self, *, step: int) -> Any:
        self.next_group += 1
        return Loose(env_name="scripted", task=Task(self.next_group - 1), step=step)


@dataclass
class Sink:
    """Collects whole groups, and keeps those that are fresh enough."""

    learner: TimedLearner
    progress: Progress
    job: Job
    arriving: dict[str, list[Episode]] = field(default_factory=lambda: defaultdict(list))
    ready: list[Episode] = field(default_factory=list)

    def add(self, result: Any) -> list[Episode] | None:
        if isinstance(result, Cancellation):
            self._void(self.arriving.pop(result.group_id, []))
        else:
            group = self.arriving[result.group.id]
            group.append(result)
            if len(group) == self.job.scene.group_size:
                self.ready += self.arriving.pop(result.group.id)
        oldest = self.progress.step - 1 - self.job.scene.max_staleness
        self._void([episode for episode in self.ready if episode.started < oldest])
        self.ready = [episode for episode in self.ready if episode.started >= oldest]
        count = self.job.scene.samples
        if len(self.ready) < count:
            return None
        batch, self.ready = self.ready[:count], self.ready[count:]
        return batch

    def _void(self, episodes: list[Episode]) -> None:
        self.learner.throw_away([episode.tokens for episode in episodes])


def stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


def stand_ins() -> None:
    loose = (
        "TraceTask",
        "EnvInfo",
        "Error",
        "GroupInfo",
        "PolicySpan",
        "EvalWorkInfo",
        "TrainWorkInfo",
        "TrainRunInfo",
    )
    stand_in("verifiers")
    stand_in("verifiers.v1", WireEpisode=Loose, **dict.fromkeys(loose, Loose))
    vars(sys.modules["verifiers"])["v1"] = sys.modules["verifiers.v1"]
    stand_in("prime_rl.orchestrator.envs", EvalEnvs=None, TrainEnvs=None)
    stand_in("prime_rl.orchestrator.eval_source", EvalSource=None)
    stand_in("prime_rl.orchestrator.train_source", TrainSource=None)
    kinds: dict[str, Any] = {"CancelReason": str, "DispatchResult": Any, "WorkKind": str}
    states = {"GroupCancellation": Cancellation, "GroupState": GroupState, "InflightEpisode": Inflight}
    stand_in("prime_rl.orchestrator.types", Policy=Policy, Progress=Progress, **kinds, **states)
    stand_in("prime_rl.orchestrator.utils", min_fresh_version=lambda step, bound: step - 1 - bound)
    stand_in("prime_rl.utils.client", InferencePool=None)
    stand_in("prime_rl.utils.logger", get_logger=lambda: logging.getLogger("prime_rl"))


def main() -> None:
    stand_ins()
    for job in jobs_of(sys.argv):
        asyncio.run(drive(job))


async def drive(job: Job) -> None:
    import aiohttp
    from prime_rl.orchestrator.dispatcher import Dispatcher

    scene, learner, policy, progress = job.scene, TimedLearner(job), Policy(), Progress()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        dispatcher = Dispatcher(
            train_envs=Environment(job, session),
            eval_envs=None,
            train_source=Source(),
            eval_source=None,
            policy_pool=None,
            policy=policy,
            progress=progress,
            initial_max_inflight=scene.capacity,
            max_inflight_ceiling=scene.capacity,
            tasks_per_minute=None,
            max_off_policy_steps=scene.max_staleness,
            run_id="peers",
            run_name=None,
        )
        dispatcher.admission_window_s /= scene.speed
        advanced, batches = asyncio.Event(), asyncio.Queue[list[Episode]]()

        def gate() -> None:
            is_open = progress.step - 1 - policy.version <= TARGET_LAG
            (dispatcher.dispatch_allowed.set if is_open else dispatcher.dispatch_allowed.clear)()

        async def orchestrate() -> None:
            sink = Sink(learner, progress, job)
            while True:
                batch = sink.add(await dispatcher.out_q.get())
                if batch is None:
                    continue
                while policy.version < progress.step - 1 - TARGET_LAG:
                    advanced.clear()
                    await advanced.wait()
                batches.put_nowait(batch)
                progress.step += 1
                gate()

        tasks = [asyncio.create_task(dispatcher.start()), asyncio.create_task(orchestrate())]
        while not learner.is_done:
            learner.waits()
            batch = await batches.get()
            await asyncio.to_thread(learner.train, [episode.tokens for episode in batch])
            policy.version = learner.version
            advanced.set()
            await dispatcher.on_version_pending(learner.version)
            await asyncio.to_thread(learner.post, "/pause?mode=keep", {})
            await asyncio.to_thread(learner.load)
            await asyncio.to_thread(learner.post, "/resume", {})
            gate()
        learner.write({"versions": {"prime-rl": COMMIT}, "adaptations": ADAPTATIONS})
        await dispatcher.stop()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    main()
