"""An engine over several machines: how the parts of its server meet, and end together.

The worker has part 0 and listens. `asyncrl engine-node` on another machine connects, is told its number and where
SGLang's own processes meet, and starts its part. The connection stays as long as the engine: when a part, its machine
or the worker dies, it ends, and all other parts are killed. So none waits in a collective for one that is gone
(tests/unit/engines/sglang/test_machines.py).

    node -> worker   {"worker", "host", "settings"}
    worker -> node   {"refused"}, or {"number", "meet"} once all have come
    node -> worker   {"ended"}   why its part of the server ended
    worker -> node   {"over"}    the engine is closed; nothing failed

A message is a line of JSON. Neither side runs what the other one sends. Like SGLang's own ports, this one knows no
authentication: keep it in a network of your own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.engines.port import Meeting
from asyncrl.engines.sglang.server import ServerProcess
from asyncrl.errors import ConfigError, EngineDied

log = logging.getLogger(__name__)

_RETRY_SECONDS: Final = 1.0
_HELLO_SECONDS: Final = 10.0
_LAST_WORDS_SECONDS: Final = 2.0
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""A machine that vanishes is noticed after 25 s."""
_INTERFACE_ADDRESS: Final = 0x8915
"""SIOCGIFADDR of netdevice(7)."""

FOLLOWING_PORTS: Final = 6
"""With DP attention SGLang also takes this many ports behind that where its parts meet (server_args.py)."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One machine's part of a server.

    number   0 for the worker's
    parts    of the whole server
    meet     HOST:PORT where SGLang's processes meet, on the worker's machine
    address  of this machine, as the others reach it
    """

    number: int
    parts: int
    meet: str
    address: str

    @property
    def arguments(self) -> dict[str, Any]:
        return {"nnodes": self.parts, "node-rank": self.number, "dist-init-addr": self.meet}

    @property
    def environment(self) -> dict[str, str]:
        """What SGLang and gloo would otherwise guess: the host's name often stands for a loopback address."""
        interface = interface_of(self.address)
        return {"SGLANG_HOST_IP": self.address} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_of(address: str) -> str:
    """Return the network interface of this machine whose (first) IPv4 address this is; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe, _INTERFACE_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


class Nodes:
    """The engine's other machines, as its worker sees them."""

    def __init__(self, meeting: Meeting, *, count: int, settings: Mapping[str, str]) -> None:
        """
        count     machines besides the worker's
        settings  what must be equal on all of them, as texts by name
        """
        self._meeting = meeting
        self._count = count
        self._settings = settings
        self._links: dict[asyncio.StreamWriter, str] = {}
        self._are_here = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._has_begun = False
        self._problem = ""
        self.address = ""
        """Of this machine, as a node has reached it."""

    async def gather(self, *, seconds: float) -> None:
        """Wait until all machines have come. Raises EngineDied."""
        host, port = self._meeting.host, self._meeting.port
        try:
            listener = await asyncio.start_server(self._admit, host, port)
        except OSError as error:
            raise EngineDied(f"the engine's other machines cannot come to {host}:{port}: {error.strerror}") from None
        log.info("%s waits for %d more machines of its engine at %s:%d", self._meeting.worker, self._count, host, port)
        try:
            async with asyncio.timeout(seconds):
                while len(self._links) < self._count:  # the last to come may have left again before we wake
                    self._are_here.clear()
                    await self._are_here.wait()
        except TimeoutError:
            raise EngineDied(
                f"{len(self._links)} of the engine's {self._count} other machines (engine.options.machines) came to "
                f"{host}:{port} within engine.options.start_seconds = {seconds:g}; start there: asyncrl engine-node "
                f"RUN.toml --worker {self._meeting.worker} --meet {host}:{port}"
            ) from None
        finally:
            listener.close()

    async def begin(self, meet: str) -> None:
        """Tell every machine its number, and where the parts of the server meet."""
        self._has_begun = True
        for number, link in enumerate(self._links, 1):
            await _send(link, {"number": number, "meet": meet})

    async def wait_for_loss(self) -> str:
        """Wait until a machine is lost. Return which, and why."""
        await self._is_lost.wait()
        return self._problem

    @property
    def are_whole(self) -> bool:
        return not self._is_lost.is_set()

    async def close(self, *, is_over: bool) -> None:
        """Let go of all machines.  is_over: the engine is closed in order, and not because something failed"""
        links, self._links = self._links, {}
        for link in links:
            if is_over:
                await _send(link, {"over": True})
            await _close(link)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep_alive(writer)
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = await _receive(reader)
        except TimeoutError:
            hello = None
        if refusal := "no message" if hello is None else self._refusal(hello):
            await _send(writer, {"refused": refusal})
            await _close(writer)
            return
        assert hello is not None
        host = str(hello.get("host"))
        self._links[writer] = host
        self.address = writer.get_extra_info("sockname")[0]
        log.info("%s is a machine of the engine of %s", host, self._meeting.worker)
        if len(self._links) == self._count:
            self._are_here.set()
        message = await _receive(reader)
        if writer not in self._links:  # closed here
            return
        if not self._has_begun:  # another one may come
            del self._links[writer]
            await _close(writer)
            return
        why = "its connection has ended" if message is None else str(message.get("ended"))
        self._problem = self._problem or f"the engine's part on {host} is gone: {why}"
        self._is_lost.set()

    def _refusal(self, hello: Message) -> str:
        if hello.get("worker") != self._meeting.worker:
            return f"the engine there is that of {self._meeting.worker}, not of {hello.get('worker')}"
        if len(self._links) >= self._count:
            return f"engine.options.machines: the engine of {self._meeting.worker} has all its machines"
        theirs = hello.get("settings") or {}
        names = {*self._settings, *theirs}
        if differing := sorted(name for name in names if self._settings.get(name) != theirs.get(name)):
            return (
                f"it differs from {self._meeting.worker} in {', '.join(differing)}; start both with the same run file"
            )
        return ""


