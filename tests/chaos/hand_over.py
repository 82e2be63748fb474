"""A learner that takes over from another one during a storm: `asyncrl swap`, or a shadow and `asyncrl promote`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from tests.chaos.moments import soon

PHASES: Final = ("starting", "draining", "done", "failed")


class Command(Protocol):
    """A started `asyncrl ...`."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int) -> None: ...


class Run(Protocol):
    """What a hand-over does to its run."""

    @property
    def run_directory(self) -> Path: ...

    def pids(self) -> dict[str, int]: ...

    def beside(self, *words: str) -> Command: ...


class HandOver:
    """One of them, number ``number`` of its storm. promotes: by a shadow, and not by a new learner"""

    def __init__(self, run: Run, *, number: int, promotes: bool) -> None:
        self._run, self._name, self._promotes = run, f"s{number}", promotes
        self._rate = ("--set", f"learner.learning_rate={1e-3 + 1e-6 * number}")
        self._before = self._learners()
        self._earlier = set(self._statuses())  # a killed command leaves its own behind
        self._command: Command | None = None
        self._shadow: Command | None = None

    async def begin(self) -> None:
        """Give the command; for a promotion, once a shadow has trained a step."""
        directory = str(self._run.run_directory)
        if self._promotes:
            options = (*self._rate, "--set", "learner.options.step_seconds=0")
            shadow = self._shadow = self._run.beside("shadow", directory, "--name", self._name, *options)
            rows = self._run.run_directory / "shadows" / self._name / "metrics.jsonl"
            await soon(lambda: (rows.exists() and rows.stat().st_size > 0) or shadow.poll() is not None)
            self._command = self._run.beside("promote", directory, self._name, "--timeout", "120")
        else:
            self._command = self._run.beside("swap", directory, *self._rate, "--timeout", "120")

    async def until(self, phase: str) -> None:
        """Wait until it has come to ``phase`` or has ended."""
        at = PHASES.index(phase)
        await soon(lambda: self.code is not None or self._place() >= at)

    def _place(self) -> int:
        """Return the place of its phase in PHASES; -1 before the first one."""
        for file in self._statuses():
            if file in self._earlier:
                continue
            try:
                return PHASES.index(json.loads(file.read_text())["phase"])
            except (OSError, ValueError):  # removed meanwhile
                continue
        return -1

    def shoot(self, names: Sequence[str]) -> list[str]:
        """Kill the processes named, of the run or its own, as far as they are up. Return which."""
        pids, shot = self._run.pids(), []
        learners = [name for name in pids if name.startswith("learner")]
        old = [name for name in learners if name in self._before]
        new = [name for name in learners if name not in self._before]
        of = {"learner": (old or new)[:1], "new learner": new[:1]}
        for name in itertools.chain.from_iterable(of.get(one, [one]) for one in names):
            process = self._command if name == "command" else self._shadow if name == "shadow" else None
            with contextlib.suppress(ProcessLookupError):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                elif name in pids:
                    os.kill(pids[name], signal.SIGKILL)
                else:
                    continue
                shot.append(name)
        return shot

    @property
    def code(self) -> int | None:
        """Exit code of the command; None until it has ended."""
        return None if self._command is None else self._command.poll()

    def end(self) -> None:
        self.shoot(["command", "shadow"])

    def _statuses(self) -> list[Path]:
        return [*(self._run.run_directory / "swap").glob("*.status")]

    def _learners(self) -> list[str]:
        return sorted(name for name in self._run.pids() if name.startswith("learner"))
