"""Messages and operations shared by the bus tests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.jetstream.kv import Lease
from asyncrl.bus.port import Bus, Delivery, Record
from asyncrl.messages import (
    Event,
    Heartbeat,
    Progress,
    PromptGroup,
    SamplingParams,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from asyncrl.messages.topics import EVENTS, PROMPTS, TRAJECTORIES, Topic

SHORT = 0.5  # ack_seconds of a bus whose consumers may be silent


def prompt(number: int) -> PromptGroup:
    return PromptGroup(
        group_id=number,
        prompt_tokens=np.array([5, 6, number], np.int32),
        group_size=2,
        sampling=SamplingParams(max_new_tokens=4),
        label="12",
    )


def group(number: int, *, tokens: int = 3) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=np.arange(tokens, dtype=np.int32),
        response_mask=np.arange(tokens) % 2 == 0,
        behavior_logprobs=np.linspace(-2, 0, tokens, dtype=np.float32),
        version_spans=(VersionSpan(start=0, incarnation=1, policy_version=7),),
        reward=0.5,
    )
    return TrajectoryGroup(group_id=number, prompt_tokens=np.array([1, 2], np.int32), trajectories=(trajectory,))


def progress(step: int, *, incarnation: int = 0) -> Progress:
    return Progress(incarnation=incarnation, step=step, policy_version=step)


def heartbeat(name: str) -> Heartbeat:
    return Heartbeat(actor=name, role="rollout-worker")


async def publish_prompts(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(PROMPTS, prompt(number), key=str(number))


async def publish_groups(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        await bus.publish(TRAJECTORIES, group(number), key=str(number))


@contextlib.asynccontextmanager
async def taken(bus: Bus, count: int) -> AsyncIterator[list[Delivery[PromptGroup]]]:
    async with bus.consume(PROMPTS) as deliveries:
        yield [await anext(deliveries) for _ in range(count)]


async def first(bus: Bus, count: int, *, after: int = 0, topic: Topic[Any] = TRAJECTORIES) -> list[Record[Any]]:
    async with bus.read(topic, after=after) as records:
        return [await anext(records) for _ in range(count)]


async def until_waiting(bus: Bus, count: int) -> None:
    """Wait until that many consumers of prompts wait at the server, which answers later requests before it has queued
    theirs."""
    if isinstance(bus, JetStreamBus):
        shared = f"CONSUMER.INFO.{bus._layout.stream(PROMPTS)}.workers"
        while (await bus._connection.api(shared))["num_waiting"] < count:
            await asyncio.sleep(0.01)


async def first_event(bus: Bus, kind: str) -> Event:
    async with bus.read(EVENTS) as records:
        events = (record.message async for record in records)
        return await anext(event async for event in events if event is not None and event.kind == kind)


def brief_leases(monkeypatch: pytest.MonkeyPatch, *, seconds: float = 1.0) -> None:
    """Let leases of runs created from now on live for a moment."""
    _leases_live(seconds, monkeypatch)


def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases live for two minutes, so that none expires within half of that time even on a busy machine."""
    _leases_live(120.0, monkeypatch)


def _leases_live(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease, "TOPIC", dataclasses.replace(Lease.TOPIC, seconds_to_live=seconds))


def group_ids(deliveries: list[Delivery[PromptGroup]]) -> set[int]:
    return {delivery.message.group_id for delivery in deliveries if delivery.message is not None}


class Proxy:
    """A proxy to a server that can be cut: ``async with Proxy(port) as proxy`` listens at ``proxy.url``."""

    def __init__(self, port: int, *, bytes_per_second: float = 0.0) -> None:
        """bytes_per_second   limit of the traffic to the server; 0 is unlimited
        carried            bytes sent to the server so far
        turns_away         whether it accepts connections only to close them, as a server does that is just starting
        num_turned_away    how many it has closed so"""
        self._server_port, self._port = port, 0
        self._pause = 1 / bytes_per_second if bytes_per_second else 0.0
        self.carried = 0
        self.turns_away, self.num_turned_away = False, 0
        self._ways: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Proxy:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shut()
        while self._ways:  # a connection may have been accepted just before
            self.cut()
            await asyncio.wait(self._ways)

    async def open(self) -> None:
        self._listening = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
        _, self._port = self._listening.sockets[0].getsockname()

    def shut(self) -> None:
        """Close all connections and accept none until the proxy is opened again."""
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections; clients may reconnect."""
        for writer in self._ways.values():
            writer.transport.abort()

    def say(self, data: bytes) -> None:
        """Send this to all clients, as if the server did. Its own words must not be under way."""
        for writer in self._ways.values():
            writer.write(data)

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.turns_away:
            self.num_turned_away += 1
            writer.close()
            return
        way = asyncio.create_task(self._carry(reader, writer))
        self._ways[way] = writer
        way.add_done_callback(self._ways.pop)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):  # the server is away
                await self._carry_to_server(reader, writer)
        finally:  # a test that ends cancels its proxy
            writer.transport.abort()

    async def _carry_to_server(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pump(reader, server_writer, pause=self._pause))
                ways.create_task(self._pump(server_reader, writer))
        finally:
            server_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, pause: float = 0.0) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**12 if pause else 2**16):
                await asyncio.sleep(len(data) * pause)
                self.carried += len(data) if pause else 0
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
