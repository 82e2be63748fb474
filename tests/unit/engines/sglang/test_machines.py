"""An engine over several machines: its parts meet, and end together. Stand-ins take the place of SGLang's processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.engines.port import Meeting
from asyncrl.engines.sglang import engine as sglang
from asyncrl.engines.sglang import machines, server
from asyncrl.errors import ConfigError, EngineDied
from tests.harness.engines import Model
from tests.unit.engines.sglang.fake_server import make_engine

PART = """
import http.server, json, os, socket, sys
words = sys.argv[1:]
given = {name[2:]: value for name, value in zip(words, words[1:]) if name.startswith("--")}
host, port = given["dist-init-addr"].split(":")
others = []
if given["node-rank"] == "0":
    with socket.create_server((host, int(port))) as meet:
        for _ in range(int(given["nnodes"]) - 1):
            others.append(meet.accept()[0])
else:
    while True:
        try:
            others.append(socket.create_connection((host, int(port))))
            break
        except OSError:
            pass

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"weight_version": given["weight-version"], "nnodes": 2, "tp_size": 2, "version": "0.5.23"})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"meta_info": {"weight_versions": []}})

    def answer(self, about):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(about).encode())

    def log_message(self, *_):
        pass

print("part", given["node-rank"], os.getpid(), os.environ["SGLANG_HOST_IP"], flush=True)
http.server.ThreadingHTTPServer((given["host"], int(given["port"])), Answers).serve_forever()
"""
"""Like SGLang's parts it waits for the others, answers, and goes on waiting when one of them is gone."""
PARTS: dict[str, Any] = {"machines": 2, "tensor_parallel": 2}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    command = server.server_command

    def of_stand_in(*given: Any, **settings: Any) -> list[str]:
        words = command(*given, **settings)
        return [sys.executable, "-S", "-c", PART, *words[words.index("sglang.launch_server") + 1 :]]

    monkeypatch.setattr(server, "server_command", of_stand_in)


@pytest.fixture
def meeting() -> Meeting:
    return Meeting(host="127.0.0.1", port=server.find_free_port(), worker="w0")


async def started_part(log: Path) -> tuple[int, int, str]:
    """Return the number, process id and address of the part that writes to ``log``, once it is up."""
    while True:
        with contextlib.suppress(OSError, IndexError):
            lines = (await asyncio.to_thread(log.read_text)).splitlines()
            words = next((line for line in lines if line.startswith("part ")), "").split()
            return int(words[1]), int(words[2]), words[3]
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def two_machines(
    model: Model, meeting: Meeting, folder: Path
) -> AsyncIterator[tuple[sglang.SGLangEngine, asyncio.Task[str]]]:
    """A worker's engine that has started, and its other machine."""
    engine = make_engine(model, folder / "0.log", **PARTS)
    other = make_engine(model, folder / "1.log", **PARTS)
    engine.meet_at(meeting)
    joined = asyncio.create_task(other.join(meeting, seconds=60.0))
    try:
        await engine.start()
        yield engine, joined
    finally:
        joined.cancel()
        await asyncio.wait({joined})
        await engine.close()


async def test_the_parts_of_a_server_meet_and_end_with_their_engine(
    model: Model, meeting: Meeting, tmp_path: Path
) -> None:
    async with two_machines(model, meeting, tmp_path) as (engine, joined):
        parts = [await started_part(tmp_path / f"{number}.log") for number in (0, 1)]
        assert [number for number, _, _ in parts] == [0, 1]
        assert {address for _, _, address in parts} == {"127.0.0.1"}
        assert engine.weight_updater is not None and engine.weight_updater.num_ranks == 2
        assert engine._loader.ranks_with_loader == 0  # the other machine does not see the files that we hold open
        await engine.close()
        assert await joined == ""
        assert not any(psutil.pid_exists(pid) for _, pid, _ in parts)


async def test_an_engine_whose_other_part_is_killed_dies_and_names_it(
    model: Model, meeting: Meeting, tmp_path: Path
) -> None:
    async with two_machines(model, meeting, tmp_path) as (engine, joined):
        _, ours, _ = await started_part(tmp_path / "0.log")
        _, theirs, _ = await started_part(tmp_path / "1.log")
        os.kill(theirs, signal.SIGKILL)
        assert "1.log" in await joined
        assert engine._client.server is not None
        await engine._client.server.wait()
        assert not psutil.pid_exists(ours)
        with pytest.raises(EngineDied, match=r"the engine's part on \S+ is gone: .*1.log"):
            await engine._client.get("/server_info")


