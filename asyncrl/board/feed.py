"""Keeps the board's state of a run up to date: rows from its folder, heartbeats and events from its bus.

It changes nothing of the run, and follows a run that starts, moves or ends. Tests: tests/integration/board/.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from aiohttp import web

from asyncrl.audit.run_observer import POLL_SECONDS, RunObserver, RunView
from asyncrl.board.file_tail import RowTail
from asyncrl.board.group_index import GroupIndex
from asyncrl.board.lanes import Activity, activity_of
from asyncrl.board.run_state import Change, RunState
from asyncrl.board.watched_run import WatchedRun, row_of
from asyncrl.errors import AsyncRLError, ConfigError, NoSuchRun

# -- changes for every browser -----------------------------------------------------------------------------------------

MOST_WAITING: Final = 256
"""Maximum number of messages queued for one browser."""
MOST_BROWSERS: Final = 64


class Hub:
    def __init__(self) -> None:
        self.browsers: set[Browser] = set()

    def broadcast(self, run: int, change: dict[str, Any]) -> None:
        """Send a change of one run to all browsers."""
        if not self.browsers:
            return
        line = encoded({"run": run, **change})
        for browser in self.browsers:
            browser.put(line)

    def join(self) -> Browser | None:
        """Add a browser until ``leave``; None if there are too many."""
        if len(self.browsers) >= MOST_BROWSERS:
            return None
        browser = Browser()
        self.browsers.add(browser)
        return browser

    def leave(self, browser: Browser) -> None:
        self.browsers.discard(browser)


class Browser:
    """The queue of one browser. ``has_news`` is set while it holds messages."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque()
        self.has_news = asyncio.Event()

    def put(self, line: bytes) -> None:
        if len(self._lines) >= MOST_WAITING:  # too slow: the browser reloads the state later
            self._lines.clear()
            line = encoded({"kind": "restart"})
        self._lines.append(line)
        self.has_news.set()

    def take(self) -> bytes:
        """Remove and return all queued messages; empty if there are none."""
        data = b"".join(self._lines)
        self._lines.clear()
        self.has_news.clear()
        return data


def encoded(message: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + as_json(message) + b"\n\n"


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


# -- threads that read files -------------------------------------------------------------------------------------------

T = TypeVar("T")

THREADS: Final = 2
MOST_ASKED: Final = 32
"""Maximum number of requests in progress or waiting; further requests are told to retry."""


class Readers:
    """name: of the threads"""

    def __init__(self, name: str, *, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"board-{name}")
        self._asked = 0

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Run ``function`` in a thread and return its result.

        Raises HTTPServiceUnavailable if too many requests wait.
        """
        if self._asked >= MOST_ASKED:
            text = "asyncrl board: too many browsers ask for this at once; ask again\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "2"})
        self._asked += 1
        try:
            work = functools.partial(function, *arguments, **named)
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._asked -= 1

    def close(self) -> None:
        """Close without waiting for reads in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)


# -- the feed of a run -------------------------------------------------------------------------------------------------

ROW_SECONDS: Final = 1.0
"""Seconds between reads of metrics.jsonl; nothing signals that it grew."""
AWAY_SECONDS: Final = 2.0
"""Seconds between checks for a run that is not up."""
NEWEST_EVENTS: Final = 5000

Tell = Callable[[Change], None]


