"""The HTTP server of a worker's endpoint: finds a request's session, checks the request, and sends the answer.

The API key of a request selects its session. A wrong or missing key, or the key of a finished sample, gets 401. An
answer is streamed only once it is complete; until then, comments keep the connection open.
Tests: tests/unit/environments/agent/test_dialects.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Protocol

from aiohttp import web

from asyncrl.environments.agent.endpoint.dialects.anthropic import AnthropicMessages
from asyncrl.environments.agent.endpoint.dialects.chat import ChatCompletions
from asyncrl.environments.agent.endpoint.dialects.dialect import Dialect
from asyncrl.environments.agent.endpoint.dialects.responses import Responses
from asyncrl.environments.agent.endpoint.dialects.tokens import TokenIds
from asyncrl.environments.agent.endpoint.request import Json, ModelRequest, Refused
from asyncrl.environments.agent.endpoint.session import Record, Session
from asyncrl.environments.agent.endpoint.turns import Turn

MOST_BYTES: Final = 64 * 2**20
"""Size limit of a request. aiohttp's default is 1 MiB, too small for an agent's history."""
READ_SECONDS: Final = 60.0
"""Longest time for a request to arrive."""
KEEP_ALIVE_SECONDS: Final = 10.0
DIALECTS: Final[tuple[Dialect, ...]] = (ChatCompletions(), Responses(), AnthropicMessages(), TokenIds())

_log = logging.getLogger("asyncrl.endpoint")


class OnEnd(Protocol):
    def __call__(self, connection: object, *, is_reset: bool) -> None: ...


class EndpointServer:
    """The endpoint of one worker. It listens from its first session until it is closed."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, model: str = "policy") -> None:
        """port   0: any free port"""
        self._host, self._port = host, port
        self.model = model
        self.url = ""
        self._sessions: dict[str, Session] = {}
        self._last_answers: dict[object, tuple[Session, Record]] = {}
        """The answer that each connection sent last."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._starting = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[Session]:
        """Answer a session's requests while the context is open. Raises what ends the sample (Session.open)."""
        await self._start()
        self._sessions[session.key] = session
        try:
            async with session.open():
                try:
                    yield session
                finally:
                    del self._sessions[session.key]
        finally:
            self._sessions.pop(session.key, None)

    async def _start(self) -> None:
        async with self._starting:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=MOST_BYTES)
            for dialect in DIALECTS:
                for path in dialect.paths:
                    app.router.add_post(path, functools.partial(self._answer, dialect))
            for prefix in ("", "/v1"):
                app.router.add_get(f"{prefix}/models", self._models)
                app.router.add_post(f"{prefix}/messages/count_tokens", self._count)
            runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
            await runner.setup()
            assert (make := runner.server) is not None
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _Connection(make(), on_end=self._forget_connection), self._host, self._port, backlog=1024
            )
            host, port = self._listener.sockets[0].getsockname()[:2]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._runner = runner

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None and self._listener is not None:
            self._listener.close()
            await runner.cleanup()

    def _forget_connection(self, connection: object, *, is_reset: bool) -> None:
        session, record = self._last_answers.pop(connection, (None, None))
        if is_reset and session is not None and record is not None:
            session.take_back(record)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self._last_answers.pop(request.protocol, None)  # its client has read it
        try:
            session = self._session_of(request)
            raw = await _read(request)
        except Refused as error:
            return _json(dialect.refuse(error), status=error.status)
        try:
            record, model_request = await self._record(request, raw, dialect, session)
            if model_request.is_streamed:
                stream = await _stream(request, dialect, model_request, record, session)
                if record.is_received:
                    self._last_answers[request.protocol] = (session, record)
                return stream
            turns = await session.replies(record)
            reply = _json(dialect.write(model_request, turns, session))
            reply.headers.update(_overridden_header(model_request))
        except Refused as error:
            session.refusal = str(error)
            return _json(dialect.refuse(error), status=error.status)
        with contextlib.suppress(ConnectionError):  # the client hung up; the answer is kept for a retry
            await reply.prepare(request)
            await reply.write_eof()
            if request.transport is not None:  # else its connection has ended meanwhile
                session.receive(record)
                self._last_answers[request.protocol] = (session, record)
        return reply

    async def _record(
        self, request: web.Request, raw: bytes, dialect: Dialect, session: Session
    ) -> tuple[Record, ModelRequest]:
        try:
            model_request = dialect.read(_body(raw), session)
            record = await session.answer(
                request.path.encode() + b"\n" + raw,
                model_request,
                is_retry=_retries(request) > 0,
                is_listening=_listening(request),
            )
        except RecursionError:
            raise Refused("the body is nested too deeply") from None
        return record, model_request

    async def _count(self, request: web.Request) -> web.Response:
        dialect = AnthropicMessages()
        try:
            session = self._session_of(request)
            body = _body(await _read(request))
            prepared = await session.prepare_aside(dialect.read_any(body, session), is_limited=False)
        except RecursionError:
            return _json(dialect.refuse(Refused("the body is nested too deeply")), status=400)
        except Refused as error:
            return _json(dialect.refuse(error), status=error.status)
        return _json({"input_tokens": len(prepared.tokens)})

    async def _models(self, request: web.Request) -> web.Response:
        try:
            session = self._session_of(request)
        except Refused as error:
            return _json(ChatCompletions().refuse(error), status=error.status)
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        data = [card | {"max_model_len": session.context_tokens, "type": "model", "display_name": self.model}]
        return _json({"object": "list", "data": data, "has_more": False})

    def _session_of(self, request: web.Request) -> Session:
        said = request.headers
        key = said.get("x-api-key") or said.get("Authorization", "").removeprefix("Bearer ").strip()
        if (session := self._sessions.get(key)) is None:
            raise Refused("no running sample has this API key", status=401, code="invalid_api_key")
        return session


