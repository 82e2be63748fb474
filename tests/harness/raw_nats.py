"""A NATS client as an attacker would write it: raw protocol lines, many at a time, without asyncrl's rules."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Heard:
    subject: str
    reply: str
    data: bytes


class RawNats:
    """``async with RawNats(port, user, password) as client``

    heard     messages to our subscriptions, in order
    refused   texts of the server's errors, in order
    """

    def __init__(self, port: int, user: str, password: str) -> None:
        self._port, self._user, self._password = port, user, password
        self._pongs = asyncio.Semaphore(0)
        self._num_subscriptions = 0
        self.heard: list[Heard] = []
        self.refused: list[str] = []

    async def __aenter__(self) -> RawNats:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        await self._reader.readline()  # INFO
        options = {"user": self._user, "pass": self._password, "verbose": False, "pedantic": False}
        options |= {"headers": True, "no_responders": True, "protocol": 1, "name": "attacker"}
        self._line(f"CONNECT {json.dumps(options)}")
        self._reading = asyncio.create_task(self._read())
        await self.flush()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        self._writer.close()
        await asyncio.wait((self._reading,))

    def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        where = f"{subject} {reply}" if reply else subject
        if not headers:
            self._line(f"PUB {where} {len(data)}")
            self._writer.write(data + b"\r\n")
            return
        head = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        self._line(f"HPUB {where} {len(head)} {len(head) + len(data)}")
        self._writer.write(head.encode() + data + b"\r\n")

    def subscribe(self, subject: str) -> None:
        self._num_subscriptions += 1
        self._line(f"SUB {subject} {self._num_subscriptions}")

    async def flush(self) -> None:
        """Wait until the server has read everything we sent and has reported its refusals."""
        self._line("PING")
        await self._writer.drain()
        async with asyncio.timeout(60):
            await self._pongs.acquire()

    def _line(self, text: str) -> None:
        self._writer.write(text.encode() + b"\r\n")

    async def _read(self) -> None:
        """waits for: the server"""
        while line := (await self._reader.readline()).decode().split():
            verb = line[0]
            if verb in ("MSG", "HMSG"):
                sizes = line[-2:] if verb == "HMSG" else [line[-1]]
                body = await self._reader.readexactly(int(sizes[-1]) + 2)
                data = body[int(sizes[0]) : -2] if verb == "HMSG" else body[:-2]
                reply = line[3] if len(line) > 3 + len(sizes) else ""
                self.heard.append(Heard(line[1], reply, data))
            elif verb == "PING":
                self._line("PONG")
            elif verb == "PONG":
                self._pongs.release()
            elif verb == "-ERR":
                self.refused.append(" ".join(line[1:]))
