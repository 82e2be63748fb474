"""An SGLang server as an engine: one that we launch, or one that runs already.

A load is pause -> update, from a folder or from the learner -> continue: generations in progress keep their place and
their keys. New ones are held back here meanwhile, so that what a request was sent under is what its prefix was computed
with. Prefixes are cached under a name that changes with every load: a new request never finds keys of older weights.
Only one engine may load weights into a server; others attached to it may sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.checks import Shapes, check_prompt, check_sampling, check_weights, read_shapes
from asyncrl.engines.sglang_reply import Reply
from asyncrl.engines.sglang_server import (
    ServerProcess,
    check_dtype,
    check_installed,
    free_port,
    ranks_with_loader,
    server_command,
    server_environment,
)
from asyncrl.engines.sglang_weights import SGLangReceiver, WeightLoader
from asyncrl.engines.spans import Version, format_version, parse_version
from asyncrl.errors import ConfigError, EngineDied, EngineError, WeightsError
from asyncrl.messages import Sampling, WeightVersion
from asyncrl.protocols import EngineStats, Generation, LoadReport, Partial

log = logging.getLogger(__name__)

_READ_BYTES = 16 * 2**20
"""Longest line of a streamed reply."""
_KEPT_SECONDS = 2.0
"""An order's connection is kept so long for the next one: under the five seconds after which the server closes it."""
_ABORT_SECONDS = 5.0
_FIRST_SAFE_RETRACT = (0, 5, 23)
"""Older servers die when their cache is flushed while requests are retracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    url: str = ""
    """http://HOST:PORT of a running server; empty launches one on a free port."""
    tensor_parallel: int = 1
    """GPUs of the server launched."""
    server_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Any option of `python -m sglang.launch_server`, such as {mem-fraction-static = 0.85}; true gives a flag."""
    start_seconds: float = 600.0
    """How long the server may take until it answers."""
    request_seconds: float = 3600.0
    """How long one generation or one load may take."""
    pause: Literal["in_place", "retract"] = "in_place"
    """What a load does to generations in progress: keep their keys, or compute them anew with the new weights."""
    version_source: Literal["auto", "spans", "stream"] = "auto"
    """Where a token's version comes from: the server's version spans (0.5.23) or streamed chunks."""
    stream_interval: int = 16
    """Tokens per streamed chunk: labels are up to that many tokens too old, fewer tokens cost throughput."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "start_seconds", "request_seconds", "stream_interval"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url must start with http:// or https://, got {self.url!r}")


