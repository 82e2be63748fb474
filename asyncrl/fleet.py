"""The processes of one run, over any launcher: started, watched, restarted and ended.

A learner that dies is started again with --resume, a rollout worker as it was; each has a budget, and a process that
cannot come back ends the run with its exit code. Exit codes 2 (configuration, unless that has worked before) and 3 (a
full disk, nothing but buried groups) are never tried again. What dies of a bus that is away costs no restart. A watcher
(actors/watcher.py) says what stands still; what is ours and does not heal is killed, which makes it a process that
died.

How many rollout workers there are may change while the run is up (``resize``, asked for by `asyncrl scale` over
actors/sizer.py): new ones get GPUs that are free, or are refused; quarantined ones leave first, then the newest, and
drain.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from asyncrl.actors.sizer import Sizer
from asyncrl.actors.supervisor import STUCK_EXIT_CODE
from asyncrl.actors.watcher import Lasting, Launched, Watcher, refusal
from asyncrl.bus.server import EmbeddedServer
from asyncrl.children import LONGEST_BACK_OFF_SECONDS, Budget, Child, End
from asyncrl.config import Run
from asyncrl.errors import INTERRUPTED, AsyncRLError, ConfigError, HopelessError, NameTaken, NoRoom
from asyncrl.fleet_messages import FleetSize, FleetStatus
from asyncrl.launchers.port import Launcher
from asyncrl.policies.faults import LEARNER, WORKER, Finding, printable

NEVER_AGAIN = (ConfigError.exit_code, HopelessError.exit_code)
"""Exit codes of a process that would end the same way again."""
DRAINED = (0, INTERRUPTED, -signal.SIGTERM)
"""How a learner ends that is asked to drain; by the signal itself when it had only begun to start."""
FINISH_SECONDS = 10.0
"""How long workers get to notice that the run is finished."""
DRAIN_SECONDS = 120.0
"""How long processes get to drain."""
HAND_OVER_SECONDS = 15.0
"""How long a worker that leaves gets behind that, to hand over what it has; then it is killed."""

BUS_FAULTS = ("bus", "bus storage")
BUS_SECONDS = 90.0
"""So long after the bus was away, or stored nothing, a process may die of that. It costs no restart."""
BUS_PAUSE_SECONDS = 10.0

Hire = Callable[[str, frozenset[int]], Child]
"""A rollout worker of this name, on none of these GPUs. Raises NoRoom."""


class Fleet:
    """Keeps the children of one run up until it is over."""

    def __init__(
        self,
        settings: Run,
        *,
        launcher: Launcher,
        children: Sequence[Child],
        hire: Hire,
        server: EmbeddedServer | None,
    ) -> None:
        """children: the learner first"""
        self.changed = asyncio.Event()
        self._hire = hire
        self._size, self._request, self._problem = len(children) - 1, "", ""
        self._settings = settings
        self._launcher = launcher
        self._server = server
        self._server_budget = Budget(settings.restarts)
        self._lasting = Lasting()
        self._has_worked: Callable[[str, int], bool] = lambda node, pid: False
        self._children = list(children)
        self._tasks: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self._over = asyncio.Event()  # the learner is done, we were interrupted, or somebody cannot come back
        self._interrupts = 0
        self._failure = 0
        self._bus_was_away = -math.inf  # monotonic time
        self._is_refused: Callable[[], bool] = lambda: False  # a wrong token stays wrong
        self._quarantined: set[str] = set()  # names, as the watcher saw them last
        self._taken: set[str] = set()  # names of workers that are not ours

    def launched(self) -> list[Launched]:
        """What a watcher should know of our processes."""
        return [launched for child in self._children for launched in child.launched()]

    async def run(self, watcher: Watcher, sizer: Sizer) -> int:
        """To the end of the run; its exit code."""
        self._has_worked = watcher.has_worked
        self._is_refused = lambda: refusal(watcher.error) is not None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        try:
            async with self._group as group:
                for child in self._children:
                    self._employ(child)
                watching = [group.create_task(watcher.run(self._on_findings)), group.create_task(sizer.run())]
                keeping = [group.create_task(self._keep_server(self._server))] if self._server is not None else []
                await self._over.wait()
                for task in watching:
                    task.cancel()
                for child in self._children:
                    child.dismissed.set()
                if not self._failure and not self._interrupts:  # workers read for themselves that the run is finished
                    await asyncio.wait(self._tasks, timeout=FINISH_SECONDS)
                self._signal_all(signal.SIGTERM)
                # An interrupted run has answers worth waiting for, a failed one steps that are in no checkpoint yet.
                await asyncio.wait(self._tasks, timeout=DRAIN_SECONDS if self._interrupts else FINISH_SECONDS)
                if self._failure and (learner := self._trained()):
                    self._say("the learner ends its step and writes a checkpoint")
                    await asyncio.wait(learner, timeout=DRAIN_SECONDS - FINISH_SECONDS)
                self._signal_all(signal.SIGKILL)
                _, stuck = await asyncio.wait(self._tasks, timeout=FINISH_SECONDS)
                for task in (*keeping, *stuck):  # a launcher may wait for ever for room
                    task.cancel()
        finally:
            await self._launcher.close()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._failure or (INTERRUPTED if self._interrupts else 0)

    def _trained(self) -> list[asyncio.Task[None]]:
        """The learner's task, if it is up and is past its start."""
        names = [
            one.name
            for one in self._children
            if one.spec.role == LEARNER and one.process and self._has_worked(one.process.node, one.process.pid)
        ]
        return [task for task in self._tasks if task.get_name() in names and not task.done()]

    def _employ(self, child: Child) -> None:
        child.is_kept = True
        self._tasks.add(self._group.create_task(self._keep(child), name=child.name))

    async def _keep(self, child: Child) -> None:
        """Start the child, and again when it dies, until it ends well, its budget is used up, or it is dismissed."""
        try:
            while not child.dismissed.is_set():
                name, end = child.name, await child.live(self._launcher)
                if (pause := self._pause(child, end)) is None:
                    return
                if child.name != name:
                    await self._launcher.release(name)
                await child.rest(pause)
        finally:
            await self._launcher.release(child.name)
            child.is_kept = False
            if child.spec.role == WORKER:
                self._children.remove(child)
            self.changed.set()

    def _pause(self, child: Child, end: End) -> float | None:
        """Seconds until the child is started again; None when it is not, and why that ends the run, if it does."""
        code, is_learner, was_over = end.code, child.spec.role == LEARNER, self._over.is_set()
        if is_learner and self._interrupts == 1 and code not in DRAINED:
            self._end(code, f"{end.reason} while draining")
        elif is_learner and code == INTERRUPTED and not self._interrupts and not was_over:
            self._end(code, "learner was drained by somebody else before the run was done; go on with --resume")
        elif is_learner and code == 0:
            self._over.set()
        if child.is_leaving:
            self._say(f"{child.name} has left" if code == 0 else f"{end.reason} while it left; others have its work")
            return None
        if code == 0 or was_over or self._over.is_set():
            return None
        if end.has_no_room and (child.lives or child.is_hired):
            return self._without_room(child, end)
        if code == NameTaken.exit_code and child.spec.role == WORKER:
            return self._rename(child, end)
        if time.monotonic() - self._bus_was_away < BUS_SECONDS and code != HopelessError.exit_code:
            self._say(f"{end.reason} while the bus was away; next try in {BUS_PAUSE_SECONDS:.0f} s")
            return BUS_PAUSE_SECONDS
        has_worked = self._has_worked(end.node, end.pid)
        child.is_configured |= has_worked
        if code == ConfigError.exit_code and child.is_hired and not child.is_configured:
            child.is_kept = False
            self._refuse(end.reason)
            return None
        is_hopeless = code in NEVER_AGAIN and not (code == ConfigError.exit_code and child.is_configured)
        pause = None if is_hopeless else child.budget.pause(end.lived_seconds, has_worked=has_worked)
        if pause is None:
            self._end(STUCK_EXIT_CODE if child.fault else code, f"{end.reason}; ending the run")
        else:
            self._say(f"{end.reason} after {end.lived_seconds:.0f} s; {child.budget}")
        return pause

    def _rename(self, child: Child, end: End) -> float | None:
        """Its next life has a name that nobody has, as far as is known."""
        if (pause := child.budget.pause(0.0, has_worked=False)) is None:
            self._end(end.code, f"{end.reason}; ending the run")
            return None
        self._taken.add(taken := child.name)
        child.spec = child.spec.renamed(self._free_name())
        self._say(f"{taken!r} is the name of a rollout worker that is not ours: ours is {child.name!r} now")
        self.changed.set()
        return pause

    def _without_room(self, child: Child, end: End) -> float | None:
        """Its GPUs went with their machine: it waits for others. One that never had any is not employed."""
        if not child.lives:
            child.is_kept = False
            self._refuse(end.reason)
            return None
        self._say(f"{end.reason}; next try in {LONGEST_BACK_OFF_SECONDS:.0f} s")
        return LONGEST_BACK_OFF_SECONDS

    async def _keep_server(self, server: EmbeddedServer) -> None:
        """Start the server again on its port and store when it ends: everybody waits for it, and nothing is lost."""
        while True:
            started = time.monotonic()
            await _until_ended(server.pid)
            why, has_worked, lived_seconds = "nats-server ended", True, time.monotonic() - started
            while (pause := self._server_budget.pause(lived_seconds, has_worked=has_worked)) is not None:
                self._say(f"{why}; {self._server_budget}")
                await asyncio.sleep(pause)
                try:
                    server.start()  # here and not in a thread: it ends with the thread that started it
                    break
                except AsyncRLError as error:
                    why, has_worked, lived_seconds = str(error), False, 0.0
            else:
                self._end(1, f"nats-server does not stay up ({why}); ending the run")
                return

    # -- how many ------------------------------------------------------------------------------------------------------

    def resize(self, size: FleetSize) -> None:
        """Start or drain as many rollout workers as it takes; ``status`` says what came of it."""
        wanted = size.rollout_workers
        if self._over.is_set() or (size.request == self._request and wanted == self._size):
            return
        self._size, self._request, self._problem = wanted, size.request, ""
        staff = self._staff()
        for child in staff[wanted:]:
            child.dismiss()
            later = asyncio.get_running_loop().call_later
            later(DRAIN_SECONDS, child.signal, signal.SIGTERM)
            later(DRAIN_SECONDS + HAND_OVER_SECONDS, child.signal, signal.SIGKILL)
        try:
            hired = [self._hired() for _ in range(wanted - len(staff))]
        except NoRoom as error:
            self._refuse(str(error))
        else:
            if moved := hired or staff[wanted:]:
                names = ", ".join(child.name for child in moved)
                self._say(f"{len(staff)} -> {wanted} rollout workers: {'+' if hired else '-'} {names}")
        self.changed.set()

    def status(self) -> FleetStatus:
        """Of the rollout workers that are ours."""
        return FleetStatus(
            request=self._request,
            rollout_workers=self._size,
            workers=tuple(child.name for child in self._staff()),
            draining=tuple(child.name for child in self._children if child.is_leaving),
            problem=self._problem,
        )

    def _hired(self) -> Child:
        child = self._hire(self._free_name(), frozenset(gpu for one in self._children for gpu in one.spec.gpus))
        child.is_hired = True
        self._children.append(child)
        self._employ(child)
        return child

    def _free_name(self) -> str:
        names = {child.name for child in self._children} | self._taken
        return next(name for number in itertools.count() if (name := f"w{number}") not in names)

    def _refuse(self, reason: str) -> None:
        """The fleet is as large as it can be."""
        self._size = len(self._staff())
        self._problem = f"{reason}; the fleet stays at {self._size} rollout worker{'s' * (self._size != 1)}"
        self._say(self._problem)
        self.changed.set()

    def _staff(self) -> list[Child]:
        """The rollout workers that are to stay; last who would leave first: the newest, behind them the quarantined."""
        staff = [one for one in self._children if one.spec.role == WORKER and one.is_kept and not one.is_leaving]
        return sorted(staff, key=lambda child: child.name in self._quarantined)

    # -- what stands still ---------------------------------------------------------------------------------------------

    def _on_findings(self, findings: Iterable[Finding]) -> None:
        """Say what begins and what is over; start again what is ours and does not heal."""
        self._quarantined = {finding.actor for finding in findings if finding.fault == "quarantine"}
        if not self._is_refused() and any(finding.fault in BUS_FAULTS for finding in findings):
            self._bus_was_away = time.monotonic()
        begun, ended = self._lasting.update(findings)
        for finding in begun:
            self._say(f"{printable(finding.text)}\n  -> {printable(finding.remedy)}")
        for finding in ended:
            self._say(f"over after {finding.seconds:.0f} s: {finding.fault} of {printable(finding.actor)}")
        for finding in findings:
            if finding.cure and finding.is_hopeless(self._settings.stall_seconds) and not self._over.is_set():
                self._cure(finding)

    def _cure(self, finding: Finding) -> None:
        where = (finding.host, finding.pid)
        child = next(
            (one for one in self._children for is_at in one.launched() if (is_at.host, is_at.pid) == where), None
        )
        if finding.fault in BUS_FAULTS and self._server is not None and (pid := self._server.pid):
            if finding.fault == "bus" or self._server.has_room():  # it would not come up on a full disk
                os.kill(pid, signal.SIGKILL)
        elif finding.cure == "restart" and finding.pid and child is not None and not child.fault:
            child.fault = finding.cause
            child.signal(signal.SIGKILL)
        elif finding.cure == "end" and self._staff():  # without own workers others may be on their way
            self._end(STUCK_EXIT_CODE, f"{printable(finding.text)}; ending the run")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, code: int, why: str) -> None:
        self._say(why)
        self._failure = code if code > 0 else 1
        self._over.set()

    def _say(self, text: str) -> None:
        print(f"asyncrl run: {text}", file=sys.stderr, flush=True)

    def _interrupt(self) -> None:
        """Ctrl-C: the first drains, the second ends everything now."""
        self._interrupts += 1
        if self._interrupts == 1:
            self._say("draining; once more to stop at once")
            self._over.set()
        else:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            child.signal(number)


async def _until_ended(pid: int) -> None:
    """Until the process with this id, a child of ours, is no more."""
    if not pid:
        return
    watched, ended = os.pidfd_open(pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
