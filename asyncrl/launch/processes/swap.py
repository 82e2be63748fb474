"""Replaces the learner of a running run by one with other settings, code, or GPUs, while the engines go on sampling.

    asyncrl swap RUN --set learner.tensor_parallel=2
        RUN/swap/ID.request -> LearnerSwapper -> the new learner starts: it imports and checks, and touches no GPU
                                              -> it is ready: the present one ends its step, writes a checkpoint, leaves
                                              -> SIGUSR1: the new one goes on from that checkpoint
        RUN/swap/ID.status  <- LearnerSwapper

Workers see only a new incarnation, whose first version is the last one of the incarnation before. They go on with the
groups that the window allows, so engines lose time only if a checkpoint and its reading take longer than the window.
Until the present learner is told to leave, any failure of the new one leaves the run as it was, and so does a request
that is removed; after that, the new one is restarted like any learner. A shadow that fails to hand over its state then
leaves the run a learner with the present settings.

Requests are files, not messages: who may write to the run's folder may choose what code the run executes.

Tests: tests/unit/launch/processes/test_swap.py; with real processes, tests/integration/processes/test_swap.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from asyncrl.durable_files import write_whole
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.processes.child_process import ChildProcess
from asyncrl.launch.processes.fleet import Fleet
from asyncrl.messages.roles import LEARNER, LEARNER_RANK

LOOK_SECONDS: Final = 0.2
RANK_SECONDS: Final = 10.0
"""Time for a rank to end once its learner has left."""
TAKE_OVER: Final = signal.SIGUSR1

NewLearner = Callable[[Sequence[str], frozenset[int], str], Sequence[ChildProcess]]
"""Creates a learner that waits to take over, with these overrides, on none of these GPUs, with the state of the shadow
in this folder ("": of none); then its other ranks, if they are processes of their own. Raises ConfigError, NoRoom."""

Phase = Literal["starting", "draining", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapStatus:
    """How far a swap is.

    phase    starting (the new learner; the present one trains), draining (the present one ends its step and writes a
             checkpoint), done (the present one has left), failed
    problem  why it has failed and what goes on, in one line
    """

    phase: Phase
    problem: str = ""


class SwapRequest:
    """A request and its answer, as files in the run's folder."""

    def __init__(self, directory: Path, name: str) -> None:
        """directory: the run's folder"""
        folder = directory / "swap"
        self.name = name
        self._request, self._status = folder / f"{name}.request", folder / f"{name}.status"

    @classmethod
    def make(cls, directory: Path, overrides: Sequence[str], *, shadow: Path | None = None) -> SwapRequest:
        """Write a request for a learner with these overrides, ``section.key=value``, after those of the present one.

        shadow  folder of a shadow learner whose state the new learner takes (audit/shadow.py)
        """
        made = cls(directory, uuid.uuid4().hex)
        request = {"overrides": list(overrides), "shadow": str(shadow.absolute()) if shadow else ""}
        write_whole(made._request, json.dumps(request))
        return made

    @classmethod
    def waiting(cls, directory: Path) -> list[SwapRequest]:
        """Return the requests that nobody has answered."""
        requests = [cls(directory, file.stem) for file in sorted((directory / "swap").glob("*.request"))]
        return [one for one in requests if one.status is None]

    def read(self) -> tuple[tuple[str, ...], str]:
        """Return the overrides, and the shadow's folder or "". Raises ConfigError if the file is not a request."""
        try:
            content = json.loads(self._request.read_text())
            overrides, shadow = content["overrides"], content["shadow"]
            if not (isinstance(overrides, list) and all(isinstance(one, str) for one in (*overrides, shadow))):
                raise TypeError
        except OSError as error:
            raise ConfigError(f"{self._request}: cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{self._request}: is not a request of this version of `asyncrl swap`") from None
        return tuple(overrides), shadow

    @property
    def is_withdrawn(self) -> bool:
        """Whether nobody waits for it any more."""
        return not self._request.exists()

    @property
    def status(self) -> SwapStatus | None:
        """None until `asyncrl run` has seen the request. A file of another version counts as failed."""
        try:
            status = SwapStatus(**json.loads(self._status.read_text()))
            if status.phase not in get_args(Phase):
                raise ValueError
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError):
            return SwapStatus(phase="failed", problem=f"{self._status}: cannot be read, or is of another version")
        return status

    def answer(self, status: SwapStatus) -> None:
        if not self.is_withdrawn:
            write_whole(self._status, json.dumps(asdict(status)))

    def remove(self) -> None:
        self._request.unlink(missing_ok=True)
        self._status.unlink(missing_ok=True)


def ready_file(directory: Path, name: str) -> Path:
    """Return the file by which the learner process ``name`` says that it is ready to take over."""
    return directory / "swap" / f"{name}.ready"


def _gone(its: Sequence[ChildProcess]) -> list[str]:
    return [one.name for one in its if one.gone.is_set()]


