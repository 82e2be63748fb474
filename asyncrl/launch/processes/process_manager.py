"""Starts, watches, restarts and ends the processes of one run, over any launcher.

A learner that dies is restarted with --resume, a rollout worker with its original command (RestartPolicy says when); a
process without restarts left ends the run. Exit code 2 (a wrong configuration, or a failure that a restart would
repeat) is never retried. The learner and its other ranks end together; the learner's restarts count for all of them.
Likewise a worker and the other machines of its engine.
The health monitor (actors/health_monitor.py) finds stuck processes; a stuck process of this run that does not recover
is killed, and then restarted like any other. So is the run's own nats-server.

    w1 dies        -> RestartPolicy: now, or in some seconds -> w1 runs again
    w1 has died too often, or ended with code 2              -> the run fails: all others end, exit code 1 or 2
    learner done   -> workers read on the bus that the run is finished, and end; exit code 0
    Ctrl-C         -> all drain; again: all are killed; exit code 130
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.actors.health_monitor import FaultTracker, HealthMonitor, refusal
from asyncrl.actors.presence import OwnProcess
from asyncrl.bus.adapter import BusServer
from asyncrl.config import RunSection
from asyncrl.errors import INTERRUPTED, AsyncRLError, ConfigError
from asyncrl.launch.port import Launcher
from asyncrl.launch.processes.child_process import DRAIN_SECONDS, ChildProcess, Exit, RestartPolicy
from asyncrl.launch.processes.fleet import Fleet, FleetScaler, NewWorker
from asyncrl.launch.processes.swap import LearnerSwapper
from asyncrl.logs import as_typed, in_a_line, in_words, printable
from asyncrl.messages.roles import ENGINE_NODE, LEARNER, LEARNER_RANK, MODEL_SERVER, WORKER
from asyncrl.policies.health.conditions import ALARMS
from asyncrl.policies.health.faults import Finding

DRAINED = (0, INTERRUPTED, -signal.SIGTERM)
"""Exit codes of a learner that was told to drain; the signal itself if it was still starting."""
FINISH_SECONDS = 10.0
"""Time for workers to notice that the run is finished."""
DRAIN_REPORT_SECONDS = 10.0
"""Seconds between reports on which processes of an interrupted run still drain."""

BUS_FAULTS = ("bus", "bus storage")
BUS_SECONDS = 90.0
"""A process that dies within this time after the bus was away, or could not store, is assumed to have died of that."""
RANK_PAUSE_SECONDS = 1.0
SERVER_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    exit_code  exit code of `asyncrl run`: 0 if the learner is done
    reason     "done", "interrupted", or the failure in one line
    """

    exit_code: int
    reason: str


