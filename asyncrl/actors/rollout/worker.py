"""The rollout worker: one engine, the stages that use it, and the rules for when it leaves.

Invariants (tests/actors/test_loop.py):
  W1 It publishes, then acks: a worker that dies in between repeats the group, and the learner's ledger makes the repeat
     harmless. A group is never lost.
  W2 Every prompt group becomes exactly one trained, dropped, filtered or failed group. A group that cannot be made is
     published as failed, so that its place in the window becomes free.
  W3 A draining worker takes no new prompts and finishes those it holds. After a second drain it hands them over
     (tests/actors/rollout/test_drain.py).
  W4 A group on its last attempt has the worker to itself, so a group that kills workers takes no other group with it.
The stages ensure W1, W2 and W4 (stage.py). Unfinished groups are saved to the bus (partial_rollouts.py).
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Sequence

from asyncrl import messages
from asyncrl.actors.base import Actor, until_finished
from asyncrl.actors.gpu_turn import GpuTurn, held
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.stage import Stage
from asyncrl.bus.port import Bus
from asyncrl.engines.port import EngineStats, HasServerMetrics
from asyncrl.errors import BusError
from asyncrl.messages import Event, Heartbeat, Wait
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.messages.topics import EVENTS, QUARANTINE


class RolloutWorker(Actor):
    """consumes: progress, quarantine    publishes: events    woken by: the learner. Its stages do the work."""

    role = "rollout-worker"

    def __init__(
        self,
        name: str,
        bus: Bus,
        *,
        engine: SharedEngine,
        stages: Sequence[Stage],
        partial_rollouts: PartialRollouts,
        start_turn: GpuTurn | None = None,
    ) -> None:
        """
        partial_rollouts  of the stages that save their groups
        start_turn        lock on a GPU that the learner shares, held while the engine starts
        """
        super().__init__(name, bus)
        self.waits = engine.waits  # one list for the process
        self._engine = engine
        self._stages = tuple(stages)
        self._partial_rollouts = partial_rollouts
        self._start_turn = start_turn
        self._handing_over = asyncio.Event()
        self.is_finished = False
        """Whether it ended with the run, rather than before it."""

    async def start(self) -> None:
        async with held(self._start_turn):
            with self.waits.waiting("its engine to start", on="start"):
                await self._engine.engine.start()

    async def stop(self) -> None:
        await self._engine.engine.close()
        for stage in self._stages:
            await stage.close()

    def drain(self) -> None:
        """Take no more prompts and finish those held. On a second call, hand over held groups as they are."""
        if self.draining.is_set():
            self._handing_over.set()
        super().drain()

    async def run(self) -> None:
        """Work until drained, or until the run is finished: groups held then are not needed. In quarantine, sit out."""
        async with asyncio.TaskGroup() as group:
            joined = group.create_task(self._report_joined(), name=f"{self.name}.report-joined")
            work = group.create_task(self._work(), name=f"{self.name}.work")
            finished = group.create_task(until_finished(self.bus), name=f"{self.name}.until-finished")
            saving = group.create_task(self._partial_rollouts.run(), name=f"{self.name}.save-partial-rollouts")
            quarantined = group.create_task(self._until_quarantined(), name=f"{self.name}.until-quarantined")
            handed_over = group.create_task(self._until_handed_over(), name=f"{self.name}.until-handed-over")
            await asyncio.wait((work, finished, quarantined, handed_over), return_when=asyncio.FIRST_COMPLETED)
            work.cancel()  # held groups go back to the bus
            if quarantined.done() and not finished.done():
                await self._wait_in_quarantine(quarantined.result(), finished, owner=group)
            if finished.done():
                self.is_finished = True
                self.log.info("the run is finished")
            for task in (joined, handed_over, quarantined, finished, saving):
                task.cancel()

    async def _work(self) -> None:
        """Run all stages until each has ended."""
        async with asyncio.TaskGroup() as group:
            draining = group.create_task(self._drain_stages(), name=f"{self.name}.drain-stages")
            running = [group.create_task(stage.run(), name=f"{self.name}.{stage.name}") for stage in self._stages]
            await asyncio.wait(running)
            draining.cancel()

    async def _drain_stages(self) -> None:
        """consumes: nothing    waits for: ``drain``    woken by: ``drain``"""
        await self.draining.wait()
        self._engine.gate.drain()
        for stage in self._stages:
            stage.drain()

    async def _wait_in_quarantine(self, reason: str, finished: asyncio.Task[None], *, owner: asyncio.TaskGroup) -> None:
        """Stay up without work after a quarantine, so that no launcher restarts the worker before the run ends."""
        self.phase = "quarantined"
        self.problem = reason
        drained = owner.create_task(self.draining.wait())
        with self.waits.waiting(f"the end of the run: quarantined by the learner, {reason}"):
            await asyncio.wait((finished, drained), return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()

    async def _report_joined(self) -> None:
        """Report that the engine is up. The learner reports "first_trained" when it has trained a group of it."""
        event = Event(kind="joined", actor=self.name, time=time.time(), data={"host": socket.gethostname()})
        try:
            await self.bus.publish(EVENTS, event, key=f"{self.name}/joined-{uuid.uuid4().hex}")
        except BusError as error:
            self.log.warning("could not report that it has joined: %s", error)

    async def _until_quarantined(self) -> str:
        """Return the reason once the learner reports that it trains nothing more of this worker.

        consumes: quarantine    waits for: a verdict on this life of the worker    woken by: the learner
        """
        async with self.bus.watch(QUARANTINE, key=self.name) as verdicts:
            verdict = await anext(verdicts)
            while verdict.life != self.life:
                verdict = await anext(verdicts)
        self.log.error("the learner has quarantined this worker: %s; fix it and start it again", verdict.reason)
        return verdict.reason

    async def _until_handed_over(self) -> None:
        """Return once ``drain`` was called twice and all held groups are saved to the bus."""
        await self._handing_over.wait()
        await self._partial_rollouts.save()

    # -- what its heartbeat says -------------------------------------------------------------------------------------

    @property
    def version(self) -> tuple[int, int]:
        return self._engine.version

    def engine_stats(self) -> EngineStats:
        return self._engine.engine.stats()

    async def server_metrics(self) -> str:
        engine = self._engine.engine
        return await engine.server_metrics() if isinstance(engine, HasServerMetrics) else ""

    def heartbeat(self) -> Heartbeat:
        """Include the follower's problem: a process has one heartbeat."""
        beat = super().heartbeat()
        problem = beat.problem or self._engine.follower.problem[:LONGEST_ERROR]
        heartbeat: Heartbeat = messages.replace(beat, problem=problem, begun=self._partial_rollouts.begun_versions())
        return heartbeat

    def present_waits(self) -> tuple[Wait, ...]:
        """Include the waits of its follower and for its engine's next token: without either nothing is generated."""
        loading = tuple(wait for wait in self._engine.follower.present_waits() if wait.on)
        return (
            *self._engine.present_waits(is_loading=bool(loading)),
            *super().present_waits(),
            *loading,
        )

    def numbers(self) -> dict[str, float]:
        follower = self._engine.follower
        return {
            **self._engine.numbers(),
            **self._partial_rollouts.numbers(),
            "weights/pause_seconds": follower.loader.last.pause_seconds,
            "weights/load_seconds": follower.loader.last.load_seconds,
            "weights/loads": follower.loader.loads,
            "weights/loaded_at": follower.loader.loaded_at,
            "weights/failed_reads": follower.failed_attempts,
            "bus/rejected": self.bus.rejections.total,
        }
