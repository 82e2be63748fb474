"""A scripted engine behind HTTP: continuous batching on the wall clock, with the APIs of SGLang and vLLM.

    python -m benchmarks.peers.engine JOB.json      prints its address, ends when its standard input ends

Answers have the lengths that asyncrl's own workers draw for (seed, group, index), for every client and every order of
requests. A prompt is its group's number, sixteen times. A sampled token encodes its sample and the weights that sampled
it. Staleness per token is therefore read from the trained tokens, not from a framework's own accounting. A request
whose input continues after the prompt was aborted before; the engine finishes it instead of drawing a new answer.
Prefill takes no time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import sys
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop
from aiohttp import web

from asyncrl.actors.rollout.generation_session import sample_seed
from asyncrl.planning.simulation import Decoding, Timing, version_spans
from benchmarks.peers.learner import starved_seconds
from benchmarks.peers.scene import PROMPT_TOKENS, Job, Scene, index_and_version, sampled_token
from benchmarks.simulated import DecodingTimer, LengthKind, Lengths


def timing_of(scene: Scene) -> Timing:
    return Timing(
        seconds_per_token=scene.seconds_per_token,
        seconds_per_sequence=scene.seconds_per_sequence,
        capacity=scene.capacity,
        load_seconds=scene.load_seconds,
        train_tokens_per_second=scene.train_tokens_per_second,
        train_seconds=scene.train_seconds,
    )


def lengths_of(scene: Scene) -> Lengths:
    return Lengths(cast(LengthKind, scene.length_kind), mean=scene.length_mean, maximum=scene.length_max)


class AbortableDecoding(Decoding):
    """Decoding that can be emptied. Its clock and position continue."""

    def abort(self) -> dict[int, tuple[float, int]]:
        """Remove all running and waiting sequences; return number -> (position at its start, its tokens so far)."""
        partial = {
            number: (entered, min(length, max(0, math.floor(self.position - entered))))
            for _, number, entered, length in self._running
        }
        partial |= {number: (self.position, 0) for number, _ in self._waiting}
        self._running.clear()
        self._entered = 0.0
        self._waiting.clear()
        return partial

    def drop(self, number: int) -> int:
        """Remove an abandoned sequence, freeing its slot; return its number of tokens."""
        for at, (_, running, entered, length) in enumerate(self._running):
            if running == number:
                self._running[at] = self._running[-1]
                self._running.pop()
                self._entered -= entered
                heapq.heapify(self._running)
                if self._waiting:
                    self.add(*self._waiting.popleft())
                return min(length, max(0, math.floor(self.position - entered)))
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != number)
        return 0

    def sampled_so_far(self) -> int:
        """Number of tokens of the running sequences."""
        return sum(min(length, max(0, math.floor(self.position - entered))) for _, _, entered, length in self._running)


@dataclass(slots=True)
class _Request:
    index: int
    answer: asyncio.Future[tuple[list[int], str]] = field(default_factory=lambda: asyncio.Future())


class ScriptedEngine:
    """The engine without HTTP. Uses one event loop."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._lengths = lengths_of(scene)
        self._decoding = AbortableDecoding(timing_of(scene), now=time.monotonic())
        self._changes: list[tuple[float, tuple[int, int]]] = [(-1.0, (0, 0))]
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count()
        self._free: dict[int, list[int]] = defaultdict(list)  # per group: indexes to draw next
        self._timer = DecodingTimer(self._decoding, self._advance)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._finished_tokens = 0
        self._abandoned_tokens = 0

    async def generate(self, input_ids: list[int]) -> tuple[list[int], str]:
        """Return (tokens, reason of the end: stop or abort). Waits while the engine is paused."""
        await self._resumed.wait()
        group, already = input_ids[0], len(input_ids) - PROMPT_TOKENS
        if already:
            index, _ = index_and_version(input_ids[PROMPT_TOKENS], group_size=self._scene.group_size)
        else:
            free = self._free[group]
            if not free:
                free.extend(range(self._scene.group_size))
            index = free.pop(0)
        number, request = next(self._numbers), _Request(index)
        self._requests[number] = request
        self._advance()
        length = self._lengths.of(sample_seed(self._scene.seed, group, index, 0))
        self._decoding.add(number, max(1, length - already))
        self._timer.set()
        try:
            tokens, reason = await request.answer
        except asyncio.CancelledError:
            self._abandon(number)
            raise
        if not tokens and not already:
            self._free[group].insert(0, index)  # a retry gets the same sample
        return tokens, reason

    async def load(self, version: int) -> None:
        """Load weights. Decoding stops during the load and then continues, unless it was paused before."""
        self._stand_still()
        await asyncio.sleep(self._scene.load_seconds)
        self._advance()
        self._changes.append((self._decoding.position, (0, version)))
        if self._resumed.is_set():
            self._go_on()

    def pause(self, *, aborts: bool) -> None:
        self._resumed.clear()
        self._stand_still()
        if aborts:
            for number, (entered, length) in self._decoding.abort().items():
                self._answer(number, entered=entered, length=length, reason="abort")

    def resume(self) -> None:
        self._advance()
        self._resumed.set()
        self._go_on()

    def stats(self) -> dict[str, float]:
        self._advance()
        return {
            "sampled_tokens": self._finished_tokens + self._decoding.sampled_so_far(),
            "abandoned_tokens": self._abandoned_tokens,
            "busy_seconds": self._decoding.busy_seconds,
            "running": self._decoding.running,
            "queued": self._decoding.queued,
            "cpu_seconds": time.process_time(),
            "starved_seconds": starved_seconds(),
            "at": time.monotonic(),
        }

    def _stand_still(self) -> None:
        self._advance()
        self._decoding.is_paused = True
        self._timer.set()

    def _go_on(self) -> None:
        self._decoding.is_paused = False
        self._timer.set()

    def _advance(self) -> None:
        for ended in self._decoding.advance(time.monotonic()):
            self._answer(ended.number, entered=ended.entered, length=ended.length, reason="stop")

    def _answer(self, number: int, *, entered: float, length: int, reason: str) -> None:
        request = self._requests.pop(number)
        spans = version_spans(self._changes, entered=entered, length=length)
        ends = [*(span.start for span in spans[1:]), length]
        tokens: list[int] = []
        for span, end in zip(spans, ends, strict=False):
            token = sampled_token(request.index, span.policy_version, group_size=self._scene.group_size)
            tokens += [token] * (end - span.start)
        self._finished_tokens += length
        if not request.answer.done():
            request.answer.set_result((tokens, reason))

    def _abandon(self, number: int) -> None:
        """Drop a sequence whose client is gone; its tokens are lost."""
        self._advance()
        if self._requests.pop(number, None) is not None:
            lost = self._decoding.drop(number)
            self._abandoned_tokens += lost
            self._finished_tokens += lost
        self._timer.set()