class RunFeed:
    """tell: called in the event loop with each change of ``state``"""

    def __init__(self, run: WatchedRun, *, tell: Tell) -> None:
        self.watched = run
        self.state = RunState(run.name)
        self._tell = tell
        self._tail: RowTail | None = run.rows()
        self._groups = run.groups()
        self._refreshing = asyncio.Lock()
        self._newest: dict[str, int] = {}
        self._incarnation = 0.0  # newest incarnation of the learner in the rows

    async def begin(self) -> None:
        """Read what is already recorded."""
        while await self._read_rows():
            pass

    async def run(self) -> None:
        """consumes: actors, progress, metrics, events    waits for: the next look    woken by: the clock"""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_rows())
            group.create_task(self._follow_bus())

    async def groups(self, readers: Readers) -> GroupIndex:
        """Return the group index, refreshed. It is refreshed only on request."""
        async with self._refreshing:
            await readers.run(self._groups.refresh)
        return self._groups

    async def lanes(self, readers: Readers) -> dict[str, Any]:
        """Return what each actor did: from heartbeats if the run is up, otherwise from its recorded timeline."""
        if self.state.beats:
            return self.state.lanes_as_json()
        return self.state.lanes_as_json(await readers.run(self.watched.timeline))

    async def _follow_rows(self) -> None:
        while self._tail is not None:
            if not await self._read_rows():
                await asyncio.sleep(ROW_SECONDS)

    async def _read_rows(self) -> bool:
        """Read the next rows and return whether there may be more."""
        if self._tail is None:
            return False
        rows, has_more = await asyncio.to_thread(self._tail.read)
        incarnation = max((row.get("learner/incarnation", 0) for row in rows), default=0)
        if rows and (not self.state.steps or incarnation > self._incarnation):
            self._incarnation = incarnation
            await self._read_steps()
        self._say(self.state.add_rows(rows))
        return has_more

    async def _read_steps(self) -> None:
        """Read after how many steps the run is done, which a resumed learner may have changed."""
        self.state.steps = await asyncio.to_thread(self.watched.steps) or self.state.steps

    async def _follow_bus(self) -> None:
        while True:
            try:
                observer = self.watched.observer() if await asyncio.to_thread(self.watched.is_up) else None
                if observer is not None:
                    await self._watch(observer)
                    await self._read_steps()  # its learner may have ended before its first row
                why = ""
            except NoSuchRun:
                why = ""
            except ConfigError as error:  # the bus refuses the connection
                why = str(error)
            self._say(self.state.set_away(why, now=time.time()))
            await asyncio.sleep(AWAY_SECONDS)

    async def _watch(self, observer: RunObserver) -> None:
        """Follow the bus until the run is no longer up. Raises ConfigError."""
        events: asyncio.Task[None] | None = None
        address = ("", "")
        try:
            while True:
                view = await observer.poll()
                if observer.address != address and not observer.is_connecting:
                    address = observer.address
                    if events is not None:
                        events.cancel()
                    events = asyncio.create_task(self._follow_events())
                if self._tail is None:
                    self._take_newest(view)
                self._update(view)
                if observer.is_connecting and not await asyncio.to_thread(self.watched.is_up):
                    return
                await asyncio.sleep(POLL_SECONDS)
        finally:
            if events is not None:
                events.cancel()
                await asyncio.gather(events, return_exceptions=True)
            await observer.close()

    def _take_newest(self, view: RunView) -> None:
        """Add the newest step and the newest evaluation from the bus, if there is no folder to read them from."""
        for name, newest in (("step", view.metrics), ("evaluation", view.evaluation)):
            if newest is not None and newest.step != self._newest.get(name):
                self._newest[name] = newest.step
                self._say(self.state.add_rows([row_of(newest)]))

    def _update(self, view: RunView) -> None:
        seen = view.observation
        status = "finished" if seen.is_finished else "up"
        if seen.bus_silent:
            why = f": {seen.bus_problem}" if seen.bus_problem else ""
            status = f"its bus has not answered for {seen.bus_silent:.0f} s{why}"
        self._say(self.state.update(actors_of(view), findings=view.findings, status=status, now=time.time()))

    async def _follow_events(self) -> None:
        while True:
            # The status reports a bus that is away. Events from that time are read when the bus is back.
            with contextlib.suppress(AsyncRLError, OSError, TimeoutError):
                async with contextlib.aclosing(self.watched.events(newest=NEWEST_EVENTS)) as events:
                    async for event in events:
                        self._groups.note(event)
                        self._say(self.state.add_event(event))
            await asyncio.sleep(AWAY_SECONDS)

    def _say(self, changes: list[Change]) -> None:
        for change in changes:
            self._tell(change)


def actors_of(view: RunView) -> Mapping[str, tuple[Any, Activity]]:
    """Return name -> (heartbeat, current activity)."""
    return {
        name: (seen.beat, activity_of(seen.beat, silent_seconds=seen.seconds if seen.is_silent else 0.0))
        for name, seen in view.observation.actors.items()
    }
