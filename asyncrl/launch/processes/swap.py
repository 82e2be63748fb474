"""Replaces the learner of a running run by one with other settings, code, or GPUs, while the engines go on sampling.

    asyncrl swap RUN --set learner.tensor_parallel=2
        RUN/swap/ID.request -> LearnerSwapper -> the new learner starts: it imports and checks, and touches no GPU
                                              -> it is ready: the present one ends its step, writes a checkpoint, leaves
                                              -> SIGUSR1: the new one goes on from that checkpoint
        RUN/swap/ID.status  <- LearnerSwapper

Workers see only a new incarnation, whose first version is the last one of the incarnation before. They go on with the
groups that the window allows, so engines lose time only if a checkpoint and its reading take longer than the window.
Until the present learner is told to leave, any failure of the new one leaves the run as it was; after that, the new one
is restarted like any learner.

Requests are files, not messages: who may write to the run's folder may choose what code the run executes.

Tests: tests/unit/launch/processes/test_swap.py; with real processes, tests/integration/processes/test_swap.py.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from asyncrl.errors import AsyncRLError
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.launch.processes.fleet import DRAIN_SECONDS, HAND_OVER_SECONDS, Fleet
from asyncrl.messages.roles import LEARNER

LOOK_SECONDS: Final = 0.2
TAKE_OVER: Final = signal.SIGUSR1

NewLearner = Callable[["SwapRequest", Sequence[str], frozenset[int]], ChildProcess]
"""Creates the learner of a request, with all overrides so far, that uses none of these GPUs. Raises ConfigError,
NoRoom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStatus:
    """How far a swap is.

    phase    starting (the new learner; the present one trains), draining (the present one ends its step and writes a
             checkpoint), done (the present one has left), failed (the present one goes on)
    problem  why it has failed, in one line
    """

    phase: Literal["starting", "draining", "done", "failed"]
    problem: str = ""


class SwapRequest:
    """A request and its answer, as files in the run's folder."""

    def __init__(self, directory: Path, name: str) -> None:
        """directory: the run's folder"""
        folder = directory / "swap"
        self._request, self._status = folder / f"{name}.request", folder / f"{name}.status"

    @classmethod
    def make(cls, directory: Path, overrides: Sequence[str], *, shadow: Path | None = None) -> SwapRequest:
        """Write a request for a learner with these overrides, ``section.key=value``, after those of the present one.

        shadow  folder of a shadow learner whose state the new learner takes (audit/shadow.py)
        """
        made = cls(directory, uuid.uuid4().hex)
        _write(made._request, {"overrides": list(overrides), "shadow": str(shadow.absolute()) if shadow else ""})
        return made

    @classmethod
    def waiting(cls, directory: Path) -> list[SwapRequest]:
        """Return the requests that nobody has answered."""
        requests = [cls(directory, file.stem) for file in sorted((directory / "swap").glob("*.request"))]
        return [one for one in requests if one.status is None]

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(json.loads(self._request.read_text())["overrides"])

    @property
    def shadow(self) -> str:
        return str(json.loads(self._request.read_text())["shadow"])

    @property
    def status(self) -> SwapStatus | None:
        """None until `asyncrl run` has seen the request."""
        try:
            return SwapStatus(**json.loads(self._status.read_text()))
        except FileNotFoundError:
            return None

    def answer(self, status: SwapStatus) -> None:
        _write(self._status, asdict(status))

    def remove(self) -> None:
        self._request.unlink(missing_ok=True)
        self._status.unlink(missing_ok=True)


def _write(file: Path, content: object) -> None:
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    partial.rename(file)


def ready_file(directory: Path, name: str) -> Path:
    """Return the file by which the learner process ``name`` says that it is ready to take over."""
    return directory / "swap" / f"{name}.ready"


class LearnerSwapper:
    """waits for: a request in the run's folder; then the new learner, and the end of the present one"""

    def __init__(self, directory: Path, fleet: Fleet, *, new_learner: NewLearner) -> None:
        """directory: the run's folder"""
        self._directory = directory
        self._fleet = fleet
        self._new_learner = new_learner
        self._overrides: tuple[str, ...] = ()  # of earlier swaps

    async def run(self) -> None:
        """Run until cancelled."""
        shutil.rmtree(self._directory / "swap", ignore_errors=True)  # requests to an earlier `asyncrl run`
        while True:
            for request in SwapRequest.waiting(self._directory):
                try:
                    await self._swap(request)
                except (AsyncRLError, OSError, ValueError) as error:
                    request.answer(SwapStatus(phase="failed", problem=str(error)))
            await asyncio.sleep(LOOK_SECONDS)

    async def _swap(self, request: SwapRequest) -> None:
        """Start a new learner, and let it take over once it is ready."""
        overrides = (*self._overrides, *request.overrides)
        new = self._new_learner(request, overrides, self._taken())
        self._fleet.say(f"{new.name} starts, to take over from the learner")
        request.answer(SwapStatus(phase="starting"))
        ready = ready_file(self._directory, new.name)
        self._fleet.add(new)
        while not ready.exists():
            if new.gone.is_set():
                raise AsyncRLError(f"the new learner does not start; see {self._directory}/logs/{new.name}.log")
            await asyncio.sleep(LOOK_SECONDS)
        request.answer(SwapStatus(phase="draining"))
        for old in [one for one in self._fleet.children if one.spec.role == LEARNER and one is not new]:
            old.drain()
            later = asyncio.get_running_loop().call_later
            later(DRAIN_SECONDS, old.signal, signal.SIGTERM)
            later(DRAIN_SECONDS + HAND_OVER_SECONDS, old.signal, signal.SIGKILL)
            await old.gone.wait()
        new.is_standby = False
        new.signal(TAKE_OVER)
        if new.gone.is_set():  # it died just now: it starts again, as a learner that is resumed
            self._fleet.add(new)
        self._overrides = overrides
        self._fleet.say(f"{new.name} has taken over")
        request.answer(SwapStatus(phase="done"))

    def _taken(self) -> frozenset[int]:
        return frozenset(gpu for one in self._fleet.children if one.spec.role != LEARNER for gpu in one.spec.gpus)