class ProcessManager:
    """Keeps the processes of one run up until it is over."""

    def __init__(
        self,
        settings: RunSection,
        *,
        launcher: Launcher,
        children: Sequence[ChildProcess],
        new_worker: NewWorker,
        server: BusServer | None,
    ) -> None:
        """
        settings    section [run] of the run file
        children    the learner, then rollout workers and evaluation workers
        new_worker  creates another worker when the run is scaled up
        server      server of the run's own bus, restarted when it ends; None if the run uses another one
        """
        self._settings = settings
        self._launcher = launcher
        self._server = server
        self._faults = FaultTracker()
        self._is_bus_gone = False  # its server does not stay up: processes that wait for it cannot drain
        self._tasks: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._over = asyncio.Event()  # the learner is done, the run was interrupted, or a process cannot be restarted
        self.fleet = Fleet(children, new_worker=new_worker, start=self._keep_running, over=self._over, say=self.say)
        self._is_done = False  # the learner ended well, so there is nothing to continue
        self._interrupts = 0
        self._failure = 0
        self._reason = ""
        self._bus_was_away = -math.inf  # monotonic time

    def own_processes(self) -> list[OwnProcess]:
        """Return the processes of this run for the health monitor."""
        return [one for child in self.fleet.children for one in child.own_processes()]

    async def run(self, monitor: HealthMonitor, *changes: FleetScaler | LearnerSwapper) -> Outcome:
        """Keep the run up until it is over.

        changes    what changes the fleet on request

        waits for: the learner's end, a failure, or ``interrupt``
        """
        self._monitor = monitor
        try:
            await self._run(monitor, changes)
        finally:
            await self._launcher.close()
        if self._failure:
            return Outcome(exit_code=self._failure, reason=self._reason)
        if self._interrupts and not self._is_done:
            return Outcome(exit_code=INTERRUPTED, reason="interrupted")
        return Outcome(exit_code=0, reason="done")

    async def _run(self, monitor: HealthMonitor, changes: Iterable[FleetScaler | LearnerSwapper]) -> None:
        async with self._group as group:
            for child in self.fleet.children:
                self._keep_running(child)
            helpers = [group.create_task(one) for one in (monitor.run(self._on_findings), *(c.run() for c in changes))]
            server = [group.create_task(self._keep_server_up(self._server))] if self._server is not None else []
            await self._over.wait()
            for task in helpers:
                task.cancel()
            await self._end_processes()
            for task in (*server, *self._tasks):  # a launcher may wait forever for free GPUs
                task.cancel()

    # -- one process ---------------------------------------------------------------------------------------------------

    def _keep_running(self, child: ChildProcess) -> None:
        child.is_kept_running = True
        self._tasks.add(self._group.create_task(self._run_and_restart(child), name=child.name))

    async def _run_and_restart(self, child: ChildProcess) -> None:
        """Start the process and restart it until it ends well, has no restarts left, or must not be restarted."""
        try:
            while not child.no_restart.is_set():
                if (delay := self._restart_delay(child, await child.run_once(self._launcher))) is None:
                    return
                await child.back_off(delay)
        finally:
            await self._launcher.release(child.name)
            self.fleet.remove(child)

    def _restart_delay(self, child: ChildProcess, ended: Exit) -> float | None:
        """Return the seconds until the process is restarted; None if it is not.

        Ends the run if the exit requires it.
        """
        was_over = self._over.is_set()
        if child.is_standby:  # the present learner goes on
            child.is_kept_running = False
            return None
        if child.spec.role == LEARNER and not (child.is_leaving and ended.code):
            self._on_learner_exit(child, ended)
        if child.is_leaving:
            has_left = ended.code in (0, INTERRUPTED)
            self.say(f"{child.name} has left" if has_left else f"{ended.reason} while it left; others have its work")
            return None
        is_part = child.spec.role in (LEARNER_RANK, ENGINE_NODE)
        if was_over or self._over.is_set() or (ended.code == 0 and not is_part):
            return None
        if child.spec.role == ENGINE_NODE and not self.fleet.is_kept_running(child.spec.meets):
            return None
        # NoRoom has code 2 too. A process that ran before may find room again: its machine comes back, or another.
        is_hopeless = ended.code == ConfigError.exit_code and not (ended.has_no_room and child.starts)
        if is_hopeless and child.is_added:  # the run goes on at its present size
            child.is_kept_running = False
            self.fleet.refuse_size(ended.reason)
            return None
        if is_part and not is_hopeless:
            self.say(f"{ended.reason}; it joins the next {child.spec.meets}")
            return RANK_PAUSE_SECONDS
        is_free = ended.has_no_room or time.monotonic() - self._bus_was_away < BUS_SECONDS
        has_worked = self._monitor.has_worked(ended.node, ended.pid)
        delay = None
        if not is_hopeless:
            delay = child.restarts.next_delay(ended.uptime_seconds, is_free=is_free, has_worked=has_worked)
        if delay is None:
            self._fail(ended.code, f"{ended.reason}; ending the run")
        else:
            cost = f"next try in {delay:.0f} s, at no cost" if is_free else str(child.restarts)
            self.say(f"{ended.reason} after {ended.uptime_seconds:.0f} s; {cost}")
        return delay

    def _on_learner_exit(self, learner: ChildProcess, ended: Exit) -> None:
        """End the run if the learner is done, or was told to end. Otherwise end its other ranks, for its restart."""
        if self._over.is_set():
            self._start_no_more_ranks()
        is_drained = ended.code in DRAINED
        if self._interrupts == 1 and not is_drained:
            self._fail(ended.code, f"{ended.reason} while draining")
        elif ended.code == INTERRUPTED and not self._interrupts and not self._over.is_set():
            self._fail(ended.code, "learner was drained from outside before the run was done; continue with --resume")
        elif ended.code == 0:
            self._is_done = True
            self._over.set()
        else:
            for rank in self.fleet.ranks_of(learner):  # they would end by themselves unless they hang
                rank.signal(signal.SIGKILL)

    def _start_no_more_ranks(self) -> None:
        for child in self.fleet.children:
            if child.spec.role == LEARNER_RANK:
                child.no_restart.set()

    async def _keep_server_up(self, server: BusServer) -> None:
        """Restart the server on its port and store whenever it ends. All actors wait for it, and nothing is lost.

        waits for: the end of the server's process    woken by: the clock
        """
        restarts, was_full, problem = RestartPolicy(self._settings.restarts), False, ""
        while True:
            began = time.monotonic()
            while pid := server.pid:
                await asyncio.sleep(SERVER_POLL_SECONDS)
                # A server whose disk was full stores nothing more, even once there is room, until it is restarted.
                # These calls run in a thread, because a failed disk may not respond.
                was_full = was_full or bool(await asyncio.to_thread(server.failure))
                if was_full and await asyncio.to_thread(server.has_room) and server.pid == pid:
                    os.kill(pid, signal.SIGKILL)
            reason = problem or f"{server.name} {'had no room to store' if was_full else 'ended'}"
            delay = restarts.next_delay(time.monotonic() - began, is_free=was_full)
            if delay is None:
                self._is_bus_gone = True
                self._fail(1, f"{server.name} does not stay up ({reason}); ending the run")
                return
            self.say(f"{reason}; it is restarted")
            await asyncio.sleep(delay)
            try:
                server.start()  # in this thread: the server ends with the thread that starts it
                was_full, problem = False, ""
            except AsyncRLError as error:
                problem = str(error)

    # -- what is stuck -------------------------------------------------------------------------------------------------

    def _on_findings(self, findings: Iterable[Finding]) -> None:
        """Report faults that begin or end, and restart processes of this run that do not recover."""
        self.fleet.quarantined = {finding.actor for finding in findings if finding.fault == "quarantine"}
        is_refused = refusal(self._monitor.error) is not None  # a wrong token will not become right
        if not is_refused and any(finding.fault in BUS_FAULTS for finding in findings):
            self._bus_was_away = time.monotonic()
        # The learner warns of its alarms itself, with the numbers of the step.
        new, ended = self._faults.update(finding for finding in findings if finding.fault not in ALARMS.values())
        for finding in new if not self._over.is_set() else ():  # while a run ends, its processes are missing anyway
            self.say(printable(finding.line))
        for finding, seconds in ended:
            self.say(f"over: {finding.fault} ({printable(finding.actor)}), after {in_words(seconds)}")
        for finding in findings:
            is_over = self._over.is_set() or not finding.cure  # alarms have none
            if not is_over and self._faults.seconds(finding) > finding.cure_seconds(self._settings.stall_seconds):
                self._faults.restart(finding)
                self._cure(finding)

    def _cure(self, finding: Finding) -> None:
        child = next(
            (one for one in self.fleet.children if finding.actor in {its.name for its in one.own_processes()}), None
        )
        if finding.fault == "bus" and self._server is not None and self._server.pid:
            os.kill(self._server.pid, signal.SIGKILL)
        elif finding.cure == "restart" and child is not None:
            child.fault = finding.cause
            child.signal(signal.SIGKILL)
        elif finding.cure == "end" and any(one.spec.role == WORKER for one in self.fleet.children):
            # without own workers others may still join; and a learner that takes over may wait long for its shadow
            if any(one.is_standby for one in self.fleet.children):
                return
            self._fail(1, f"{printable(finding.text)}; ending the run")

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _end_processes(self) -> None:
        """Drain the processes, and kill those that do not end in time."""
        starts_ranks = bool(self._interrupts) and any(
            one.spec.role == LEARNER and one.process is not None for one in self.fleet.children
        )  # a learner that waits for a rank cannot drain before it has come
        for child in self.fleet.children:
            if child.spec.role != LEARNER_RANK or not starts_ranks:
                child.no_restart.set()
        if not self._failure and not self._interrupts:  # workers read on the bus that the run is finished
            await self._wait_for_work(FINISH_SECONDS)
        self._signal_all(signal.SIGTERM)
        # An interrupted run waits for its answers; a failed one may have steps that are not in a checkpoint yet.
        if self._interrupts:
            await self._wait_aloud(DRAIN_SECONDS)
        elif not self._is_bus_gone:
            await self._wait_for_work(FINISH_SECONDS)
            if self._failure and (learner := self._find_trained_learner()):
                self.say("the learner ends its step and writes a checkpoint")
                await asyncio.wait(learner, timeout=DRAIN_SECONDS - FINISH_SECONDS)
        self._signal_all(signal.SIGKILL)
        await asyncio.wait(self._tasks, timeout=FINISH_SECONDS)

    def _work(self) -> set[asyncio.Task[None]]:
        """The tasks of all processes but the servers of frozen models and parts of engines."""
        others = {child.name for child in self.fleet.children if child.spec.role in (MODEL_SERVER, ENGINE_NODE)}
        return {task for task in self._tasks if task.get_name() not in others and not task.done()}

    async def _wait_for_work(self, seconds: float) -> None:
        if work := self._work():
            await asyncio.wait(work, timeout=seconds)

    async def _wait_aloud(self, seconds: float) -> None:
        """Wait until all processes have ended, and report every ten seconds which are left and when they are killed."""
        deadline = time.monotonic() + seconds
        while (work := self._work()) and (left := deadline - time.monotonic()) > 0:
            _, waiting = await asyncio.wait(work, timeout=min(left, DRAIN_REPORT_SECONDS))
            if not waiting:
                return
            if (left := deadline - time.monotonic()) > 0:
                names = ", ".join(sorted(task.get_name() for task in waiting))
                self.say(f"still draining: {names}; killed in {left:.0f} s, or at once by another Ctrl-C")

    def _find_trained_learner(self) -> list[asyncio.Task[None]]:
        """Return the learner's task if its process is up and has finished starting."""
        has_trained = any(
            one.spec.role == LEARNER and one.process and self._monitor.has_worked(one.process.node, one.process.pid)
            for one in self.fleet.children
        )
        names = {one.name for one in self.fleet.children if one.spec.role == LEARNER}
        return [task for task in self._tasks if has_trained and task.get_name() in names and not task.done()]

    def _fail(self, code: int, reason: str) -> None:
        self.say(reason)
        self._reason = reason
        self._failure = code if code in (ConfigError.exit_code, INTERRUPTED) else 1
        self._over.set()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the output may be full; nothing depends on it
            print(f"asyncrl run: {as_typed(in_a_line(text))}", file=sys.stderr, flush=True)

    def interrupt(self) -> None:
        """Handle Ctrl-C: the first drains the run, the second kills everything. Neither affects a run that is done."""
        self._interrupts += 1
        if self._interrupts == 1:
            doing = "the run is done, its processes end" if self._is_done else "draining"
            self.say(f"{doing}; once more to stop at once")
            self._over.set()
        else:
            self._start_no_more_ranks()
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        """Signal all processes; servers of frozen models and parts of engines only to kill them, for others need them
        as they drain."""
        for child in self.fleet.children:
            if number == signal.SIGKILL or child.spec.role not in (MODEL_SERVER, ENGINE_NODE):
                child.signal(number)