class SGLangEngine:
    """See Engine in protocols/engine.py."""

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: Version, options: Options, log_path: Path
    ) -> None:
        """``log_path``: where the output of a launched server goes, NAME.engine.log; NAME is the engine's."""
        self._model_path = model_path
        self._device = device
        self._dtype = dtype
        self._first_version = version
        self._options = options
        self._log_path = log_path
        self._name = log_path.name.removesuffix(".engine.log")
        self.url = options.url.rstrip("/")
        self._server: ServerProcess | None = None
        self._http: aiohttp.ClientSession | None = None
        self._orders: aiohttp.ClientSession | None = None
        self._kept_from = 0.0  # monotonic: until then connections that were kept may be closing
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-read")
        self._shapes: Shapes = {}
        self._optional_names: frozenset[str] = frozenset()
        self._vocabulary_size = self._context_tokens = self._max_running = 2**31
        self._has_spans = False
        self._late_tokens = 1
        self._cache_owner = uuid.uuid4().hex
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._loader = WeightLoader(self._told, pause=options.pause, first_version=version, is_open=self._is_open)
        self._receiver: SGLangReceiver | None = None
        self._sent = self._held = self._tokens_generated = 0

    async def start(self) -> None:
        """Raises ConfigError, or EngineDied with the end of the server's log."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._reader, self._read_model_folder)
        timeout = aiohttp.ClientTimeout(total=self._options.request_seconds, sock_connect=60.0)
        self._http = aiohttp.ClientSession(
            # A new connection each: a kept one that the server closes just then looks like the server's death.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=timeout,
            read_bufsize=_READ_BYTES,
        )
        # A busy server is slow to accept a connection, and while weights are loaded everything waits for the order.
        is_ours = not self.url  # of a server behind a proxy it is not known how long a connection is kept
        kept = {"keepalive_timeout": _KEPT_SECONDS} if is_ours else {"force_close": True}
        self._orders = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, **kept), timeout=timeout)
        if not self.url:
            await self._launch()
        await self._wait_until_healthy()
        await self._ask_server()

    async def generate(
        self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, seed: int, partial: Partial | None = None
    ) -> Generation:
        """``seed`` is not honoured: what SGLang samples depends on what else it batches."""
        self._session()
        check_sampling(sampling)
        is_seen, partial = partial is not None, Partial() if partial is None else partial
        prompt_tokens, sampling = partial.prefix.left_of(prompt_tokens, sampling)
        check_prompt(
            prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
            vocabulary_size=self._vocabulary_size,
            context_tokens=self._context_tokens,
        )
        async with self._place():
            reply = Reply(sent_version=self._loader.version, first_version=self._first_version)
            partial.follow(reply)
            await self._sample(reply, self._request(prompt_tokens, sampling, stream=is_seen or not self._has_spans))
        return partial.prefix.then(reply.generation())

    async def load(self, weights: WeightVersion) -> LoadReport:
        self._session()
        folder = await asyncio.get_running_loop().run_in_executor(self._reader, self._check_weights, weights)
        return await self._loader.load(weights, folder)

    @property
    def version(self) -> Version:
        return self._loader.version

    @property
    def receiver(self) -> SGLangReceiver | None:
        return self._receiver

    def stats(self) -> EngineStats:
        running = min(self._sent, self._max_running)
        return EngineStats(
            running=running,
            queued=self._held + self._sent - running,
            tokens_generated=self._tokens_generated,
            is_live=not self._has_spans,  # streamed then
        )

    async def close(self) -> None:
        for session in filter(None, (self._http, self._orders)):
            await session.close()
        if self._server:
            await self._server.close()
        self._reader.shutdown(wait=False)

    # -- start ---------------------------------------------------------------------------------------------------------

    def _read_model_folder(self) -> None:
        try:
            config = json.loads((self._model_path / "config.json").read_text())
            self._shapes = read_shapes(self._model_path)
        except (OSError, ValueError, WeightsError) as error:
            raise ConfigError(f"model.path={self._model_path}: {error}") from error
        self._vocabulary_size = int(config.get("vocab_size", self._vocabulary_size))
        self._context_tokens = int(config.get("max_position_embeddings", self._context_tokens))
        if config.get("tie_word_embeddings"):
            self._optional_names = frozenset({"lm_head.weight"})

    async def _launch(self) -> None:
        check_installed()
        check_dtype(self._dtype, device=self._device, server_arguments=self._options.server_arguments)
        port = free_port()
        command = server_command(
            self._model_path,
            device=self._device,
            dtype=self._dtype,
            port=port,
            weight_version=format_version(self._first_version),
            tensor_parallel=self._options.tensor_parallel,
            stream_interval=self._options.stream_interval,
            server_arguments=self._options.server_arguments,
        )
        log.info("starting SGLang, output in %s: %s", self._log_path, " ".join(command))
        environment = server_environment(os.environ, device=self._device, tensor_parallel=self._options.tensor_parallel)
        self._server = ServerProcess(command, environment=environment, log_path=self._log_path)
        self.url = f"http://127.0.0.1:{port}"
        await self._server.start()

    async def _wait_until_healthy(self) -> None:
        """Asks twice a second, since nobody would tell us; wakes at once when a launched server dies."""
        began = reported = time.monotonic()
        try:
            async with asyncio.timeout(self._options.start_seconds):
                while not await self._is_healthy():
                    if time.monotonic() - reported > 15:
                        reported = time.monotonic()
                        log.info("waiting for SGLang at %s since %.0f s", self.url, reported - began)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await (self._server.wait() if self._server else asyncio.Event().wait())
        except TimeoutError as error:
            where = self._server.log_tail() if self._server else "is it running?"
            raise EngineDied(
                f"no answer from SGLang at {self.url} for {self._options.start_seconds:g} s; {where}"
            ) from error
        log.info("SGLang at %s is up after %.0f s", self.url, time.monotonic() - began)

    async def _is_healthy(self) -> bool:
        try:
            await self._get("/health")
        except EngineError as error:
            if self._server and not self._server.is_alive:
                raise EngineDied(f"SGLang ended while it started; {self._server.log_tail()}") from error
            return False
        return True

    async def _ask_server(self) -> None:
        """What kind of server this is: its version, its scheduler, and how it tells versions."""
        info = await self._get("/server_info")
        model = await self._get("/model_info")
        self._late_tokens = 0 if info.get("disable_overlap_schedule") else 1
        self._max_running = int(info.get("max_running_requests") or self._max_running)
        self._loader.version = parse_version(str(model.get("weight_version", "")), default=self._first_version)
        self._loader.has_sessions = await self._knows("/begin_weight_update")
        self._loader.ranks_with_loader = ranks_with_loader(info) if self._server else 0
        self._receiver = SGLangReceiver(
            self._told,
            self._loader,
            name=self._name,
            num_ranks=int(info.get("tp_size") or 1),
            shapes=self._shapes,
            optional=self._optional_names,
        )
        number = tuple(int(part) for part in str(info.get("version", "0")).split(".")[:3] if part.isdecimal())
        if self._options.pause == "retract" and number < _FIRST_SAFE_RETRACT:
            raise ConfigError(f"pause = 'retract' needs SGLang 0.5.23, {self.url} is {info.get('version')}")
        # Two tokens of prompt and answer: beside what it tells, it warms the server up.
        probe = self._request(np.zeros(2, dtype=np.int32), Sampling(max_new_tokens=2, ignore_eos=True), stream=False)
        try:
            async with asyncio.timeout(self._options.start_seconds), self._post("/generate", probe) as response:
                has_spans = "weight_versions" in (await response.json())["meta_info"]
        except TimeoutError:
            raise EngineDied(
                f"SGLang at {self.url} samples nothing: is it paused? Who ended while it loaded weights leaves it so, "
                "perhaps with half of them; start it anew"
            ) from None
        if self._options.version_source == "spans" and not has_spans:
            raise ConfigError(f"version_source = 'spans' needs SGLang 0.5.23, {self.url} is {info.get('version')}")
        self._has_spans = has_spans and self._options.version_source != "stream"
        async with self._post("/freeze_gc", {}):
            pass  # a full collection of what its start left in memory would stop all tokens

    # -- generate ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Held back while weights are loaded, then counted as sent."""
        self._held += 1
        try:
            await self._is_open.wait()
        finally:
            self._held -= 1
        self._sent += 1
        try:
            yield
        finally:
            self._sent -= 1

    def _request(self, prompt_tokens: NDArray[np.int32], sampling: Sampling, *, stream: bool) -> dict[str, Any]:
        return {
            "rid": uuid.uuid4().hex,
            "input_ids": prompt_tokens.tolist(),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": sampling.ignore_eos,
                **({"stream_interval": self._options.stream_interval} if stream and self._has_spans else {}),
            },
            "return_logprob": True,
            "stream": stream,
            # The prefix cache's name: ours alone, and another one after every load.
            "extra_key": f"{self._cache_owner}:{self._loader.num_loads}",
        }

    async def _sample(self, reply: Reply, request: Mapping[str, Any]) -> None:
        late_tokens = self._late_tokens if self._has_spans else None
        try:
            async with self._post("/generate", request) as response:
                if not request["stream"]:
                    reply.take_whole(await response.json(), late_tokens=self._late_tokens)
                    self._tokens_generated += len(reply)
                    return
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        before = len(reply)
                        reply.take_chunk(json.loads(data), late_tokens=late_tokens)
                        self._tokens_generated += len(reply) - before
        except asyncio.CancelledError:
            # The server would notice the closed connection only seconds later.
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS), self._post("/abort_request", {"rid": request["rid"]}):
                    pass
            raise

    # -- load ----------------------------------------------------------------------------------------------------------

    def _check_weights(self, weights: WeightVersion) -> Path:
        return check_weights(weights, expected=self._shapes, optional=self._optional_names)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _session(self, *, of_orders: bool = False) -> aiohttp.ClientSession:
        session = self._orders if of_orders and time.monotonic() > self._kept_from else self._http
        if session is None or session.closed:
            raise EngineDied("the SGLang engine is not running: start() it first, or it was closed")
        return session

    async def _get(self, path: str) -> Any:
        async with self._ask("GET", path, None) as response:
            text = await response.text()
            return json.loads(text) if text else {}

    async def _knows(self, path: str) -> bool:
        """Whether the server has this POST: to a GET it says "not allowed", not "not found"."""
        async with self._session().get(self.url + path) as response:
            return response.status != 404

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask("POST", path, body)

    async def _told(self, path: str, body: Mapping[str, Any]) -> Any:
        async with self._ask("POST", path, body, is_order=True) as response:
            text = await response.text()
            return json.loads(text) if text else {}

    @asynccontextmanager
    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, is_order: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises EngineError when the server refuses or is too slow, EngineDied when it is gone."""
        try:
            async with self._session(of_orders=is_order).request(method, self.url + path, json=body) as response:
                if is_order and response.status >= 500:  # SGLang closes the connection behind what it did not expect
                    self._kept_from = time.monotonic() + _KEPT_SECONDS
                if response.status >= 400:
                    raise EngineError(f"{self.url}{path}: {response.status} {(await response.text())[:500]}")
                yield response
        except TimeoutError as error:
            raise EngineError(f"{self.url}{path}: no answer in {self._options.request_seconds:g} s") from error
        except (aiohttp.ContentTypeError, json.JSONDecodeError) as error:  # a proxy's page, say
            raise EngineError(f"{self.url}{path}: its answer is no JSON: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            tail = self._server.log_tail() if self._server else ""
            raise EngineDied(f"lost SGLang at {self.url}{path}: {error!r} {tail}") from error
