"""The board's HTTP server: the page, recorded data of runs, and a stream of changes.

    GET /                       the page; its files are under /static/
    GET /api/runs               an overview of every run
    GET /api/runs/N/curves      ?name=A&name=B: [steps, values] of each metric
    GET /api/runs/N/lanes       the activity of each actor
    GET /api/runs/N/actors/NAME the last heartbeat of an actor
    GET /api/runs/N/groups      ?fate=&text=&order=&has_text=&limit=: rows of the newest groups
    GET /api/runs/N/groups/ID   one group, with the text of each token
    GET /api/stream             server-sent events: changes (run_state.py), with the number of their run

It answers only GET, and changes nothing. Tests: tests/integration/board/test_server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import math
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from asyncrl.board.feed import Browser, Hub, Readers, RunFeed, as_json
from asyncrl.board.group_index import rows_as_json
from asyncrl.board.guard import HEADERS, Guard, Handler
from asyncrl.board.lanes import STATES
from asyncrl.board.run_state import RunState
from asyncrl.board.watched_run import WatchedRun
from asyncrl.errors import ConfigError, ImageError
from asyncrl.images.reading import read_info
from asyncrl.images.store import FOLDER, ImageStore

STATIC: Final = Path(__file__).parent / "static"
QUIET_SECONDS: Final = 15.0
"""Interval of keep-alive messages on a stream without changes."""
STALLED_SECONDS: Final = 60.0
"""Time limit for a browser to accept sent data. After it, the connection is closed; the browser reconnects and reloads
the state."""
MOST_NAMES: Final = 200
"""Maximum number of curves per request."""


class Board:
    """The board of some runs. ``async with board.serving()`` serves at ``board.url`` until the context is left."""

    def __init__(self, runs: Sequence[WatchedRun], *, host: str, port: int, token: str = "") -> None:
        self.hub = Hub()
        self.feeds = [
            RunFeed(run, tell=lambda change, number=number: self.hub.broadcast(number, change))  # type: ignore[misc]
            for number, run in enumerate(runs)
        ]
        self._host, self._port, self._token = host, port, token
        self._guard = Guard(host=host, token=token)
        self._is_closing = asyncio.Event()
        self._listing = Readers("list")
        self._opening = Readers("open", threads=1)  # two threads that import transformers at once break its modules
        self.port = 0

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}/" + (f"?token={quote(self._token, safe='')}" if self._token else "")

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Board]:
        """Serve the board. Raises ConfigError if the port is taken or the address is not local."""
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            try:
                await site.start()
            except OSError as error:
                raise _cannot_listen(error, self._host, self._port) from None
            self.port = runner.addresses[0][1]
            async with asyncio.TaskGroup() as group:
                tasks = []
                for feed in self.feeds:
                    await feed.begin()
                    tasks.append(group.create_task(feed.run()))
                yield self
                self._is_closing.set()
                for task in tasks:
                    task.cancel()
        finally:
            self._is_closing.set()
            await runner.cleanup()
            self._listing.close()
            self._opening.close()

    def _application(self) -> web.Application:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        application = web.Application(middlewares=[guarded], client_max_size=1024)
        application.on_response_prepare.append(_with_headers)
        application.add_routes(
            [
                web.get("/", self._page),
                web.get("/api/runs", self._runs),
                web.get("/api/runs/{run}/curves", self._curves),
                web.get("/api/runs/{run}/lanes", self._lanes),
                web.get("/api/runs/{run}/actors/{name}", self._actor),
                web.get("/api/runs/{run}/groups", self._groups),
                web.get("/api/runs/{run}/groups/{group}", self._group),
                web.get("/api/runs/{run}/images/{digest}", self._image),
                web.get("/api/stream", self._stream),
                web.static("/static", STATIC),
            ]
        )
        return application

    # -- what it answers ---------------------------------------------------------------------------------------------

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        return _json({"states": STATES, "runs": [feed.state.overview() for feed in self.feeds]})

    async def _curves(self, request: web.Request) -> web.StreamResponse:
        return _json(self._state(request).curves_named(request.query.getall("name", [])[:MOST_NAMES]))

    async def _lanes(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._feed(request).lanes(self._listing))

    async def _actor(self, request: web.Request) -> web.StreamResponse:
        beat = self._state(request).beats.get(request.match_info["name"])
        if beat is None:
            raise web.HTTPNotFound(text="no such actor is up\n")
        return _json(_finite(dataclasses.asdict(beat)))

    async def _groups(self, request: web.Request) -> web.StreamResponse:
        asked = request.query
        groups = await self._feed(request).groups(self._listing)
        rows, total = await self._listing.run(
            groups.rows,
            fate=asked.get("fate", ""),
            text=asked.get("text", "")[:200],
            order=asked.get("order", "newest"),
            has_text=asked.get("has_text") == "1",
            limit=int(limit) if (limit := asked.get("limit", "")[:9]).isdecimal() else 100,
        )
        return _json({"rows": _finite(list(rows_as_json(rows))), "total": total})

    async def _group(self, request: web.Request) -> web.StreamResponse:
        number = request.match_info["group"]
        if not number.isdecimal() or len(number) > 16:
            raise web.HTTPNotFound(text="no such group\n")
        groups = await self._feed(request).groups(self._listing)
        try:
            opened = await self._opening.run(groups.open, int(number))
        except ConfigError as error:
            raise web.HTTPNotFound(text=f"{error}\n") from None
        return _json(_finite(opened.sample.as_shown() | {"texts": opened.texts, "problem": opened.problem}))

    async def _image(self, request: web.Request) -> web.StreamResponse:
        """An image of the run's folder, by its SHA-256."""
        folder, digest = self._feed(request).watched.directory, request.match_info["digest"]
        if folder is None or not re.fullmatch("[0-9a-f]{64}", digest):
            raise web.HTTPNotFound(text="no such image\n")
        try:
            data = await self._opening.run(ImageStore(folder=folder / FOLDER).get, digest)
            return web.Response(body=data, content_type=read_info(data).mime_type)
        except ImageError as error:
            raise web.HTTPNotFound(text=f"this image cannot be shown: {error}\n") from None

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        browser = self.hub.join()
        if browser is None:
            raise web.HTTPServiceUnavailable(text="asyncrl board: too many browsers look at it\n")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await answer.prepare(request)
            await answer.write(b": here\n\n")
            while not self._is_closing.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(QUIET_SECONDS):
                        await self._news_or_closing(browser)
                async with asyncio.timeout(STALLED_SECONDS):
                    await answer.write(browser.take() or b": here\n\n")
        except ConnectionError:  # the browser is gone; a new connection starts with the complete state
            pass
        except TimeoutError:  # a message may be half sent, so the stream cannot continue
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.hub.leave(browser)
        return answer

    async def _news_or_closing(self, browser: Browser) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (browser.has_news, self._is_closing)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _state(self, request: web.Request) -> RunState:
        return self._feed(request).state

    def _feed(self, request: web.Request) -> RunFeed:
        number = request.match_info["run"]
        if not number.isdecimal() or len(number) > 9 or int(number) >= len(self.feeds):
            raise web.HTTPNotFound(text="no such run\n")
        return self.feeds[int(number)]


async def _with_headers(request: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.update(HEADERS)


def _json(value: Any) -> web.Response:
    answer = web.Response(body=as_json(value), content_type="application/json")
    answer.enable_compression()
    return answer


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent with None."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port {port}: is taken on {host}; give another, or --port 0 for any that is free")
    if error.errno == errno.EACCES:
        return ConfigError(
            f"--port {port}: is not for this user; give one above 1023, or --port 0 for any that is free"
        )
    return ConfigError(f"--host {host}: cannot be listened on: {error.strerror or error}")