def application(engine: ScriptedEngine) -> web.Application:
    """Return the web application with the routes that drivers and the peers' clients use."""

    async def sglang(request: web.Request) -> web.Response:
        given = await request.json()
        tokens, reason = await engine.generate(given["input_ids"])
        answer = {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
                "prompt_tokens": len(given["input_ids"]),
                "completion_tokens": len(tokens),
            },
        }
        return web.json_response(answer)

    async def vllm(request: web.Request) -> web.Response:
        tokens, reason = await engine.generate((await request.json())["prompt"])
        logprobs = {"token_logprobs": [-1.0] * len(tokens)}
        choice = {"index": 0, "text": "", "token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}
        return web.json_response({"choices": [choice]})

    async def load(request: web.Request) -> web.Response:
        await engine.load((await request.json())["version"])
        return web.json_response({})

    async def pause(request: web.Request) -> web.Response:
        engine.pause(aborts=request.query.get("mode", "abort") == "abort")
        return web.json_response({})

    async def resume(request: web.Request) -> web.Response:
        engine.resume()
        return web.json_response({})

    async def stats(request: web.Request) -> web.Response:
        return web.json_response(engine.stats())

    async def health(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=2**26)
    app.add_routes([web.post("/generate", sglang), web.post("/v1/completions", vllm), web.post("/load", load)])
    app.add_routes([web.post(path, pause) for path in ("/pause", "/pause_generation")])
    app.add_routes([web.post(path, resume) for path in ("/resume", "/continue_generation")])
    app.add_routes([web.get("/stats", stats), web.get("/health", health)])
    return app


async def serve(scene: Scene) -> None:
    runner = web.AppRunner(application(ScriptedEngine(scene)), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    addresses: list[Any] = runner.addresses
    print(f"http://127.0.0.1:{addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent is gone or done
    await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(serve(Job.read(Path(sys.argv[1])).scene))
