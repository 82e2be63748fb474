"""Decodes recorded groups and writes them to a file, in a thread of its own.

    recorder -> writer -> its thread: decode, write        sinks that show samples take them from the writer

The learner never waits for this. When the thread falls behind, groups are left out, and the writer logs how many.

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

from asyncrl.actors.learner.sample_files import SampleFile
from asyncrl.policies.groups.sample import Decode, GroupSample, decoded

MOST_WAITING: Final = 64
"""Groups that may wait to be decoded."""
MOST_KEPT: Final = 256
"""Decoded groups kept for sinks that have not taken them yet."""
WRITTEN_SECONDS: Final = 10.0
"""A hanging disk or tokenizer delays callers of ``written`` no longer than this."""

log = logging.getLogger("asyncrl.learner")


class SampleWriter:
    """
    load_decode   returns the function that decodes tokens; called in the writer's thread
    most_waiting  limit of groups that wait to be decoded
    most_kept     limit of decoded groups that sinks have not taken yet
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
        """Decode and write the result of ``make`` soon. ``make`` is called in the writer's thread."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._work, make)
            return
        self._left_out += 1
        self._file.num_lost += 1
        if self._left_out == 1:
            log.warning("%s: groups are left out: they come faster than their text can be decoded", self._file.name)

    def lose(self) -> None:
        """Count a group that should have been written but was not available."""
        self._file.num_lost += 1

    def take(self) -> Sequence[GroupSample]:
        """Return groups decoded since the last call, at most the newest ``most_kept``."""
        taken = []
        while self._recent:
            taken.append(self._recent.popleft())
        return taken

    async def written(self) -> None:
        """Wait until all groups given so far are decoded and written, but no longer than WRITTEN_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_SECONDS):
                await asyncio.wrap_future(self._thread.submit(lambda: None))

    async def stop(self) -> None:
        """Stop after writing all waiting groups."""
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
        except Exception as error:  # a tokenizer or disk may raise anything, and samples must not end a run
            self._file.num_lost += 1
            if not self._is_said:
                log.warning("%s: a group is left out: %s: %s", self._file.name, type(error).__name__, error)
            self._is_said = True
        finally:
            self._room.release()
