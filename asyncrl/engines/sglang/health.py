"""Waits until an SGLang server is up, and until it generates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl.engines.sglang.client import ServerClient
from asyncrl.errors import EngineDied, EngineError

log = logging.getLogger(__name__)


async def until_healthy(client: ServerClient, *, seconds: float) -> None:
    """Poll twice a second (SGLang sends no notification). Raises EngineDied, immediately if a launched server dies."""
    server = client.server
    began = reported = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            while not await _is_healthy(client):
                if time.monotonic() - reported > 15:
                    reported = time.monotonic()
                    log.info("waiting for SGLang at %s for %.0f s", client.url, reported - began)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await (server.wait() if server else asyncio.Event().wait())
    except TimeoutError as error:
        where = server.log_tail() if server else "is it running?"
        raise EngineDied(f"SGLang at {client.url} did not respond within {seconds:g} s; {where}") from error
    log.info("SGLang at %s is up after %.0f s", client.url, time.monotonic() - began)


async def first_answer(
    client: ServerClient,
    request: Callable[[], Mapping[str, Any]],
    *,
    seconds: float,
    heal: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """Return the answer to a first request, which also warms up the server. Raises EngineDied without an answer.

    heal: called once if there is no answer; then the server is asked again
    """
    try:
        async with asyncio.timeout(seconds), client.post("/generate", request()) as response:
            return await response.json()
    except TimeoutError:
        if heal is None:
            raise EngineDied(
                f"SGLang at {client.url} generates no tokens: is it paused? A process that died while loading weights "
                "leaves it paused, perhaps with partly loaded weights; restart it"
            ) from None
    await heal()
    return await first_answer(client, request, seconds=seconds)


async def _is_healthy(client: ServerClient) -> bool:
    try:
        await client.get("/health")
    except EngineError:
        client.check_open()
        return False
    client.check_open()  # another server may have its port
    return True