async def join_engine(
    meeting: Meeting,
    *,
    parts: int,
    settings: Mapping[str, str],
    start: Callable[[Part], Awaitable[ServerProcess]],
    seconds: float,
) -> str:
    """Be one of the other machines of an engine until the engine ends. Return why; "" if it was closed in order.

    parts    of the whole server
    start    starts this machine's part of it
    seconds  how long to try to reach the worker

    Raises EngineDied if the worker cannot be reached, ConfigError if it refuses this machine.
    """
    reader, writer = await _connect(meeting, seconds=seconds)
    server: ServerProcess | None = None
    try:
        _keep_alive(writer)
        await _send(writer, {"worker": meeting.worker, "host": socket.gethostname(), "settings": dict(settings)})
        told = await _receive(reader)
        if told is None:
            return f"{meeting.worker} is gone"
        if "refused" in told:
            raise ConfigError(
                f"engine-node: {meeting.worker} at {meeting.host}:{meeting.port} refuses: {told['refused']}"
            )
        address = writer.get_extra_info("sockname")[0]
        server = await start(Part(number=int(told["number"]), parts=parts, meet=str(told["meet"]), address=address))
        ended = asyncio.ensure_future(server.wait())
        message = asyncio.ensure_future(_receive(reader))
        try:
            await asyncio.wait({ended, message}, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                told = message.result()
                return "" if told is not None and told.get("over") else f"{meeting.worker} is gone"
            await _send(writer, {"ended": server.problem()})
            return server.problem()
        finally:
            ended.cancel()
            message.cancel()
            await asyncio.wait({ended, message})
    finally:
        await _close(writer)
        if server is not None:
            await server.close()


async def _connect(meeting: Meeting, *, seconds: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the worker, trying every second: it may start later. Raises EngineDied."""
    problem = ""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await asyncio.open_connection(meeting.host, meeting.port)
                except OSError as error:
                    problem = str(error)
                await asyncio.sleep(_RETRY_SECONDS)
    raise EngineDied(
        f"engine-node: {meeting.worker} was not at {meeting.host}:{meeting.port} within {seconds:g} s; is it up, and "
        f"started with the same --meet? {problem}"
    )


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    its = writer.get_extra_info("socket")
    its.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        its.setsockopt(socket.IPPROTO_TCP, option, value)


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message; one to a machine that is gone, or that does not take it, is dropped: its end says so."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            writer.write(json.dumps(message).encode() + b"\n")
            await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await writer.wait_closed()


async def _receive(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message; None at the end, or for what is none."""
    try:
        message = json.loads(await reader.readline())
    except (OSError, ValueError):  # a line that is too long is a ValueError, too
        return None
    return message if isinstance(message, dict) else None