async def test_a_part_whose_worker_is_killed_ends(model: Model, meeting: Meeting, tmp_path: Path) -> None:
    async with two_machines(model, meeting, tmp_path) as (engine, joined):
        _, ours, _ = await started_part(tmp_path / "0.log")
        _, theirs, _ = await started_part(tmp_path / "1.log")
        os.kill(ours, signal.SIGKILL)
        assert engine._client.server is not None
        await engine._client.server.wait()
        await engine.close()  # as a worker does that has noticed
        assert await joined == "w0 is gone"
        assert not psutil.pid_exists(theirs)


class Alone:
    """Messages that a machine sends and gets, without any server."""

    def __init__(self, meeting: Meeting) -> None:
        self.nodes = machines.Nodes(meeting, count=1, settings={"sglang": "1"})
        self.gathering = asyncio.create_task(self.nodes.gather(seconds=60.0))

    async def join(self, meeting: Meeting, *, sglang: str = "1") -> str:
        async def start(_: machines.Part) -> server.ServerProcess:
            raise AssertionError("nothing is started")

        return await machines.join_engine(meeting, parts=2, settings={"sglang": sglang}, start=start, seconds=60.0)


async def test_what_is_no_part_of_the_engine_is_refused_and_says_why(meeting: Meeting) -> None:
    alone = Alone(meeting)
    with pytest.raises(ConfigError, match="refuses: the engine there is that of w0, not of w1"):
        await alone.join(Meeting(host=meeting.host, port=meeting.port, worker="w1"))
    with pytest.raises(ConfigError, match="differs from w0 in sglang; start both with the same run file"):
        await alone.join(meeting, sglang="2")
    joined = asyncio.create_task(alone.join(meeting))
    await alone.gathering
    await alone.nodes.close(is_over=False)
    assert await joined == "w0 is gone"


async def test_a_machine_that_leaves_before_all_are_there_makes_room_for_another(meeting: Meeting) -> None:
    alone = Alone(meeting)
    alone.nodes._count = 2
    first = asyncio.create_task(alone.join(meeting))
    while len(alone.nodes._links) < 1:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait({first})
    others = [asyncio.create_task(alone.join(meeting)) for _ in range(2)]
    await alone.gathering
    await alone.nodes.close(is_over=False)
    assert [await other for other in others] == ["w0 is gone"] * 2


async def test_machines_that_do_not_come_are_named_with_what_starts_them(meeting: Meeting) -> None:
    nodes = machines.Nodes(meeting, count=1, settings={})
    words = f"0 of the engine's 1 other machines .* asyncrl engine-node RUN.toml --worker w0 --meet {meeting.host}"
    with pytest.raises(EngineDied, match=words):
        await nodes.gather(seconds=0.0)
    with pytest.raises(EngineDied, match=f"w0 was not at {meeting.host}:{meeting.port} within 0 s"):
        await machines.join_engine(meeting, parts=2, settings={}, start=lambda _: None, seconds=0.0)  # type: ignore[arg-type,return-value]


async def test_a_machine_that_leaves_as_the_last_one_comes_is_waited_for_again(meeting: Meeting) -> None:
    nodes = machines.Nodes(meeting, count=1, settings={})
    nodes._are_here.set()  # it came, and has left before the worker wakes
    with pytest.raises(EngineDied, match="0 of the engine's 1 other machines"):
        await nodes.gather(seconds=0.01)


async def test_an_engine_of_several_machines_without_a_meeting_says_how_it_is_started(
    model: Model, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="asyncrl rollout-worker --meet HOST:PORT"):
        await make_engine(model, tmp_path / "log", **PARTS).start()


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", "lo"), ("192.0.2.1", "")])
def test_gloo_is_told_the_interface_of_an_address(address: str, interface: str) -> None:
    part = machines.Part(number=1, parts=2, meet="192.0.2.7:9", address=address)
    assert part.environment.get("GLOO_SOCKET_IFNAME", "") == interface
    assert part.arguments == {"nnodes": 2, "node-rank": 1, "dist-init-addr": "192.0.2.7:9"}
