"""Prompt groups in, rewarded trajectory groups out.

Invariants (tests/test_actors.py):
  W1 publish, then ack: a worker that dies in between repeats the group, and the learner's ledger makes the repeat
     harmless. It never loses one.
  W2 every prompt group becomes exactly one trained, dropped or buried group: what cannot be made is published as
     buried, so that its place in the window comes free.
  W4 a group on its last attempt has the worker to itself: what kills workers takes no other group with it.
  W3 draining takes no new prompt and finishes what is held; asked twice, it hands that over (tests/test_handover.py).
What it has of unfinished groups lies on the bus too: see salvage.py.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl import messages
from asyncrl.actors.attempts import Attempts
from asyncrl.actors.base import Actor
from asyncrl.actors.occupancy import Activity, Places, Room
from asyncrl.actors.prefetch import Loan, Pace, Prefetch
from asyncrl.actors.salvage import Parts, Salvage
from asyncrl.actors.stragglers import Stragglers
from asyncrl.actors.waits import Answers
from asyncrl.actors.weight_follower import WeightFollower
from asyncrl.errors import (
    BusError,
    BusFull,
    EngineDied,
    EngineError,
    MessageTooLarge,
    PromptError,
    RewardError,
    RolloutError,
)
from asyncrl.logs import REASON
from asyncrl.messages import Event, Heartbeat, PromptGroup, Trajectory, TrajectoryGroup, Wait
from asyncrl.policies.faults import FIRST_SECONDS, LEARNER, SPACE_IN_LOG
from asyncrl.protocols import Bus, Delivery, Engine, Generation, RewardFn, RolloutFn, Sample, Tokenizer
from asyncrl.topics import EVENTS, PROGRESS, PROMPTS, QUARANTINE, TRAJECTORIES, group_id_of

RETRY_SECONDS = 0.5
MOST_EXPLAINED = 100
FULL_LOG_SECONDS = 1.0


class RolloutWorker(Actor):
    """consumes: prompts    publishes: trajectories    woken by: the prompt source, and its own free slots"""

    role = "rollout-worker"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        engine: Engine,
        follower: WeightFollower,
        rollout: RolloutFn,
        reward: RewardFn,
        tokenizer: Tokenizer,
        seed: int,
        max_running: int,
        max_attempts: int,
        keep_seconds: float,
        stragglers: Stragglers | None = None,
        salvage: Salvage | None = None,
        ahead: Callable[[], int] | None = None,
    ) -> None:
        """``ahead``: prompt groups kept ready beyond those there is room for; None is what its pace asks for."""
        super().__init__(name, bus)
        self._salvage = salvage or Salvage(bus, worker=name, seconds=0, max_attempts=max_attempts, max_staleness=0)
        self._engine = engine
        self._follower = follower
        self._rollout = rollout
        self._reward = reward
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_attempts = max_attempts
        self._keep_seconds = keep_seconds
        self._stragglers = stragglers
        self._room = Room(max_running)
        self._ahead = ahead
        self._pace = Pace()
        self._explained: set[str] = set()
        """Reasons whose traceback is in the log."""
        self._attempts = Attempts(bus, worker=name, max_attempts=max_attempts)
        self._activity = Activity()
        self._answers = Answers()
        self._hurried = asyncio.Event()

    async def start(self) -> None:
        with self.waiting("its engine to start", on="start", first=FIRST_SECONDS):
            await self._engine.start()

    async def stop(self) -> None:
        await self._engine.close()
        await self._reward.close()

    def drain(self) -> None:
        """Take no more prompts and finish those that are held; asked again, hand them over as far as they are."""
        if self.draining.is_set():
            self._hurried.set()
        super().drain()

    async def run(self) -> None:
        """Work until drained, or until the learner says that the run is finished: what is held then is not needed."""
        async with asyncio.TaskGroup() as group:
            joined = group.create_task(self._say_joined(), name=f"{self.name}.say-joined")
            work = group.create_task(self._work(), name=f"{self.name}.work")
            finished = group.create_task(self._until_finished(), name=f"{self.name}.until-finished")
            salvage = group.create_task(self._salvage.run(), name=f"{self.name}.salvage")
            quarantined = group.create_task(self._until_quarantined(), name=f"{self.name}.until-quarantined")
            hurried = group.create_task(self._until_hurried(), name=f"{self.name}.until-hurried")
            await asyncio.wait((work, finished, quarantined, hurried), return_when=asyncio.FIRST_COMPLETED)
            work.cancel()  # what it holds goes back to the bus
            if quarantined.done() and not finished.done():
                self.phase, self.problem = "quarantined", quarantined.result()
                drained = group.create_task(self.draining.wait())
                with self.waiting(f"the end of the run: quarantined by the learner, {quarantined.result()}"):
                    await asyncio.wait((finished, drained), return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
            joined.cancel()
            hurried.cancel()
            quarantined.cancel()
            finished.cancel()
            salvage.cancel()

    async def _say_joined(self) -> None:
        """The engine is up; the learner says "first_trained" when it has trained something of ours."""
        event = Event(kind="joined", actor=self.name, time=time.time(), data={"host": socket.gethostname()})
        try:
            await self.bus.publish(EVENTS, event, key=f"{self.name}-joined-{uuid.uuid4().hex}")
        except BusError as error:
            self.log.warning("could not say that it has joined: %s", error)

    async def _work(self) -> None:
        async with self.bus.consume(PROMPTS) as deliveries, asyncio.TaskGroup() as group:
            prefetch = Prefetch(
                deliveries,
                worker=self.name,
                room=self._room,
                ahead=self._ahead or self._pace.groups_ahead,
                keep_seconds=self._keep_seconds,
                owner=group,
            )
            group.create_task(prefetch.fetch(self.waiting), name=f"{self.name}.fetch")
            group.create_task(self._end(prefetch), name=f"{self.name}.end")
            while (loan := await prefetch.next()) is not None:
                await self._begin(loan, prefetch, owner=group)

    async def _end(self, prefetch: Prefetch) -> None:
        await self.draining.wait()
        prefetch.end()

    async def _begin(self, loan: Loan, prefetch: Prefetch, *, owner: asyncio.TaskGroup) -> None:
        delivery = loan.delivery
        places = self._room.take(delivery.message.group_size if delivery.message is not None else 0)
        attempt = await self._attempts.number(delivery)
        alone = 1 < attempt == self._max_attempts
        processing = owner.create_task(
            self._process(loan, places, attempt=attempt, alone=alone), name=f"{self.name}.group-{delivery.key}"
        )
        if alone:
            async with prefetch.held():
                await asyncio.wait((processing,))

    async def _until_quarantined(self) -> str:
        """Until the learner says that it trains nothing of this worker; why. A verdict on another life is not on it."""
        async with self.bus.watch(QUARANTINE, key=self.name) as verdicts:
            verdict = await anext(verdicts)
            while verdict.life != self.life:
                verdict = await anext(verdicts)
        self.log.error("the learner has quarantined this worker: %s; mend it and start it again", verdict.reason)
        return verdict.reason

    async def _until_hurried(self) -> None:
        """Until what is held is to be handed over; it is on the bus then."""
        await self._hurried.wait()
        await self._salvage.save()

    async def _until_finished(self) -> None:
        run_epoch = 0
        async with self.bus.watch(PROGRESS) as states:
            async for progress in states:
                if progress.run_epoch < run_epoch:
                    problem = f"of run epoch {progress.run_epoch}, and {run_epoch} was there already"
                    self.bus.refusals.note(PROGRESS.name, problem, kind="epoch")
                    continue
                run_epoch = progress.run_epoch
                if self._stragglers is not None:
                    self._stragglers.learner_is_at(progress.policy_version)
                if progress.finished:
                    self.log.info("the run is finished")
                    return

    async def _process(self, loan: Loan, places: Places, *, attempt: int, alone: bool) -> None:
        """One prompt group from delivery to ack. ``alone``: it waits until nothing else runs here."""
        delivery = loan.delivery
        try:
            if alone:
                await self._room.only(places)
            result = await self._make(delivery, places, attempt=attempt)
            if result is not None:
                await self._publish(result)
            await self._pace.ack(delivery)
            await self._salvage.forget(delivery.key)
            await self._attempts.forget(delivery)
        except EngineDied:
            raise
        except EngineError as error:
            self.log.warning("group %s: attempt %d failed: %s", delivery.key, attempt, error)
            await delivery.retry(delay=RETRY_SECONDS)
        finally:
            loan.keeping.cancel()
            self._salvage.close(delivery.key)
            places.leave(places.taken)

    async def _make(self, delivery: Delivery[PromptGroup], places: Places, *, attempt: int) -> TrajectoryGroup | None:
        """None: it is no group that anybody waits for."""
        prompt, group_id = delivery.message, group_id_of(delivery.key)
        if prompt is None or prompt.group_id != group_id:
            problem = f"the prompt does not decode: {delivery.problem}"
            if prompt is not None:
                problem = f"the prompt under key {delivery.key!r} is group {prompt.group_id}"
            self.bus.refusals.note(PROMPTS.name, problem, kind="malformed" if prompt is None else "key")
            return None if group_id is None else _buried(group_id, self.name, problem)
        gave_up = f"gave up after {self._max_attempts} attempts"
        if attempt > self._max_attempts:
            return _buried(prompt.group_id, self.name, f"{gave_up}: whoever tried it last did not come back", prompt)
        await self._attempts.begin(delivery)
        started = time.monotonic()
        parts = await self._salvage.open(prompt, attempt=delivery.attempt, begun=attempt)
        try:
            trajectories = await self._rewarded(prompt, await self._generate(prompt, places, parts))
        except (PromptError, RewardError, RolloutError) as error:
            self.log.warning("group %d is buried: %s", prompt.group_id, error, extra={REASON: str(error)})
            self._explain(error)
            return _buried(prompt.group_id, self.name, str(error), prompt)
        except EngineError as error:
            if isinstance(error, EngineDied) or attempt < self._max_attempts:
                raise
            return _buried(prompt.group_id, self.name, f"{gave_up}, the last: {error}", prompt)
        return TrajectoryGroup(
            group_id=prompt.group_id,
            prompt_tokens=prompt.prompt_tokens,
            trajectories=tuple(trajectories),
            epoch=prompt.epoch,
            worker=self.name,
            seconds=time.monotonic() - started,
            cancelled=prompt.group_size - len(trajectories),
        )

    async def _generate(self, prompt: PromptGroup, places: Places, parts: Parts) -> list[Trajectory]:
        """The samples of a group side by side, without stragglers; the first failure cancels the others."""
        starts: dict[int, int] = {}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(prompt, i, places, parts, starts)) for i in range(prompt.group_size)
                ]
                if self._stragglers is not None:
                    asked_at = prompt.min_policy_version or prompt.policy_version  # 0: published again, or at the start
                    group.create_task(self._stragglers.cut(tasks, starts, asked_at=asked_at))
        except ExceptionGroup as error:
            died, other = error.split(EngineDied)
            first = (died or other or error).exceptions[0]
            raise first from first.__cause__  # and not from the group: the log is to show where it was raised
        return [task.result() for task in tasks if not task.cancelled()]

    async def _one(
        self, prompt: PromptGroup, index: int, places: Places, parts: Parts, starts: dict[int, int]
    ) -> Trajectory:
        calls = 0

        async def generate(tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
            nonlocal calls
            call, calls = calls, calls + 1
            seed = sample_seed(self._seed, prompt.group_id, index, call)
            sampling = prompt.sampling
            if max_new_tokens is not None:
                sampling = messages.replace(sampling, max_new_tokens=max_new_tokens)
            partial = parts.begin(index, call, tokens, sampling)
            known = partial.prefix
            if known.version_spans:
                starts.setdefault(index, min(span.policy_version for span in known.version_spans))
            if known.finish_reason:
                return known
            seen = {"partial": partial} if self._salvage.is_on else {}
            with self.waits.paused(rollout):
                async with self._follower.generation(
                    prompt.min_policy_version, run_epoch=prompt.run_epoch, waits=self.waits
                ):
                    starts.setdefault(index, self._engine.version[1])
                    with self._activity.running(), self._answers.expected():
                        generation = await self._engine.generate(tokens, sampling, seed=seed, **seen)
            parts.finish(index, call, generation)
            self._activity.tokens += max(0, len(generation.tokens) - len(known.tokens))
            return generation

        try:
            with self.waiting("its rollout function", on="rollout") as rollout:
                made = await self._rollout(prompt, generate, index=index)
            if not isinstance(made, Trajectory):
                raise TypeError(f"it gave a {type(made).__name__}, not a Trajectory")
            return made
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:  # a user's function: whatever it raises is data, not a crash
            raise RolloutError(f"the rollout function raised {type(error).__name__}: {error}") from error
        finally:
            places.leave(1)

    async def _rewarded(self, prompt: PromptGroup, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        samples = [
            Sample(
                prompt=prompt.prompt,
                completion=self._tokenizer.decode(trajectory.tokens, skip_special_tokens=True),
                label=prompt.label,
                metadata=prompt.metadata,
                trajectory=trajectory,
                prompt_tokens=prompt.prompt_tokens,
            )
            for trajectory in trajectories
        ]
        with self.waiting("its reward function", on="reward"):
            rewards = await self._reward(samples)
        return [
            messages.replace(trajectory, reward=float(reward.value), reward_parts=dict(reward.parts))
            for trajectory, reward in zip(trajectories, rewards, strict=True)
        ]

    def _explain(self, error: Exception) -> None:
        """The traceback of a user's function into the log, once a reason."""
        reason, cause = str(error), error.__cause__
        if cause is not None and reason not in self._explained and len(self._explained) < MOST_EXPLAINED:
            self._explained.add(reason)
            self.log.info("where it was raised:", exc_info=cause)

    async def _publish(self, result: TrajectoryGroup) -> None:
        """A full log means that the learner is behind: wait for room, once however often it is tried."""
        if (left := await self._unpublished(result)) is None:
            return
        with self.waiting(SPACE_IN_LOG, on=LEARNER):
            while left is not None:
                await asyncio.sleep(FULL_LOG_SECONDS)
                left = await self._unpublished(left)

    async def _unpublished(self, result: TrajectoryGroup) -> TrajectoryGroup | None:
        """What is left to publish when the log is full. Too large a group can only be buried."""
        try:
            await self.bus.publish(TRAJECTORIES, result, key=str(result.group_id))
        except BusFull:
            return result
        except MessageTooLarge as error:
            self.log.error("group %d is buried: %s", result.group_id, error)
            return await self._unpublished(_buried(result.group_id, self.name, str(error)))
        return None

    @property
    def version(self) -> tuple[int, int]:
        return self._engine.version

    def heartbeat(self) -> Heartbeat:
        """Its follower's too: a process beats once."""
        beat = super().heartbeat()
        said: Heartbeat = messages.replace(beat, problem=beat.problem or self._follower.problem)
        return said

    def present_waits(self) -> tuple[Wait, ...]:
        """Also what its follower waits for, and its engine's next token: without either nothing is generated."""
        loading = tuple(wait for wait in self._follower.present_waits() if wait.on)
        return (
            *self._answers.waits(self._engine.stats(), is_loading=bool(loading)),
            *super().present_waits(),
            *loading,
        )

    def numbers(self) -> dict[str, float]:
        stats = self._engine.stats()
        tokens_per_second, idle_ratio = self._activity.since_last()
        return {
            "rollout/tokens_per_second": tokens_per_second,
            "rollout/idle_ratio": idle_ratio,
            "rollout/running": stats.running,
            "rollout/queued": stats.queued,
            "rollout/salvaged_tokens": self._salvage.salvaged_tokens,
            "rollout/discarded_tokens": self._salvage.discarded_tokens,
            "rollout/unsaved_tokens": self._salvage.unsaved_tokens,
            "weights/pause_seconds": self._follower.last_load.pause_seconds,
            "weights/load_seconds": self._follower.last_load.load_seconds,
            "weights/loads": self._follower.loads,
            "bus/refused": self.bus.refusals.total,
        }


def sample_seed(run_seed: int, group_id: int, index: int, call: int) -> int:
    """One 63-bit seed per generation, the same on every worker and attempt."""
    return int(np.random.SeedSequence([run_seed, group_id, index, call]).generate_state(1, np.uint64)[0] >> 1)


def _buried(group_id: int, worker: str, error: str, prompt: PromptGroup | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(
        group_id=group_id,
        prompt_tokens=prompt.prompt_tokens if prompt is not None else np.zeros(0, np.int32),
        trajectories=(),
        epoch=prompt.epoch if prompt is not None else 0,
        worker=worker,
        error=error[:2000],
    )
