"""The HTTP entry of `asyncrl serve` for outside producers: programs that play samples of a run and report the outcome.

    POST /sessions               start a session; returns base_url and key of a model server and the task; 204 if none
    POST /sessions/ID/end        {"reward": 1.0, ...} (an Outcome, harnesses/protocol.py)
    POST /sessions/ID/abandon    {"reason": "..."}: the sample fails
    GET  /sessions               counts
    GET  /offers                 a WebSocket for the rollout workers' harness "outside", one per sample

Each request must show the key ("Authorization: Bearer KEY"). A session is one sample of a prompt group. Samples of the
oldest group go first, so that groups complete. Producers send their model requests directly to the worker, not through
the entry. An entry that dies loses nothing: workers offer their samples again and say which ones have started.
Tests: tests/unit/environments/agent/test_entry.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import WSMsgType, web

from asyncrl.environments.agent.harnesses.outside import HEARTBEAT_SECONDS
from asyncrl.environments.agent.harnesses.protocol import outcome_of

MOST_BYTES: Final = 16 * 2**20
LONGEST_WAIT_SECONDS: Final = 60.0
"""Longest time that one request may wait for a session."""
TAKEN_SECONDS: Final = 30.0
"""Longest time that a worker may need to accept an outcome."""
MOST_REMEMBERED: Final = 100_000
"""Number of finished sessions to remember, to tell a late producer why its session is over."""
ENDED: Final = "ended"

log: Final = logging.getLogger("asyncrl.serve")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """One sample that a worker offers, its connection, and whether a producer has started it."""

    id: str
    task: Mapping[str, Any]
    endpoint: Mapping[str, Any]
    socket: web.WebSocketResponse
    is_started: bool
    end: str = ""
    """How the session is being ended: ENDED or "abandoned"; "" if it is not."""
    is_taken: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """The worker has taken the end, or is gone."""

    @property
    def key(self) -> tuple[int, int]:
        return self.task["group_id"], self.task["index"]


class Entry:
    """Gives workers' samples to producers, and returns the outcomes to the workers."""

    def __init__(self, *, host: str, port: int, key: str) -> None:
        """port   0: any free port"""
        self._host, self._port, self._key = host, port, key.encode()
        self._offers: dict[str, Offer] = {}
        self._over: OrderedDict[str, str] = OrderedDict()
        """Why each finished session is over."""
        self._arrived = asyncio.Condition()
        self.counts: Counter[str] = Counter()
        """Number of sessions that were started, ended, abandoned, or over (out of time, or their worker is gone)."""
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Entry]:
        """Listen while the context is open. Raises OSError if the address is not available."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._check_key])
        app.router.add_get("/sessions", self._count)
        app.router.add_post("/sessions", self._start)
        app.router.add_post("/sessions/{id}/end", self._end)
        app.router.add_post("/sessions/{id}/abandon", self._abandon)
        app.router.add_get("/offers", self._hold_offer)
        app.on_shutdown.append(self._hang_up)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            yield self
        finally:
            await runner.cleanup()

    # -- producers ---------------------------------------------------------------------------------------------------

    async def _start(self, request: web.Request) -> web.Response:
        """consumes: offers    waits for: an offer that fits    woken by: workers"""
        wish = await _body(request)
        seconds = wish.get("wait_seconds", 0)
        if not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_WAIT_SECONDS:
            raise _error(400, f"wait_seconds must be from 0 to {LONGEST_WAIT_SECONDS:g}, got {seconds!r}")
        if not isinstance(wish.get("metadata", {}), dict):
            raise _error(400, "metadata must be an object with values that the task's metadata must have")
        if unknown := sorted(wish.keys() - {"wait_seconds", "metadata", "group_id"}):
            raise _error(400, f"unknown {unknown[0]!r}; there are wait_seconds, metadata and group_id")
        try:
            async with asyncio.timeout(seconds), self._arrived:
                while (offer := self._find_offer(wish)) is None:
                    await self._arrived.wait()
        except TimeoutError:
            return web.Response(status=204)
        if request.transport is None or request.transport.is_closing():  # the producer is gone
            return web.Response(status=204)
        offer.is_started = True
        try:
            await offer.socket.send_json({"started": True})
        except OSError:
            offer.is_started = False
            raise _error(503, "its worker has just gone; ask again") from None
        self.counts["started"] += 1
        return web.json_response({"session": offer.id, **offer.endpoint, "task": offer.task})

    def _find_offer(self, wish: Mapping[str, Any]) -> Offer | None:
        """Return a waiting offer of the oldest group that fits the wish."""
        fitting = (offer for offer in self._offers.values() if not offer.is_started and _fits(offer, wish))
        return min(fitting, key=lambda offer: offer.key, default=None)

    async def _end(self, request: web.Request) -> web.Response:
        said = await _body(request)
        if "reward" not in said:
            raise _error(400, 'no "reward": give a number, or null to leave it to the run\'s reward function')
        try:
            outcome = outcome_of(said).as_json()
        except ValueError as error:
            raise _error(400, str(error)) from None
        return await self._close(request.match_info["id"], {"outcome": outcome}, how=ENDED)

    async def _abandon(self, request: web.Request) -> web.Response:
        reason = " ".join(str((await _body(request)).get("reason", "")).split())[:300] or "its producer gave no reason"
        return await self._close(request.match_info["id"], {"abandoned": reason}, how="abandoned")

    async def _close(self, session: str, message: Mapping[str, Any], *, how: str) -> web.Response:
        """Send the end of a session to its worker, and respond once the worker has accepted it. Safe to repeat."""
        if self._over.get(session) == how:
            return web.json_response({"session": session, "state": how})
        offer = self._offers.get(session)
        if offer is None or not offer.is_started:
            if session in self._over:
                raise _error(410, f"this session is over: {self._over[session]}")
            raise _error(404, "no such session; if its worker has just lost its connection, retry in a moment")
        if offer.end not in ("", how):
            raise _error(410, f"this session is over: {offer.end}")
        offer.end = how
        with contextlib.suppress(OSError, TimeoutError):
            await offer.socket.send_json(message)
            await asyncio.wait_for(offer.answered.wait(), TAKEN_SECONDS)
        if not offer.is_taken:
            offer.end = ""
            raise _error(503, "its worker did not take it; ask again")
        self._end_taken(offer)
        return web.json_response({"session": session, "state": how})

    async def _count(self, request: web.Request) -> web.Response:
        playing = sum(offer.is_started for offer in self._offers.values())
        names = ("started", ENDED, "abandoned", "over")
        said = {"waiting": len(self._offers) - playing, "playing": playing}
        return web.json_response({**said, **{name: self.counts[name] for name in names}})

    # -- workers -----------------------------------------------------------------------------------------------------

    async def _hold_offer(self, request: web.Request) -> web.StreamResponse:
        """Hold one sample's offer until its worker disconnects.

        consumes: the worker's messages    woken by: the worker
        """
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=0)
        await socket.prepare(request)
        offer: Offer | None = None
        why = "its worker is gone; the sample is made again, as another session"
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                said = json.loads(message.data)
                if "taken" in said and offer is not None:
                    offer.is_taken = True
                    self._end_taken(offer)  # at once: the worker may leave before _close goes on
                    offer.answered.set()
                elif "over" in said:
                    why = str(said["over"])
                elif "task" in said:
                    offer = Offer(socket=socket, **said)
                    async with self._arrived:
                        self._offers[offer.id] = offer
                        self._arrived.notify_all()
        finally:
            if offer is not None:
                self._forget(offer, why)
        return socket

    def _end_taken(self, offer: Offer) -> None:
        """Remember, once, how a session ended whose worker has accepted it."""
        if offer.end and self._over.get(offer.id) != offer.end:
            self._remember(offer.id, offer.end)
            self.counts[offer.end] += 1

    def _forget(self, offer: Offer, why: str) -> None:
        offer.answered.set()
        if self._offers.get(offer.id) is not offer:  # the worker has reconnected
            return
        del self._offers[offer.id]
        if offer.is_started and not offer.is_taken:
            self._remember(offer.id, why)
            self.counts["over"] += 1
            log.warning("session %s of group %d is over: %s", offer.id, offer.task["group_id"], why)

    def _remember(self, session: str, why: str) -> None:
        self._over[session] = why
        while len(self._over) > MOST_REMEMBERED:
            self._over.popitem(last=False)

    async def _hang_up(self, app: web.Application) -> None:
        """Close all worker connections. Runs after the server stops listening; else workers would reconnect at once."""
        for offer in list(self._offers.values()):  # a copy: closing a socket removes its offer
            await offer.socket.close()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(shown.encode(errors="replace"), self._key):
            raise _error(401, "missing or wrong key: send Authorization: Bearer KEY of the key file of asyncrl serve")
        return await handler(request)


def _fits(offer: Offer, wish: Mapping[str, Any]) -> bool:
    has = offer.task["metadata"]
    if wish.get("group_id", offer.task["group_id"]) != offer.task["group_id"]:
        return False
    return all(name in has and has[name] == value for name, value in wish.get("metadata", {}).items())


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.read() or b"{}")
        json.dumps(found, ensure_ascii=False).encode()  # an unpaired surrogate is not valid text
    except (ValueError, RecursionError) as error:
        raise _error(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _error(400, "the body must be an object")
    return found


def _error(status: int, problem: str) -> web.HTTPException:
    kinds = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 404: web.HTTPNotFound, 410: web.HTTPGone}
    kind = kinds.get(status, web.HTTPServiceUnavailable)
    return kind(text=json.dumps({"error": problem}), content_type="application/json")