class _Connection(asyncio.Protocol):
    """A connection of aiohttp's that tells its end. It is reset if its client closes it with an answer unread."""

    def __init__(self, handler: web.RequestHandler, *, on_end: OnEnd) -> None:
        self._handler, self._on_end = handler, on_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end(self._handler, is_reset=isinstance(error, ConnectionResetError))
        self._handler.connection_lost(error)


async def _read(request: web.Request) -> bytes:
    """Return the body. Raises Refused, also if the client hangs up, which is nobody's failure."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise Refused(f"the body has more than {MOST_BYTES} bytes", status=413) from None
    except (ConnectionError, TimeoutError):
        raise Refused(f"the body has not arrived within {READ_SECONDS:g} s", status=408) from None


def _body(raw: bytes) -> Json:
    try:
        found = json.loads(raw, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused("the body must be an object")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _retries(request: web.Request) -> int:
    said = request.headers.get("x-stainless-retry-count", "")
    return int(said) if said.isascii() and said.isdigit() and len(said) < 9 else 0


def _listening(request: web.Request) -> Callable[[], bool]:
    """Return a function that says whether the request's client is still connected."""
    transport = request.transport
    return lambda: transport is not None and not transport.is_closing()


def _overridden_header(model_request: ModelRequest) -> dict[str, str]:
    """Return a header with the names of requested settings that the run overrides."""
    return {"x-not-obeyed": ", ".join(sorted(model_request.overridden))} if model_request.overridden else {}


def _json(value: Json, *, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode(), status=status, content_type="application/json")


async def _stream(
    request: web.Request, dialect: Dialect, model_request: ModelRequest, record: Record, session: Session
) -> web.StreamResponse:
    """Send the answer as server-sent events once it is complete.

    A refusal before the stream starts keeps its HTTP status; a later one becomes an error event.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"} | _overridden_header(model_request)
    )
    try:
        while not record.replies.done():
            await asyncio.wait((record.replies,), timeout=KEEP_ALIVE_SECONDS)
            if not record.replies.done():
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": waiting for the model\n\n")
        try:
            turns: Sequence[Turn] = await session.replies(record)
        except Refused as error:
            if not response.prepared:
                raise
            session.refusal = str(error)
            await response.write(_event("error", dialect.refuse(error)))
            return response
        if not response.prepared:
            await response.prepare(request)
        # In one piece with its end: a client that reads up to the last event has read all, and its close is no reset.
        await response.write_eof(
            b"".join(_event(*event) for event in dialect.events(model_request, turns, session)) + dialect.end
        )
        session.receive(record)
    except ConnectionError:  # the client hung up; the answer is kept for a retry
        _log.debug("a client hung up on a stream")
    return response


def _event(name: str, data: Json) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
