"""An SGLang engine that is attached to a fake server and receives a tiny model's weights through the nccl channel."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import test_utils, web

from asyncrl.engines.sglang import engine as sglang
from asyncrl.messages.codec import encode
from asyncrl.messages.weight_transfer import TransferOffer
from asyncrl.weights.nccl import CollectiveOffer
from asyncrl.weights.port import LoadReport
from tests.harness.engines import Model
from tests.harness.transfers import layouts, offering, receiver_of
from tests.unit.engines.sglang.fake_server import FakeServer

PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
BEGIN, UPDATE, END = "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"
JOIN, LEAVE = "/init_weights_update_group", "/destroy_weights_update_group"
IS_OPEN = "a weight-update session is already open; call end_weight_update() first"
FROM_FOLDER, BY_LOADER = "/update_weights_from_disk", "/update_weights_from_tensor"


class Server(FakeServer):
    """``refuses`` has (path, number of the call) of refused calls, and ``says`` why; ``hangs`` is a path that never
    answers."""

    def __init__(self) -> None:
        super().__init__()
        self.has_sessions = True
        self.refuses: set[tuple[str, int]] = set()
        self.says, self.hangs = "torn", ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == BEGIN and request.method == "GET":
            return web.Response(status=405 if self.has_sessions else 404)
        answer = await super().answer(request)
        if path == self.hangs:
            await asyncio.Event().wait()
        if (path, self.paths.count(path)) in self.refuses:
            return web.json_response({"success": False, "message": self.says}, status=400)
        if path in (BEGIN, UPDATE, END, JOIN, LEAVE, BY_LOADER):
            return web.json_response({"success": True, "message": ""})
        return answer

    def loader_instructions(self) -> list[list[str]]:
        """Return the words of each instruction to our loader, which is the same for all ranks."""
        bodies = self.bodies(BY_LOADER)
        assert all(len(set(body["serialized_named_tensors"])) == 1 for body in bodies)
        return [
            [name for name, _ in pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))] for body in bodies
        ]


class Attached:
    """An engine on a fake server. ``begun`` is the number of earlier requests, which do not count."""

    def __init__(self, server: Server, engine: sglang.SGLangEngine, offer: TransferOffer) -> None:
        self.server, self.engine, self.offer = server, engine, offer
        self.receiver = receiver_of(engine, "w7")

    @property
    def paths(self) -> list[str]:
        return self.server.paths

    def stamp(self, version: tuple[int, int]) -> str:
        return self.engine._stamps.format(version)

    async def join(self) -> None:
        await self.receiver.join(offering(self.offer))
        self.server.asked.clear()

    async def receive(self) -> LoadReport:
        return await self.receiver.receive(offering(self.offer))


Attach = Callable[..., Any]


@contextlib.asynccontextmanager
async def attaching(old: Model, tmp_path: Path) -> AsyncIterator[Attach]:
    """Yield ``await attach(has_sessions=..., info=..., pause=...)``, an engine on a fake server."""
    server = Server()
    engines: list[sglang.SGLangEngine] = []

    async with test_utils.TestServer(server.application) as running:

        async def make(*, has_sessions: bool = True, info: Mapping[str, Any] | None = None, **options: Any) -> Attached:
            server.has_sessions, server.info = has_sessions, dict(info or {})
            server.version, server.model_path = "0.5.23", str(old.folder)
            url = str(running.make_url("")).rstrip("/")
            engine = sglang.SGLangEngine(
                old.folder,
                device="cpu",
                dtype="float32",
                version=(0, 3),
                options=sglang.Options(url=url, **options),
                log_path=tmp_path / "w7.engine.log",
            )
            engines.append(engine)
            await engine.start()
            meeting = CollectiveOffer(host="127.0.0.1", port=running.port or 0, collective="gloo", buckets=layouts(old))
            offer = TransferOffer(incarnation=0, policy_version=4, payload=encode(meeting))
            return Attached(server, engine, offer)

        yield make
        for engine in engines:
            await engine.close()
