"""A storm: one run of real processes on a real nats-server, killed repeatedly, finished and audited.

    start `asyncrl run` -> [wait for the victim's moment -> SIGKILL -> wait for recovery] x kills
        -> drain -> resume for a few steps to the end -> `asyncrl audit`

Recovery means that the learner has trained another step, and that a killed worker has published another group.
`asyncrl run` restarts its children. If `asyncrl run` itself was the victim, or exited because a child used up its
restarts, the storm restarts it with --resume. The models are tiny (run_files.py), so processes live for seconds. The
learner, buffer, checkpoints, prompt source, workers, followers, launcher and bus are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl import config, os_process
from asyncrl.actors.learner import history
from asyncrl.actors.learner.history import HISTORY_FILE
from asyncrl.adapters import registry
from asyncrl.adapters.bus_file import BUS_FILE
from asyncrl.bus.port import Bus
from asyncrl.errors import AsyncRLError, BusError, ConfigError
from asyncrl.messages.topics import PROMPTS
from asyncrl.policies.audit.entries import present
from tests import ROOT
from tests.chaos import meter, report, trouble
from tests.chaos.hand_over import HandOver
from tests.chaos.kill import Kill, load_seconds
from tests.chaos.moments import Moments, soon
from tests.chaos.outage import Outage
from tests.chaos.run_files import ANSWERS, DISK_MEGABYTES, SMALL_DISKS
from tests.chaos.seen import Seen
from tests.chaos.victims import FAULTS, LEAST_STOPPED_SECONDS, MOST_SHORT_SECONDS, MOST_STOPPED_SECONDS, Kind, deal
from tests.harness.faults.injections import small_disk
from tests.harness.forked import LAUNCHER, ForkedCommand, ForkServer
from tests.harness.processes import grandchildren, processes_below, spawned

RECOVERY_SECONDS: Final = 300.0
"""Recovery limit; after it the storm fails and names the process that is not back."""
_LOOK_SECONDS: Final = 0.02
_AFTERMATH_SECONDS: Final = 0.3
"""Time for messages in flight from a killed process to arrive."""
_LAST_STEPS: Final = 3


class Storm:
    """One storm with one seed. ``folder`` receives the model, the data and the run.

    answers    key of run_files.ANSWERS
    faults     key of victims.FAULTS
    only       restricts the faults to kinds whose name contains this text
    port       port of its nats-server if every restart of the run must use the same one; 0 takes a free port
    forks      starts processes without imports (tests/harness/forks.py); None starts each as a new Python
    overrides  SECTION.KEY=VALUE
    way, token  url and token for the server of `bus.url`, if the observer has its own
    say        shows each kill to a person
    note       records each kill
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        answers: str = "short",
        faults: str = "kills",
        only: str = "",
        port: int = 0,
        forks: ForkServer | None = None,
        overrides: Sequence[str] = (),
        way: str = "",
        token: str = "",
        say: Callable[[str], None] = print,
        note: Callable[[Kill], None] = lambda kill: None,
        has_liar: bool = False,
    ) -> None:
        self._folder = folder.absolute()
        self._seed = seed
        self.random = random.Random(seed)
        kinds = tuple(kind for kind in FAULTS[faults] if only in str(kind))
        self._kinds = deal(seed, kinds)
        self._has_disks = any(kind.deed == "full" for kind in kinds)
        self._say, self._note = say, note
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self.seen = Seen()
        self.bus: Bus | None = None
        self._meters = self._folder / "meters"
        self._output = (self._folder / "output.txt").open("ab")
        self._is_finishing = False
        self._observer: asyncio.Task[None]
        self._moments = Moments(self)
        self.kills: list[Kill] = []
        self.runs = 0
        """Number of starts of `asyncrl run`."""
        self.tokens: dict[str, int] = {}
        """Tokens sampled by engines, and how many of them are in no group of the log; known once the run has
        drained."""
        ANSWERS[answers].write(self._folder, seed)
        self.run_file = self._folder / "run.toml"
        self.run_file.write_text(ANSWERS[answers].run_file.format(folder=self._folder, seed=seed, port=port))
        overrides = (*(SMALL_DISKS if self._has_disks else ()), *overrides)
        self._overrides = [word for item in overrides for word in ("--set", item)]
        self._config = config.load(self.run_file, [*overrides, *([f'bus.url="{way}"'] if way else [])])
        self._workers = [f"w{number}" for number in range(self._config.rollout.workers)]
        self._token = token
        self._forks = forks
        self._has_liar = has_liar
        self._lies = self._folder / "lies.txt"

    @property
    def environment(self) -> dict[str, str]:
        forks = self._forks.environment if self._forks is not None else {}
        return os.environ | forks | ({"ASYNCRL_BUS_TOKEN": self._token} if self._token else {})

    @property
    def output(self) -> str:
        """Output of `asyncrl run` so far."""
        return Path(self._output.name).read_text()

    @property
    def run_directory(self) -> Path:
        return self._folder / "runs" / "storm"

    @contextlib.contextmanager
    def disks(self) -> Iterator[None]:
        """Give the run small file systems of its own if its faults need them; on exit, ``left`` receives a copy."""
        if not self._has_disks:
            yield
            return
        with (
            small_disk(self.run_directory, megabytes=DISK_MEGABYTES),
            small_disk(self.run_directory / "nats", megabytes=DISK_MEGABYTES),
        ):
            try:
                yield
            finally:
                shutil.copytree(self.run_directory, self._folder / "left", dirs_exist_ok=True)

    async def blow(self, count: int, *, limit_seconds: float = math.inf) -> dict[str, Any]:
        """Kill ``count`` times or until the time limit, finish the run and return its audit.

        Raises AssertionError if a process does not come back.
        """
        deadline = time.monotonic() + limit_seconds
        async with self.up():
            while len(self.kills) < count and time.monotonic() < deadline:
                await self._kill(next(self._kinds))
        return self.audit()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Seen]:
        """The run: open from its first step; on exit it is drained, resumed and finished."""
        try:
            async with self._observed(), self._lied_to():
                await self.until(lambda: self.seen.step[1] >= 1, "the first step")
                yield self.seen
                await self._finish()
        finally:
            self._end()

    @property
    def lies(self) -> int:
        """Number of the liar's messages that the bus stored."""
        return int(self._lies.read_text() or 0) if self._lies.exists() else 0

    @contextlib.asynccontextmanager
    async def _lied_to(self) -> AsyncIterator[None]:
        """With ``has_liar``, run a malicious worker that answers prompts with lies (liar.py)."""
        if not self._has_liar:
            yield
            return
        process = self._start_liar()
        try:
            yield
            assert process.poll() is None, f"the liar ended; see {self._output.name}"
        finally:
            process.kill()
            process.wait()

    def _start_liar(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.chaos.liar", str(self._folder), str(self._seed), str(self._lies)]
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output
        )

    def honest_groups_failed(self) -> list[int]:
        """Return groups that the run's own workers made, but that were not trained, dropped or filtered in the end."""
        entries = present(history.read(self.run_directory / HISTORY_FILE))
        failed = {group_id for entry in entries if entry.kind == "failed" for group_id in entry.groups}
        return sorted(failed & self.seen.honest)

    # -- one kill ------------------------------------------------------------------------------------------------------

    async def _kill(self, kind: Kind) -> None:
        if kind.hand_over:
            await self._kill_in_hand_over(kind)
            return
        names = kind.victims(self.random, workers=self._workers, learner=self._config.learner)
        await self._moments.of(kind, names)
        before, runs, began = self.seen.step, self.runs, time.monotonic()
        workers = [pid for name, pid in self.pids().items() if name.startswith("w") and meter.of(self._meters, pid)[0]]
        names_it = asyncio.create_task(self._named(kind, names, began, len(self.output)), name="named")
        await self._strike(kind, names)
        await asyncio.sleep(_AFTERMATH_SECONDS)
        published = dict(self.seen.published)
        step = before if kind.is_deadly else self.seen.step  # steps during the shortage do not show recovery

        def is_as_before() -> bool:
            if kind.role == "everybody" or (kind.role in ("learner", "run", "rank", "machine") and kind.is_deadly):
                return self.seen.has_trained_since(before[0])
            has_published = kind.role != "rollout-worker" or all(
                self.seen.published.get(name, 0) > published.get(name, 0) for name in names
            )
            return has_published and self.seen.step > step

        outage = None
        async with contextlib.AsyncExitStack() as watching:
            if kind.role == "learner" and kind.deed == "kill":
                size = self._config.rollout.group_size
                measured = Outage().watched(self._meters, workers, group_size=size, prompts=self._count_prompts)
                outage = await watching.enter_async_context(measured)
            await self.until(is_as_before, f"{', '.join(names)} killed ({kind})")
        seconds, (incarnation, done) = time.monotonic() - began, self.seen.step
        names_it.cancel()
        await asyncio.wait((names_it,))
        is_launchers = kind.role == "learner" and kind.deed == "kill" and self.runs == runs
        kill = Kill(
            kind=kind,
            victims=tuple(names),
            seconds=seconds,
            step=done,
            named_seconds=None if names_it.cancelled() else names_it.result(),
            load_seconds=await load_seconds(self.run_directory, incarnation) if is_launchers else None,
            outage=outage,
        )
        self._count(kill)

    def _count(self, kill: Kill) -> None:
        self.kills.append(kill)
        self._note(kill)
        victims = ", ".join(kill.victims)
        self._say(f"{len(self.kills):5d}  {kill.kind!s:42s} {victims:11s} {kill.seconds:6.1f} s  step {kill.step}")

    async def _kill_in_hand_over(self, kind: Kind) -> None:
        """Let another learner take over, and kill a process meanwhile.

        Recovered: the command has ended, whether the new learner has taken over or not, and the run's learner has
        trained a step since, and a killed worker has published a group.
        """
        names = kind.victims(self.random, workers=self._workers, learner=self._config.learner)
        pids = {name: pid for name, pid in self.pids().items() if name.startswith("w")}
        over = HandOver(self, number=len(self.kills), promotes=kind.hand_over == "promotion")
        outage = Outage().watched(
            self._meters, [*pids.values()], group_size=self._config.rollout.group_size, prompts=self._count_prompts
        )
        try:
            async with outage as measured:
                await over.begin()
                phase = kind.moment.partition(" ")[2]
                await over.until(phase)
                if names:
                    await asyncio.sleep(self.random.uniform(0.0, 1.0 if phase == "starting" else 0.4))
                began, published = time.monotonic(), dict(self.seen.published)
                victims = over.shoot(names)
                await asyncio.sleep(_AFTERMATH_SECONDS)
                await self.until(lambda: over.code is not None, f"asyncrl {kind.hand_over} has ended ({kind})")
                step = self.seen.step

                def is_as_before() -> bool:
                    has_published = all(
                        self.seen.published.get(name, 0) > published.get(name, 0) for name in victims if name in pids
                    )
                    return has_published and self.seen.step > step

                await self.until(is_as_before, f"{', '.join(names)} killed ({kind})")
        finally:
            over.end()
        if len(victims) < len(names):  # the victim had ended by itself: it is killed another time
            return
        self._count(
            Kill(
                kind=kind,
                victims=tuple(victims),
                seconds=time.monotonic() - began,
                step=self.seen.step[1],
                outage=measured,
                code=over.code,
            )
        )

    def beside(self, *words: str) -> subprocess.Popen[bytes] | ForkedCommand:
        """Start another command of asyncrl. Its output is added to that of the run."""
        if self._forks is not None:
            return self._forks.run(words, environment=self.environment, output=Path(self._output.name))
        return subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *words],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
        )

    async def _count_prompts(self) -> int:
        if self.bus is None:
            raise BusError("away")
        return await self.bus.depth(PROMPTS)

    async def _strike(self, kind: Kind, names: Sequence[str]) -> None:
        if not kind.is_deadly:
            most = MOST_STOPPED_SECONDS if kind.deed == "stop" else MOST_SHORT_SECONDS
            seconds = self.random.uniform(LEAST_STOPPED_SECONDS, most)
            disk = self.run_directory / "nats" if kind.role == "server's disk" else self.run_directory
            pids = [pid for name, pid in self.pids().items() if name in names]
            with trouble.of_all(kind.deed, pids, folder=self._meters, role=kind.role, disk=disk):
                await asyncio.sleep(seconds)
            return
        before = self.pids()
        self.shoot(names)
        if kind.deed == "kill twice":
            await soon(lambda: all(self.pids().get(name) not in (None, before.get(name)) for name in names))
            self.shoot(names)

    def shoot(self, names: Sequence[str]) -> None:
        self._send(signal.SIGKILL, names)

    def _send(self, number: int, names: Sequence[str]) -> list[int]:
        """Return the pids that received the signal."""
        sent, pids = [], self.pids()
        for name in names:
            if name in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[name], number)
                    sent.append(pids[name])
        return sent

    async def _named(self, kind: Kind, names: Sequence[str], began: float, behind: int) -> float | None:
        """Return the seconds until `asyncrl run` mentions each of ``names``, or the learner's end for a rank or a
        machine. None if `asyncrl run` is a victim itself, or a clock, which nothing depends on."""
        if "run" in names or kind.deed == "clock set back":
            return None
        words = ["learner ended with"] if kind.role in ("rank", "machine") else names
        while not all(word in self.output[behind:] for word in words):
            await asyncio.sleep(_LOOK_SECONDS)
        return time.monotonic() - began

    # -- the run -------------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        if self._process is None or self._process.poll() is not None:
            return {}
        forked = self._forks.children_of(self._process.pid) if self._forks is not None else {}
        found = {"run": self._process.pid} | processes_below(self._process.pid) | forked
        learner = self._config.learner
        if learner.ranks > 1 and learner.machines == 1 and "learner" in found:
            below = grandchildren if learner.device == "cpu" else spawned
            found |= {f"learner-{rank}": pid for rank, pid in enumerate(sorted(below(found["learner"])), start=1)}
        return found

    def _start(self, *extra: str) -> None:
        (self.run_directory / BUS_FILE).unlink(missing_ok=True)  # left by an earlier `asyncrl run`
        resume = ["--resume"] if (self.run_directory / HISTORY_FILE).exists() else []
        arguments = ["run", str(self.run_file), *self._overrides, *resume, *extra]
        self.runs += 1
        if self._forks is not None:
            arguments += ["--set", LAUNCHER]
            self._process = self._forks.run(arguments, environment=self.environment, output=Path(self._output.name))
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            preexec_fn=functools.partial(os_process.signal_on_parent_death, signal.SIGKILL),
        )

    async def _ended(self) -> None:
        process = self._process
        while process is not None and process.poll() is None:
            await asyncio.sleep(_LOOK_SECONDS)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()

    async def _finish(self) -> None:
        """Drain, then resume for a few steps to a normal end."""
        assert self._process is not None
        self._is_finishing = True
        self._process.send_signal(signal.SIGINT)
        await asyncio.to_thread(self._process.wait, RECOVERY_SECONDS)
        await asyncio.sleep(_AFTERMATH_SECONDS)
        generated = meter.generated(self._meters)  # nothing is in flight now
        self.tokens = {"generated": generated, "lost": generated - self.seen.tokens}
        newest = max((self.run_directory / "checkpoints").glob("step-*"), key=lambda folder: folder.stat().st_mtime)
        steps = json.loads((newest / "learner.json").read_text())["step"] + _LAST_STEPS
        self._start("--set", f"run.steps={steps}")
        code = await asyncio.to_thread(self._process.wait, RECOVERY_SECONDS)
        assert code == 0, f"the run that was to finish ended with exit code {code}; see {self._output.name}"

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until ``is_so`` is true. Raises AssertionError after RECOVERY_SECONDS."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not is_so():
            if self._observer.done():
                await self._observer  # raises if the observer failed
            assert time.monotonic() < deadline, f"not back after {RECOVERY_SECONDS:.0f} s: {what}"
            code = self._process.poll() if self._process else None
            assert code != ConfigError.exit_code, f"asyncrl run ended with exit code {code}; see {self._output.name}"
            await asyncio.sleep(_LOOK_SECONDS)

    def audit(self) -> dict[str, Any]:
        return report.audit(self.run_directory, environment=self.environment)

    # -- what can be seen from outside ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _observed(self) -> AsyncIterator[None]:
        self._observer = asyncio.create_task(self._observe(), name="observer")
        try:
            yield
        finally:
            self._observer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._observer

    async def _observe(self) -> None:
        """Start `asyncrl run`, restart it with --resume whenever it exits, and watch the bus of each."""
        while not self._is_finishing:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                bus = await registry.connect(self._config, token=self._token)
            except (AsyncRLError, OSError, ValueError):  # not up yet, or just ended
                await asyncio.sleep(0.1)
                continue
            watches = (self.seen.watch_steps(bus), self.seen.read_groups(bus), self._ended())
            self.bus = bus
            tasks = [asyncio.create_task(watch) for watch in watches]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.bus = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                with contextlib.suppress(AsyncRLError, OSError, TimeoutError):
                    await bus.close()
