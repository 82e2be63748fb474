"""A fake SGLang server, which answers as SGLang does, and engines that use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from asyncrl.engines.sglang import engine as sglang
from asyncrl.messages import SamplingParams
from tests.harness.engines import Model
from tests.unit.engines.sglang.test_reply import LENGTH, body

SHORT = SamplingParams(max_new_tokens=4, ignore_eos=True)


class FakeServer:
    """Answers as SGLang does, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.version = "0.5.16"
        self.weight_version, self.model_path = "default", ""
        self.info: dict[str, Any] = {}
        self.update_status, self.refusal = 200, "Failed to get model loader: None."
        self.is_silent = self.is_paused = self.is_proxy = self.is_busy = False
        self.has_woken, self.can_wake, self.lacks = asyncio.Event(), True, ""
        self.ended: list[Any] = []
        """Connections that carry no more requests: SGLang closes a connection after an unexpected error."""
        self.callers: dict[str, set[int]] = {}
        """Client ports of the requests to each path; one port is one connection."""
        self.application = web.Application()
        self.application.router.add_route("*", "/{path:.*}", self.answer)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        asked = await request.json() if request.can_read_body else {}
        self.asked.append((path, asked))
        assert request.transport is not None
        if request.transport in self.ended:
            request.transport.abort()
        self.callers.setdefault(path, set()).add(request.transport.get_extra_info("peername")[1])
        if path == "/server_info":
            return web.json_response({"version": self.version, "max_running_requests": 1} | self.info)
        if path == self.lacks:
            return web.Response(status=404)
        if path == "/model_info":
            return web.json_response({"weight_version": self.weight_version, "model_path": self.model_path})
        if path == "/update_weights_from_disk" and self.update_status == 500:
            self.ended.append(request.transport)
        if path == "/update_weights_from_disk":
            if self.update_status == 200:
                self.weight_version, self.model_path = asked["weight_version"], asked["model_path"]
            return web.json_response(
                {"success": self.update_status == 200, "message": self.refusal}, status=self.update_status
            )
        if path in ("/begin_weight_update", "/end_weight_update"):
            return web.json_response({"success": True})
        if path == "/flush_cache" and self.is_busy:
            self.is_busy = False
            return web.Response(status=400, text="Flush cache failed.\n")
        if path == "/flush_cache":
            return web.Response(text="Cache flushed.\nPlease check backend logs for more details.")
        if path == "/continue_generation" and self.can_wake:
            self.has_woken.set()
        if path == "/generate" and self.is_paused:
            await self.has_woken.wait()
        if path == "/generate" and not asked["stream"]:
            return web.json_response(body([1], finish_reason=LENGTH))
        if path == "/generate" and self.is_proxy:
            return web.Response(text="<html>Bad gateway</html>", content_type="text/html")
        if path == "/generate" and self.is_silent:
            await asyncio.Event().wait()
        if path == "/generate":
            chunk = body([5, 6, 7, 8], weight_version=self.weight_version, finish_reason=LENGTH)
            return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return web.Response()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Return the bodies of the requests to a path."""
        return [asked for requested, asked in self.asked if requested == path]


def make_engine(
    model: Model, log_path: Path, *, others: Mapping[str, Any] | None = None, **options: Any
) -> sglang.SGLangEngine:
    """Return an engine with these options.  others: further arguments of the engine"""
    return sglang.SGLangEngine(
        model.folder,
        device="cpu",
        dtype="float32",
        version=(0, 3),
        options=sglang.Options(**options),
        log_path=log_path,
        **(others or {}),
    )
