"""A worker that joins a run through its bus, without a server: the test supplies what the learner left there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.cli import joining
from asyncrl.config import RunConfig
from asyncrl.messages.fleet import RunSettings
from asyncrl.messages.signing import Signatures
from asyncrl.messages.topics import SETTINGS
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

URL = "nats://learner-host:4222"


class Joins(Protocol):
    """Return the settings of a worker that joins a run which left ``sections`` on its bus."""

    def __call__(
        self, sections: dict[str, Any], *overrides: str, withheld: tuple[str, ...] = ..., allow: Sequence[str] = ...
    ) -> RunConfig: ...


def joins_by(monkeypatch: pytest.MonkeyPatch) -> Joins:
    def join(
        sections: dict[str, Any], *overrides: str, withheld: tuple[str, ...] = (), allow: Sequence[str] = ()
    ) -> RunConfig:
        name = str(sections["run"]["name"])

        async def connect(asked: RunConfig, *, token: str, role: str, signatures: Signatures) -> MemoryBus:
            assert (asked.bus.url, asked.run.name, token, role) == (URL, name, "t", "rollout-worker")
            bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
            asyncio.get_running_loop().call_later(0.05, later.append, asyncio.ensure_future(put(bus)))
            return bus

        async def put(bus: MemoryBus) -> None:
            await bus.put(SETTINGS, RunSettings(sections=sections, withheld=withheld))

        later: list[Any] = []
        monkeypatch.setattr(joining, "connect", connect)
        return joining.joined(URL, name, overrides, token="t", allow=allow)

    return join
