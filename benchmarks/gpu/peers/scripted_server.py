"""Answers peers' requests to SGLang without a model, so that their arms can be rehearsed without GPUs.

python -m benchmarks.gpu.peers.scripted_server --host HOST --port PORT [any option of SGLang]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any, Final

from aiohttp import web

_SECONDS_PER_TOKEN: Final = 0.005


class Server:
    def __init__(self) -> None:
        self._aborted = asyncio.Event()
        self._running = 0
        self._version = "default"

    async def load(self, request: web.Request) -> web.Response:
        self._version = str((await request.json()).get("weight_version", self._version))
        return web.json_response({"success": True, "message": ""})

    async def generate(self, request: web.Request) -> web.Response:
        wanted = (await request.json())["sampling_params"]["max_new_tokens"]
        aborted, sampled = self._aborted, 0
        self._running += 1
        while sampled < wanted and not aborted.is_set():
            await asyncio.sleep(8 * _SECONDS_PER_TOKEN)
            sampled = min(wanted, sampled + 8)
        self._running -= 1
        reason = {"type": "abort", "message": ""} if sampled < wanted else {"type": "length"}
        made: dict[str, Any] = {"finish_reason": reason, "prompt_tokens": 0, "completion_tokens": sampled}
        if sampled:
            made["output_token_logprobs"] = [[-6.9, random.randrange(40), None] for _ in range(sampled)]
        made["weight_version"] = self._version
        return web.json_response({"text": "", "meta_info": made})

    async def pause(self, request: web.Request) -> web.Response:
        if (await request.json()).get("mode", "abort") == "abort":
            self._aborted.set()
            self._aborted = asyncio.Event()
        return web.json_response({})

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._running, "num_waiting_reqs": 0}]})


async def done(request: web.Request) -> web.Response:
    return web.json_response({"success": True, "message": ""})


async def application() -> web.Application:
    server, app = Server(), web.Application(client_max_size=2**26)
    loads = ("/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_tensor")
    app.add_routes([web.post("/generate", server.generate), web.post("/pause_generation", server.pause)])
    app.add_routes([web.get("/v1/loads", server.loads)])
    app.add_routes([web.get(path, done) for path in ("/health", "/health_generate", "/flush_cache")])
    app.add_routes([web.post(path, server.load) for path in loads])
    paths = ("/continue_generation", "/abort_request", "/init_weights_update_group")
    app.add_routes([web.post(path, done) for path in paths])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    web.run_app(application(), host=options.host, port=options.port, print=None, access_log=None)