class LearnerSwapper:
    """waits for: a request in the run's folder; then the new learner, and the end of the present one"""

    def __init__(self, directory: Path, fleet: Fleet, *, new_learner: NewLearner) -> None:
        """directory: the run's folder"""
        self._directory = directory
        self._fleet = fleet
        self._new_learner = new_learner
        self._overrides: tuple[str, ...] = ()  # of earlier swaps
        self._seen: set[str] = set()
        """Names of requests: one that cannot be answered, as on a full disk, is not tried again."""

    async def run(self) -> None:
        """Run until cancelled."""
        shutil.rmtree(self._directory / "swap", ignore_errors=True)  # requests to an earlier `asyncrl run`
        swap: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                for request in SwapRequest.waiting(self._directory):
                    if request.name in self._seen:
                        continue
                    self._seen.add(request.name)
                    if swap is None or swap.done():
                        swap = group.create_task(self._answer(request))
                    else:
                        self._refuse(request, "another swap is under way; try again when it is done")
                await asyncio.sleep(LOOK_SECONDS)

    async def _answer(self, request: SwapRequest) -> None:
        try:
            await self._swap(request)
        except (AsyncRLError, OSError) as error:
            self._refuse(request, str(error))
        except asyncio.CancelledError:
            self._refuse(request, "the run ends")
            raise

    def _refuse(self, request: SwapRequest, problem: str) -> None:
        self._fleet.say(f"not swapped: {problem}")
        with contextlib.suppress(OSError):
            request.answer(SwapStatus(phase="failed", problem=problem))

    async def _swap(self, request: SwapRequest) -> None:
        """Start a new learner, and let it take over once it is ready."""
        changed, shadow = request.read()
        overrides = (*self._overrides, *changed)
        new, *ranks = its = self._new_learner(overrides, self._taken(), shadow)
        own = self._new_learner(self._overrides, self._taken(), "") if shadow else None  # while the run file is sound
        self._fleet.say(f"{new.name} starts, to take over from the learner")
        request.answer(SwapStatus(phase="starting"))
        ready = [ready_file(self._directory, one.name) for one in its]
        for one in its:
            self._fleet.add(one)
        try:
            await self._until(lambda: all(map(Path.exists, ready)) and not _gone(its), its, request)
            request.answer(SwapStatus(phase="draining"))
        except (AsyncRLError, OSError) as error:
            await self._end(its)
            raise AsyncRLError(f"{error}; the present learner goes on") from None
        for old in [one for one in self._fleet.children if one.spec.role == LEARNER and one is not new]:
            await self._drain(old)
        for one in its:
            one.signal(TAKE_OVER)
        if own is not None:
            try:  # it removes the file once the shadow's state is in a checkpoint
                await self._until(lambda: not ready[0].exists(), [new], request)
            except AsyncRLError as error:
                await self._end(its)
                self._begin(own)
                raise AsyncRLError(f"{error}; a learner with the run's own settings and state goes on") from None
        self._overrides = overrides
        self._fleet.say(f"{new.name} has taken over")
        for one in its:
            if not one.is_kept_running:  # it died just now: it starts again, as one that is resumed
                await one.gone.wait()
        self._begin(its)
        with contextlib.suppress(OSError):
            request.answer(SwapStatus(phase="done"))

    async def _drain(self, old: ChildProcess) -> None:
        """Wait until the present learner has ended its step and left, with its ranks."""
        ranks = self._fleet.ranks_of(old)
        for rank in ranks:
            rank.is_leaving = True
            rank.no_restart.set()
        old.drain()
        await old.gone.wait()
        for rank in ranks:
            with contextlib.suppress(TimeoutError):  # it was told that the learner ends
                await asyncio.wait_for(rank.gone.wait(), RANK_SECONDS)
        await self._end(ranks)

    def _begin(self, its: Sequence[ChildProcess]) -> None:
        """Make it the learner of the run."""
        for one in its:
            one.is_standby = False
            if not one.is_kept_running:
                self._fleet.add(one)

    async def _until(self, condition: Callable[[], bool], its: Sequence[ChildProcess], request: SwapRequest) -> None:
        """Raises AsyncRLError if one of the processes ends before, or nobody waits for the swap any more."""
        while not condition():
            if gone := _gone(its):
                raise AsyncRLError(f"the new learner has ended; see {self._directory}/logs/{gone[0]}.log")
            if request.is_withdrawn:
                raise AsyncRLError("`asyncrl swap` was ended")
            await asyncio.sleep(LOOK_SECONDS)

    async def _end(self, its: Sequence[ChildProcess]) -> None:
        for one in its:
            one.no_restart.set()
            one.signal(signal.SIGKILL)
        for one in its:
            await one.gone.wait()

    def _taken(self) -> frozenset[int]:
        of_others = (one for one in self._fleet.children if one.spec.role not in (LEARNER, LEARNER_RANK))
        return frozenset(gpu for one in of_others for gpu in one.spec.gpus)
