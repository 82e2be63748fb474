"""A storm: one run of real processes on a real nats-server, killed again and again, finished and audited.

    start `asyncrl run` -> [wait for the victim's moment -> SIGKILL -> wait until all is as before] x kills
        -> drain -> resume for a few steps to the end -> `asyncrl audit`

"As before" means that the learner has trained another step, and that a killed worker has published another group.
`asyncrl run` starts its children again by itself; when it was the victim, or when it has ended because one of its
children used up its restarts, the storm starts it with --resume. The models are tiny (run_files.py), so that a
life of a process takes seconds; learner, buffer, checkpoints, prompt source, workers, followers, launcher and
bus are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl import app, config, processes
from asyncrl.errors import AsyncRLError, BusError
from asyncrl.fleet import NEVER_AGAIN
from asyncrl.history import HISTORY_FILE
from asyncrl.protocols import Bus
from asyncrl.topics import PROMPTS
from tests.chaos import meter
from tests.chaos.forked import ForkedRun, ForkServer
from tests.chaos.outage import Outage
from tests.chaos.run_files import ANSWERS
from tests.chaos.seen import Seen
from tests.chaos.victims import Kind, deal, processes_below

REPOSITORY: Final = Path(__file__).resolve().parents[2]
RECOVERY_SECONDS: Final = 300.0
"""Whoever is not back after this is lost: the storm fails and says who."""
_LOOK_SECONDS: Final = 0.02
_MOMENT_SECONDS: Final = 15.0
"""A moment that does not come by then is any time."""
_AFTERMATH_SECONDS: Final = 0.3
"""What the dead still had on its way has arrived."""
_LAST_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """seconds: from the kill until all was as before.

    load_seconds  of the learner that came back, from the start of its process until it could train, as it says itself;
                  None when another was killed, or the whole run was started again
    outage        what the workers did meanwhile; None when the learner was not killed
    """

    kind: Kind
    victims: tuple[str, ...]
    seconds: float
    step: int
    load_seconds: float | None = None
    outage: Outage | None = None

    def as_json(self) -> dict[str, Any]:
        row = {"kill": str(self.kind), "victims": self.victims, "seconds": round(self.seconds, 3), "step": self.step}
        if self.load_seconds is not None:
            row["load_seconds"] = round(self.load_seconds, 3)
        if self.outage is not None:
            row["worker_seconds"] = round(self.outage.seconds, 2)
            row["idle_seconds"] = round(self.outage.idle_seconds, 2)
        return row


class Storm:
    """One seed. ``folder`` gets the model, the data and the run.

    answers    one of run_files.ANSWERS
    port       of its nats-server, where it is to be the same in each life of the run; 0 takes a free one
    is_forked  processes start without imports (forks.py)
    overrides  SECTION.KEY=VALUE;  way, token  to the server of `bus.url`, if the observer has one of its own
    say, note  what a person sees of each kill, and what is kept of it
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        answers: str = "short",
        port: int = 0,
        is_forked: bool = False,
        overrides: Sequence[str] = (),
        way: str = "",
        token: str = "",
        say: Callable[[str], None] = print,
        note: Callable[[Kill], None] = lambda kill: None,
    ) -> None:
        self._folder = folder.absolute()
        self._seed = seed
        self._random = random.Random(seed)
        self._kinds = deal(seed)
        self._say, self._note = say, note
        self._process: subprocess.Popen[bytes] | ForkedRun | None = None
        self.seen = Seen()
        self.bus: Bus | None = None
        self._meters = self._folder / "meters"
        self._output = (self._folder / "output.txt").open("ab")
        self._is_finishing = False
        self._observer: asyncio.Task[None]
        self.kills: list[Kill] = []
        self.runs = 0
        """How often `asyncrl run` was started."""
        self.tokens: dict[str, int] = {}
        """Sampled by engines, and of these not in any group on the log: known when the run has drained."""
        ANSWERS[answers].write(self._folder, seed)
        self.run_file = self._folder / "run.toml"
        self.run_file.write_text(ANSWERS[answers].run_file.format(folder=self._folder, seed=seed, port=port))
        self._overrides = [word for item in overrides for word in ("--set", item)]
        self._config = config.load(self.run_file, [*overrides, *([f'bus.url="{way}"'] if way else [])])
        self._token = token
        self._forks = ForkServer(self._folder, ANSWERS[answers].modules, directory=REPOSITORY) if is_forked else None

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | ({"ASYNCRL_BUS_TOKEN": self._token} if self._token else {})

    @property
    def output(self) -> str:
        """What `asyncrl run` has said so far."""
        return Path(self._output.name).read_text()

    @property
    def run_directory(self) -> Path:
        return self._folder / "runs" / "storm"

    async def blow(self, count: int, *, limit_seconds: float = math.inf) -> dict[str, Any]:
        """Kill ``count`` times, or as often as there is time for, finish the run; its audit.

        Raises AssertionError when somebody does not come back.
        """
        deadline = time.monotonic() + limit_seconds
        async with self.up():
            while len(self.kills) < count and time.monotonic() < deadline:
                await self._kill(next(self._kinds))
        return self.audit()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[Seen]:
        """The run, from its first step until it is drained, resumed and finished."""
        try:
            async with self._observed():
                await self.until(lambda: self.seen.step[1] >= 1, "the first step")
                yield self.seen
                await self._finish()
        finally:
            self._end()

    # -- one kill ------------------------------------------------------------------------------------------------------

    async def _kill(self, kind: Kind) -> None:
        names = self._victims(kind)
        await self._moment(kind, names)
        before, runs, began = self.seen.step, self.runs, time.monotonic()
        workers = [pid for name, pid in self.pids().items() if name.startswith("w") and meter.of(self._meters, pid)[0]]
        self._shoot(names)
        await asyncio.sleep(_AFTERMATH_SECONDS)
        published = dict(self.seen.published)

        def is_as_before() -> bool:
            if kind.role in ("learner", "run"):
                return self.seen.has_trained_since(before[0])
            has_published = kind.role == "nats-server" or all(
                self.seen.published.get(name, 0) > published.get(name, 0) for name in names
            )
            return has_published and self.seen.step > before

        outage = None
        async with contextlib.AsyncExitStack() as watching:
            if kind.role == "learner":
                outage = await watching.enter_async_context(self._outage(workers))
            await self.until(is_as_before, f"{', '.join(names)} killed ({kind})")
        seconds, (run_epoch, step) = time.monotonic() - began, self.seen.step
        is_launchers = kind.role == "learner" and self.runs == runs
        kill = Kill(
            kind=kind,
            victims=tuple(names),
            seconds=seconds,
            step=step,
            load_seconds=await self._load_seconds(run_epoch) if is_launchers else None,
            outage=outage,
        )
        self.kills.append(kill)
        self._note(kill)
        self._say(f"{len(self.kills):5d}  {kind!s:38s} {', '.join(names):11s} {kill.seconds:6.1f} s  step {kill.step}")

    @contextlib.asynccontextmanager
    async def _outage(self, workers: Sequence[int]) -> AsyncIterator[Outage]:
        outage = Outage()
        watch = outage.watch(
            self._meters,
            workers,
            group_size=self._config.rollout.group_size,
            prompts=self._count_prompts,
        )
        task = asyncio.create_task(watch, name="outage")
        try:
            yield outage
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _count_prompts(self) -> int:
        if self.bus is None:
            raise BusError("away")
        return await self.bus.depth(PROMPTS)

    async def _load_seconds(self, run_epoch: int) -> float | None:
        """As the first step of this life of the learner says."""
        deadline = time.monotonic() + _MOMENT_SECONDS
        while time.monotonic() < deadline:
            for line in reversed((self.run_directory / "metrics.jsonl").read_text().splitlines(keepends=True)):
                row = json.loads(line) if line.endswith("\n") else {}
                if row.get("learner/run_epoch") == run_epoch and "learner/load_seconds" in row:
                    return float(row["learner/load_seconds"])
                if row.get("learner/run_epoch", run_epoch) < run_epoch:
                    break
            await asyncio.sleep(_LOOK_SECONDS)
        return None

    def _shoot(self, names: Sequence[str]) -> None:
        pids = self.pids()
        for name in names:
            if name in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[name], signal.SIGKILL)

    def _victims(self, kind: Kind) -> list[str]:
        if kind.role == "rollout-worker":
            return self._random.sample(["w0", "w1", "w2"], kind.count)
        return [kind.role]

    async def _moment(self, kind: Kind, names: list[str]) -> None:
        """Wait for the kind's moment."""
        if kind.moment == "after a step":
            step = self.seen.step
            await self._soon(lambda: self.seen.step > step)
        elif kind.moment == "writing a checkpoint":
            checkpoints = self.run_directory / "checkpoints"
            await asyncio.to_thread(_wait_for, checkpoints, ".*.partial", seconds=_MOMENT_SECONDS)
            await asyncio.sleep(self._random.uniform(0.0, 0.01))
        elif kind.moment == "after its publish":
            count = self.seen.published.get(names[0], 0)
            await self._soon(lambda: self.seen.published.get(names[0], 0) > count)
        elif kind.moment == "starting":
            pid = self.pids().get("learner")
            self._shoot(["learner"])
            await self._soon(lambda: self.pids().get("learner") not in (None, pid))
            await asyncio.sleep(self._random.uniform(0.0, 2.5))
        else:
            await asyncio.sleep(self._random.uniform(0.0, 1.5))

    async def _soon(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _MOMENT_SECONDS
        while not is_so() and time.monotonic() < deadline:
            await asyncio.sleep(0.001)

    # -- the run -------------------------------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        if self._process is None or self._process.poll() is not None:
            return {}
        forked = processes_below(self._forks.pid) if self._forks is not None else {}
        return {"run": self._process.pid} | processes_below(self._process.pid) | forked

    def _start(self, *extra: str) -> None:
        (self.run_directory / app.BUS_FILE).unlink(missing_ok=True)  # the address of a life that is over
        resume = ["--resume"] if (self.run_directory / HISTORY_FILE).exists() else []
        arguments = ["run", str(self.run_file), *self._overrides, *resume, *extra]
        self.runs += 1
        if self._forks is not None:
            self._process = self._forks.run(arguments, environment=self.environment, output=Path(self._output.name))
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            preexec_fn=functools.partial(processes.signal_on_parent_death, signal.SIGKILL),
        )

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._forks is not None:
            self._forks.close()
        self._output.close()

    async def _finish(self) -> None:
        """Drain, and go on for a few steps to a regular end."""
        assert self._process is not None
        self._is_finishing = True
        self._process.send_signal(signal.SIGINT)
        await asyncio.to_thread(self._process.wait, RECOVERY_SECONDS)
        await asyncio.sleep(_AFTERMATH_SECONDS)
        generated = meter.generated(self._meters)  # nobody holds anything now
        self.tokens = {"generated": generated, "lost": generated - self.seen.tokens}
        newest = max((self.run_directory / "checkpoints").glob("step-*"), key=lambda folder: folder.stat().st_mtime)
        steps = json.loads((newest / "learner.json").read_text())["step"] + _LAST_STEPS
        self._start("--set", f"run.steps={steps}")
        code = await asyncio.to_thread(self._process.wait, RECOVERY_SECONDS)
        assert code == 0, f"the run that was to finish ended with exit code {code}; see {self._output.name}"

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Raises AssertionError after RECOVERY_SECONDS."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while not is_so():
            if self._observer.done():
                await self._observer  # it failed
            assert time.monotonic() < deadline, f"not back after {RECOVERY_SECONDS:.0f} s: {what}"
            code = self._process.poll() if self._process else None
            assert code not in NEVER_AGAIN, f"asyncrl run ended with exit code {code}; see {self._output.name}"
            await asyncio.sleep(_LOOK_SECONDS)

    def audit(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "asyncrl", "audit", str(self.run_directory), "--json"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.stdout, f"asyncrl audit said nothing: {done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found | {"exit_code": done.returncode}

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
        """Start `asyncrl run`, again with --resume when it is gone, and watch the bus of each of its lives."""
        while not self._is_finishing:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                bus = await app.connect(self._config, token=self._token)
            except (AsyncRLError, OSError, ValueError):  # not up yet, or just gone
                await asyncio.sleep(0.1)
                continue
            watches = (
                self.seen.watch_steps(bus),
                self.seen.read_groups(bus),
                self._life(),
            )
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

    async def _life(self) -> None:
        process = self._process
        while process is not None and process.poll() is None:
            await asyncio.sleep(_LOOK_SECONDS)


def _wait_for(folder: Path, pattern: str, *, seconds: float) -> None:
    """Until something of that name is there."""
    deadline = time.monotonic() + seconds
    while not any(folder.glob(pattern)) and time.monotonic() < deadline:
        time.sleep(0.0005)
