"""Record an arm from outside while it runs: the load of each server, and the heartbeats of each actor on the bus.

Takes a sample every 0.25 s, as a JSON object:

    time        Unix seconds
    published   newest announced policy version; -1 before the first
    engines     for each server {running, waiting, version}; null if it did not answer
    actors      for each actor its heartbeat (at most 2 s old): waits_for, waiting_seconds, version, and its numbers
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError
from asyncrl.messages import Heartbeat
from asyncrl.messages.topics import ACTORS, WEIGHTS
from benchmarks.gpu.arm import BusAddress
from benchmarks.gpu.fleet import ask, running_and_waiting

Sample = dict[str, Any]

SAMPLE_SECONDS: Final = 0.25


class Recorder:
    """``with Recorder(...) as recorder``: records in its own thread, to ``recorder.samples``.

    run   the arm's configuration; the recorder joins its bus with the same limits
    path  file for the samples as JSON lines
    """

    def __init__(self, urls: Sequence[str], *, bus: BusAddress, run: RunConfig, path: Path) -> None:
        self._urls = urls
        self._address = bus
        self._run = run
        self._path = path
        self.samples: list[Sample] = []
        self.problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="recorder", daemon=True)

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5.0)
        if self.problem:
            print(f"recorder: {self.problem}; idle shares and pauses are of what it saw", flush=True)

    def _live(self) -> None:
        try:
            asyncio.run(self._record())
        except (AsyncRLError, OSError) as error:
            self.problem = f"stopped: {type(error).__name__}: {error}"

    async def _record(self) -> None:
        bus = await JetStreamBus.connect(
            self._address.url,
            run=self._run.run.name,
            token=self._address.token,
            max_prompts=self._run.window,
            max_log_bytes=self._run.bus.max_log_bytes,
            ack_seconds=self._run.bus.ack_seconds,
            storage=self._run.bus.store,
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._path.open("a") as file:
                while not self._stop.is_set():
                    began = time.monotonic()
                    sample = await self._sample(bus)
                    self.samples.append(sample)
                    file.write(json.dumps(sample) + "\n")
                    await asyncio.sleep(max(0.0, SAMPLE_SECONDS - (time.monotonic() - began)))
        finally:
            await bus.close()

    async def _sample(self, bus: Bus) -> Sample:
        now = time.time()
        engines = await asyncio.gather(*(asyncio.to_thread(engine_state, url) for url in self._urls))
        beats, versions = await bus.states(ACTORS), await bus.states(WEIGHTS)
        return {
            "time": now,
            "published": max((version.policy_version for version in versions.values()), default=-1),
            "engines": engines,
            "actors": {name: _actor(beat) for name, beat in beats.items()},
        }


def engine_state(url: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, KeyError):  # the sample has null; the next one retries
        running, waiting = running_and_waiting(url)
        version = str(ask(url, "/model_info", seconds=2.0).get("weight_version", ""))
        return {"running": running, "waiting": waiting, "version": version}
    return None


def _actor(beat: Heartbeat) -> dict[str, Any]:
    return {
        "role": beat.role,
        "waits_for": beat.waits_for,
        "waiting_seconds": beat.waiting_seconds,
        "version": beat.policy_version,
        "numbers": beat.numbers,
    }
