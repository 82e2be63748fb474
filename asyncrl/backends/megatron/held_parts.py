"""Parts of an export stay in the ranks that made them; the leader sends orders to process them there.

Orders and answers use a separate channel to each rank, with threads at both ends, so a rank answers while it trains. A
rank keeps a part until the leader drops its last handle; the rank learns this with the next export.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import threading
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.backends.megatron.channel import Channel
from asyncrl.errors import BackendError, WeightsError
from asyncrl.messages import codec
from asyncrl.tensors.snapshot import PartWorker, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder:
    """export: number of the export that the part belongs to;  worker: MODULE:CLASS of a PartWorker"""

    number: int
    export: int
    worker: str
    order: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswer:
    """problem: why there is no answer"""

    number: int
    answer: bytes = b""
    problem: str = ""


class HeldParts:
    """A rank's parts of the exports that are still in use."""

    def __init__(self) -> None:
        self._parts: dict[int, Snapshot] = {}
        self._newest = -1
        self._changed = threading.Condition()
        self._workers: dict[str, PartWorker] = {}

    def forget(self, *, but: Collection[int]) -> None:
        """Drop parts of exports not in ``but``. Called before the next export, so it can reuse their memory."""
        with self._changed:
            self._parts = {export: part for export, part in self._parts.items() if export in but}

    def hold(self, export: int, part: Snapshot) -> None:
        with self._changed:
            self._parts[export], self._newest = part, export
            self._changed.notify_all()

    def serve(self, channel: Channel) -> None:
        """Execute orders from the channel until it closes."""
        sending = threading.Lock()

        def answer(order: PartOrder) -> None:
            try:
                answered = PartAnswer(number=order.number, answer=self._obey(order))
            except Exception as error:  # raised by a weight channel's code; the leader raises it again
                problem = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
                answered = PartAnswer(number=order.number, problem=problem)
            with sending, contextlib.suppress(OSError):  # if the leader is gone, the command channel reports it
                channel.send_bytes(codec.encode(answered))

        while True:
            try:
                data = channel.recv_bytes()
            except (EOFError, OSError):
                return
            # This loop does not wait for the answer: a collective with an engine that has died may never return.
            order = codec.decode(data, PartOrder)
            threading.Thread(target=answer, args=(order,), name=f"weights-part-{order.number}", daemon=True).start()

    def _obey(self, order: PartOrder) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._newest >= order.export)
            part = self._parts.get(order.export)
            if order.worker not in self._workers:
                self._workers[order.worker] = _worker(order.worker)
            worker = self._workers[order.worker]
        if part is None:
            raise WeightsError(f"this rank no longer holds a part of export {order.export}")
        return worker(part, order.order)


def _worker(address: str) -> PartWorker:
    """Create the PartWorker at ``address``. Raises WeightsError for anything else, without calling it."""
    module, _, name = address.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not (isinstance(found, type) and issubclass(found, PartWorker)):
        raise WeightsError(f"{address} is not a PartWorker")
    return found()


class PartLink:
    """The leader's end of the channel to one rank."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self._channel = channel
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[bytes]] = {}
        self._is_closed = False
        threading.Thread(target=self._listen, name=f"weights-rank-{rank}", daemon=True).start()

    def ask(self, export: int, worker: type[PartWorker], order: bytes) -> bytes:
        """Send an order and wait for its answer. Raises WeightsError, or BackendError when the rank is gone."""
        address = f"{worker.__module__}:{worker.__qualname__}"
        answer: Future[bytes] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            asked = PartOrder(number=number, export=export, worker=address, order=order)
            try:
                if self._is_closed:
                    raise EOFError
                self._channel.send_bytes(codec.encode(asked))
            except (EOFError, OSError):
                raise BackendError(f"learner rank {self.rank} is gone with its part of the weights") from None
        return answer.result()

    def _listen(self) -> None:
        while True:
            try:
                answer = codec.decode(self._channel.recv_bytes(), PartAnswer)
            except (EOFError, OSError):
                break
            waiting = self._waiting.pop(answer.number)
            if answer.problem:
                waiting.set_exception(WeightsError(f"learner rank {self.rank}: {answer.problem}"))
            else:
                waiting.set_result(answer.answer)
        with self._lock:
            self._is_closed = True
            for waiting in self._waiting.values():
                waiting.set_exception(BackendError(f"learner rank {self.rank} is gone with its part of the weights"))
            self._waiting.clear()


class RemotePart:
    """See tensors.snapshot.Part."""

    def __init__(self, link: PartLink, export: int) -> None:
        self._link = link
        self.rank, self.export = link.rank, export

    def run(self, worker: type[PartWorker], order: bytes) -> bytes:
        return self._link.ask(self.export, worker, order)
