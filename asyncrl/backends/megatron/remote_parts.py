"""Parts of an export stay in the ranks that made them; rank 0 sends commands to process them there.

A rank answers in threads of its own, while it trains. It keeps a part until rank 0 drops its last handle, and learns
this with the next export.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from asyncrl.backends.megatron.rank_group import PART, RankGroup
from asyncrl.errors import BackendError, WeightsError
from asyncrl.messages import codec
from asyncrl.tensors.snapshot import PartWorker, Snapshot

_NUMBERS: Final = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommand:
    """export: number of the export that the part belongs to;  worker: MODULE:CLASS of a PartWorker"""

    number: int
    export: int
    worker: str
    command: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswer:
    """problem: why there is no answer"""

    answer: bytes = b""
    problem: str = ""


class RemotePart:
    """Rank 0's handle of another rank's part of an export; see tensors.snapshot.Part."""

    def __init__(self, group: RankGroup, rank: int, export: int) -> None:
        self._group = group
        self.rank = rank
        self.export = export

    def run(self, worker: type[PartWorker], command: bytes) -> bytes:
        number = next(_NUMBERS)
        address = f"{worker.__module__}:{worker.__qualname__}"
        asked = PartCommand(number=number, export=self.export, worker=address, command=command)
        try:
            self._group.send(codec.encode(asked), self.rank, PART)
            answer = codec.decode(self._group.receive(self.rank, PART + number), PartAnswer)
        except RuntimeError:
            raise BackendError(f"learner rank {self.rank} is gone with its part of the weights") from None
        if answer.problem:
            raise WeightsError(f"learner rank {self.rank}: {answer.problem}")
        return answer.answer


class ExportedParts:
    """A rank's parts of the exports that are still in use."""

    def __init__(self) -> None:
        self._parts: dict[int, Snapshot] = {}
        self._workers: dict[str, PartWorker] = {}
        self._creating = threading.Lock()

    def keep_only(self, exports: Collection[int]) -> None:
        """Drop parts of exports not in ``exports``. Called before the next export, so it can reuse their memory."""
        self._parts = {export: part for export, part in self._parts.items() if export in exports}

    def add(self, export: int, part: Snapshot) -> None:
        self._parts = self._parts | {export: part}

    def serve(self, group: RankGroup) -> None:
        """Execute rank 0's commands in threads until it says goodbye, or is gone."""

        def listen() -> None:
            with contextlib.suppress(RuntimeError):
                while data := group.receive(0, PART):
                    command = codec.decode(data, PartCommand)
                    # The next command does not wait: a collective with an engine that has died may never return.
                    name = f"weights-part-{command.number}"
                    threading.Thread(target=self._answer, args=(group, command), name=name, daemon=True).start()

        threading.Thread(target=listen, name="weights-parts", daemon=True).start()

    def _answer(self, group: RankGroup, command: PartCommand) -> None:
        try:
            answer = PartAnswer(answer=self._execute(command))
        except Exception as error:  # raised by a weight channel's code; rank 0 raises it again
            problem = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
            answer = PartAnswer(problem=problem)
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            group.send(codec.encode(answer), 0, PART + command.number)

    def _execute(self, command: PartCommand) -> bytes:
        part = self._parts.get(command.export)
        if part is None:
            raise WeightsError(f"this rank no longer holds a part of export {command.export}")
        with self._creating:
            if command.worker not in self._workers:
                self._workers[command.worker] = _create_worker(command.worker)
        return self._workers[command.worker](part, command.command)


def _create_worker(address: str) -> PartWorker:
    """Create the PartWorker at ``address``. Raises WeightsError for anything else, without calling it."""
    module, _, name = address.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, PartWorker)):
        raise WeightsError(f"{address} is not a PartWorker")
    return found()
