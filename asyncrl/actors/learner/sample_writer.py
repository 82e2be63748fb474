"""Makes text of recorded groups and writes it down, in a thread of its own.

    recorder -> writer -> its thread: decode, write        sinks that show samples take them from it

The learner waits for none of it. When the thread is behind, groups are left out, and it says how many.

Tests: tests/actors/learner/test_sample_recorder.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from asyncrl.policies.groups.sample import Decode, GroupSample, decoded
from asyncrl.state.samples import SampleFile

MOST_WAITING: Final = 64
"""Groups that wait to be decoded."""
MOST_KEPT: Final = 256
"""Groups for sinks that nobody has taken."""
WRITTEN_SECONDS: Final = 10.0
"""A disk or a tokenizer that stands still holds up nobody for longer."""

log = logging.getLogger("asyncrl.learner")


class SampleWriter:
    """
    load_decode   gives the function that makes text of tokens; called in the writer's thread
    most_waiting  groups that may wait to be decoded
    most_kept     groups for sinks that nobody has taken
    """

    def __init__(
        self,
        file: SampleFile,
        *,
        load_decode: Callable[[], Decode],
        most_waiting: int = MOST_WAITING,
        most_kept: int = MOST_KEPT,
    ) -> None:
        self._file = file
        self._load_decode = load_decode
        self._decode: Decode | None = None
        self._room = threading.Semaphore(most_waiting)
        self._left_out = 0
        self._is_said = False
        self._recent: deque[GroupSample] = deque(maxlen=most_kept)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")

    def write(self, make: Callable[[], GroupSample]) -> None:
        """What ``make`` gives is decoded and written, soon. ``make`` is called in the writer's thread."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._work, make)
            return
        self._left_out += 1
        self._file.num_lost += 1
        if self._left_out == 1:
            log.warning("%s: groups are left out: they come faster than their text can be decoded", self._file.name)

    def lose(self) -> None:
        """One that was to be written never came."""
        self._file.num_lost += 1

    def take(self) -> Sequence[GroupSample]:
        """Those decoded since this was last asked, the newest ``most_kept`` of them."""
        taken = []
        while self._recent:
            taken.append(self._recent.popleft())
        return taken

    async def written(self) -> None:
        """Until those that were given by now are decoded and written, but no longer than WRITTEN_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_SECONDS):
                await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def stop(self) -> None:
        """What waits is written first."""
        await asyncio.to_thread(self._thread.shutdown, wait=True)
        if self._left_out:
            log.warning("%s: %d groups in all were left out", self._file.name, self._left_out)

    def _work(self, make: Callable[[], GroupSample]) -> None:
        try:
            if self._decode is None:
                self._decode = self._load_decode()
            sample = decoded(make(), self._decode)
            self._recent.append(sample)
            self._file.write(sample)
            self._is_said = False
        except Exception as error:  # whatever a tokenizer or a disk raises: an aid to people ends no run
            self._file.num_lost += 1
            if not self._is_said:
                log.warning("%s: a group is left out: %s: %s", self._file.name, type(error).__name__, error)
            self._is_said = True
        finally:
            self._room.release()
