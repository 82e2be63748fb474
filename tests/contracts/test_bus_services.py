"""The contract of services, over both buses."""

from __future__ import annotations

import asyncio

from asyncrl.bus.port import Bus
from asyncrl.messages.topics import TRANSFERS
from asyncrl.messages.weight_transfer import TransferOffer, TransferRequest

REQUEST = TransferRequest(engine="w0", group="w0-1", num_ranks=1)


async def serve_once(bus: Bus, ready: asyncio.Event, version: int) -> TransferRequest:
    async with bus.serve(TRANSFERS) as questions:
        ready.set()
        async for asked in questions:
            await asked.answer(TransferOffer(policy_version=version))
            return asked.question
    raise AssertionError


async def test_request_gets_the_servers_answer(bus: Bus) -> None:
    ready = asyncio.Event()
    server = asyncio.create_task(serve_once(bus, ready, 7))
    await ready.wait()
    answer = await bus.ask(TRANSFERS, REQUEST, seconds=60)
    assert answer is not None and answer.policy_version == 7
    assert await server == REQUEST


async def test_request_without_a_server_returns_none(bus: Bus) -> None:
    assert await bus.ask(TRANSFERS, REQUEST, seconds=60) is None


async def test_server_that_left_answers_no_more(bus: Bus) -> None:
    ready = asyncio.Event()
    server = asyncio.create_task(serve_once(bus, ready, 7))
    await ready.wait()
    await bus.ask(TRANSFERS, REQUEST, seconds=60)
    await server
    assert await bus.ask(TRANSFERS, REQUEST, seconds=60) is None


async def test_late_answer_is_none(bus: Bus) -> None:
    async with bus.serve(TRANSFERS):
        assert await bus.ask(TRANSFERS, REQUEST, seconds=0.05) is None
