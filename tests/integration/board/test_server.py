"""The board's server: which clients get an answer, what it contains, and what it shows of a run that is up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.board import server
from asyncrl.board.feed import MOST_ASKED, MOST_WAITING, RunFeed
from asyncrl.board.group_index import GroupIndex
from asyncrl.board.server import Board
from asyncrl.board.watched_run import WatchedRun
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.cli.main import main
from asyncrl.config import record as config_record
from asyncrl.errors import ConfigError
from asyncrl.images.reading import write_png
from asyncrl.images.store import ImageStore
from asyncrl.messages import Event, Heartbeat, StepMetrics, Wait
from asyncrl.messages.topics import ACTORS, EVALUATION_METRICS, EVENTS, METRICS
from tests.integration.board.conftest import OpenBoard, row, write_rows

Connect = Callable[..., Awaitable[JetStreamBus]]


@contextlib.asynccontextmanager
async def asked(board: Board, path: str, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    jar = aiohttp.CookieJar(unsafe=True)
    async with (
        aiohttp.ClientSession(cookie_jar=jar) as session,
        session.get(f"http://127.0.0.1:{board.port}{path}", headers=headers) as answer,
    ):
        yield answer


async def table(board: Board, path: str) -> Any:
    async with asked(board, path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def changes(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


async def the_first(answer: aiohttp.ClientResponse, is_wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(120):
        return await anext(change async for change in changes(answer) if is_wanted(change))


# -- contents of a folder ----------------------------------------------------------------------------------------------


async def test_a_recorded_run_has_curves_histograms_and_lanes(recorded: Path, open_board: OpenBoard) -> None:
    async with open_board(recorded) as board:
        (run,) = (await table(board, "/api/runs"))["runs"]
        curves = await table(board, "/api/runs/0/curves?name=reward/mean&name=nothing")
        lanes = await table(board, "/api/runs/0/lanes")
    assert (run["name"], run["status"], run["last"]["step"]) == ("one", "not up", 30)
    assert run["histograms"]["staleness/histogram"]["counts"][0] == [60, 30, 10]
    assert curves == {"reward/mean": [list(range(1, 31)), [step / 100 for step in range(1, 31)]]}
    assert [lane["name"] for lane in lanes["lanes"]] == ["learner", "w0"]


async def test_rows_that_are_written_now_are_told(recorded: Path, open_board: OpenBoard) -> None:
    async with open_board(recorded) as board, asked(board, "/api/stream") as answer:
        await answer.content.readline()
        write_rows(recorded, row(31, **{"evaluation/sums/mean@2": 0.5}))
        told = await the_first(answer, lambda change: change["kind"] == "rows")
    assert told["run"] == 0
    assert (told["rows"][0]["step"], told["rows"][0]["evaluation/sums/mean@2"]) == (31, 0.5)


async def test_a_run_that_is_resumed_for_more_steps_is_not_done_before_their_end(tmp_path: Path) -> None:
    folder = write_rows(tmp_path / "one", *(row(step) for step in (1, 2, 3)))
    _begin(folder, incarnation=0, step=0, steps=3)
    feed = RunFeed(WatchedRun(folder, [], token="", verb="board"), tell=lambda change: None)
    await feed.begin()
    feed.state.set_away("", now=0.0)
    assert (feed.state.steps, feed.state.status) == (3, "done")
    _begin(folder, incarnation=1, step=3, steps=60)
    write_rows(folder, row(4, **{"learner/incarnation": 1.0}))
    await feed.begin()
    feed.state.set_away("", now=1.0)
    assert (feed.state.steps, feed.state.status) == (60, "not up")


def _begin(folder: Path, *, incarnation: int, step: int, steps: int) -> None:
    history = History(folder / HISTORY_FILE, incarnation=incarnation)
    settings = config_record.as_table(config.only_overrides([f"run.steps={steps}"]))
    history.begin(step=step, kept=0, max_staleness=4, settings=settings)
    history.close()


async def test_an_image_of_the_run_is_shown_by_its_digest(recorded: Path, open_board: OpenBoard) -> None:
    picture = write_png(8, 8, bytes(8 * 8 * 3))
    digest = ImageStore(folder=recorded / "images").add(picture)
    async with open_board(recorded) as board, asked(board, f"/api/runs/0/images/{digest}") as answer:
        assert (answer.status, answer.content_type) == (200, "image/png")
        assert await answer.read() == picture


async def test_what_is_not_there_is_not_found(recorded: Path, open_board: OpenBoard) -> None:
    paths = [
        "/api/runs/1/lanes",
        "/api/runs/x/lanes",
        "/api/runs/" + "9" * 5000 + "/lanes",
        "/api/runs/0/actors/w9",
        "/api/runs/0/groups/-1",
        "/api/runs/0/images/" + "0" * 64,
        "/api/runs/0/images/..%2Fmetrics.jsonl",
        "/static/../server.py",
        "/static/none",
    ]
    async with open_board(recorded) as board:
        for path in paths:
            async with asked(board, path) as answer:
                assert answer.status == 404, path


async def test_a_limit_of_many_digits_is_a_large_one(with_groups: Path, open_board: OpenBoard) -> None:
    async with open_board(with_groups) as board:
        listed = await table(board, f"/api/runs/0/groups?limit={'9' * 5000}")
    assert len(listed["rows"]) == 3


async def test_groups_are_listed_and_opened(with_groups: Path, open_board: OpenBoard) -> None:
    async with open_board(with_groups) as board:
        listed = await table(board, "/api/runs/0/groups?order=newest&limit=2")
        opened = await table(board, "/api/runs/0/groups/1")
        async with asked(board, "/api/runs/0/groups/0") as answer:
            assert answer.status == 404
            assert "text of group 0 is not here" in await answer.text()
    assert (listed["total"], len(listed["rows"])) == (3, 2)
    assert opened["answers"][0]["environment"] == [[2, 4]]
    assert len(opened["texts"][0]) == 6
    assert opened["problem"] == ""


# -- access ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8420", "127.0.0.1.evil.example", "10.0.0.1", ""])
async def test_a_site_that_points_its_name_here_gets_nothing(recorded: Path, open_board: OpenBoard, host: str) -> None:
    async with open_board(recorded) as board, asked(board, "/api/runs", Host=host) as answer:
        assert answer.status in (400, 403)
        assert "reward" not in await answer.text()


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8420", "LOCALHOST"])
async def test_this_machine_is_let_in_also_through_a_tunnel(recorded: Path, open_board: OpenBoard, host: str) -> None:
    async with open_board(recorded) as board, asked(board, "/api/runs", Host=host) as answer:
        assert answer.status == 200


async def test_others_need_the_token_once(recorded: Path, open_board: OpenBoard) -> None:
    async with open_board(recorded, host="0.0.0.0", token="s3cret") as board:
        assert board.url.endswith("/?token=s3cret")
        for path, host, status in (
            ("/", "127.0.0.1", 401),
            ("/?token=wrong", "127.0.0.1", 401),
            ("/api/runs", "10.1.2.3", 401),
            ("/?token=s3cret", "evil.example", 403),
            ("/static/main.js", socket.gethostname(), 401),
        ):
            async with asked(board, path, Host=host) as answer:
                assert answer.status == status, (path, host)
        async with asked(board, "/?token=s3cret") as answer:  # redirected to the page, with a cookie
            assert answer.status == 200
            assert "token" not in str(answer.url)
            cookie = answer.history[0].headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie


async def test_an_address_is_opened_whatever_characters_its_token_has(recorded: Path, open_board: OpenBoard) -> None:
    async with (
        open_board(recorded, host="0.0.0.0", token="a&b#c d+e%41/;?=") as board,
        asked(board, board.url.partition(str(board.port))[2]) as answer,
    ):
        assert answer.status == 200


async def test_boards_side_by_side_do_not_log_each_other_out(recorded: Path, open_board: OpenBoard) -> None:
    """Browsers send the cookies of one port to all ports."""
    async with (
        open_board(recorded, host="0.0.0.0", token="one") as one,
        open_board(recorded, host="0.0.0.0", token="other") as other,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser,
    ):
        for path in (f"{one.port}/?token=one", f"{other.port}/?token=other", f"{one.port}/", f"{other.port}/"):
            async with browser.get(f"http://127.0.0.1:{path}") as answer:
                assert answer.status == 200, path


async def test_a_cookie_that_is_no_text_is_a_wrong_one(recorded: Path, open_board: OpenBoard) -> None:
    async with open_board(recorded, host="0.0.0.0", token="s3cret") as board:
        reader, writer = await asyncio.open_connection("127.0.0.1", board.port)
        cookie = board._guard.cookie.encode()
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: " + cookie + b"=\xff\xfe\r\n\r\n")
        status = await reader.readline()
        writer.close()
    assert b" 401 " in status


async def test_every_answer_forbids_scripts_of_others(recorded: Path, open_board: OpenBoard) -> None:
    async with open_board(recorded) as board:
        for path in ("/", "/api/runs", "/static/main.js", "/none"):
            async with asked(board, path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"


# -- a run that is up --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def live(server: EmbeddedServer, connect: Connect) -> AsyncIterator[tuple[Board, JetStreamBus]]:
    """A board for a run of which only the bus can be reached, and that bus."""
    name = f"run-{uuid.uuid4().hex[:8]}"
    bus = await connect(server, run=name)
    overrides = [f"bus.url={server.url}", f"run.name={name}"]
    watched = WatchedRun(None, overrides, token=server.token, verb="board")
    async with Board([watched], host="127.0.0.1", port=0).serving() as board:
        yield board, bus


async def test_a_run_that_is_up_is_shown_from_its_bus(nats_server: EmbeddedServer, connect: Connect) -> None:
    async with live(nats_server, connect) as (board, bus), asked(board, "/api/stream") as answer:
        wait = Wait(what="prompts", on="prompt-source", seconds=1.0)
        await bus.put(ACTORS, Heartbeat(actor="w<b>0", role="rollout-worker", waits=(wait,), beat=1), key="w<b>0")
        told = await the_first(answer, lambda change: change["kind"] == "lanes" and change["new"])
        assert told["new"][0]["name"] == "w<b>0"
        assert told["totals"] == {"waiting": 1}
        await bus.put(METRICS, StepMetrics(step=7, numbers={"reward/mean": 0.75}, staleness=(10, 30)))
        told = await the_first(answer, lambda change: change["kind"] == "rows")
        assert told["rows"] == [{"step": 7, "reward/mean": 0.75, "histograms": {"staleness/histogram": [10, 30]}}]
        evaluation = StepMetrics(step=4, numbers={"evaluation/complete": 1.0, "evaluation/sums/mean@2": 0.5})
        await bus.put(METRICS, evaluation, key=EVALUATION_METRICS)
        told = await the_first(answer, lambda change: change["kind"] == "rows")
        assert (told["rows"][0]["step"], told["rows"][0]["evaluation/sums/mean@2"]) == (4, 0.5)
        await bus.publish(EVENTS, Event(kind="joined", actor="w1", time=5.0), key="w1-joined")
        told = await the_first(
            answer, lambda change: change["kind"] == "marks" and change["marks"][0]["kind"] == "joined"
        )
        assert told["marks"][0]["actor"] == "w1"
        assert (await table(board, "/api/runs"))["runs"][0]["status"] == "up"


async def test_the_last_heartbeat_of_an_actor_can_be_read(nats_server: EmbeddedServer, connect: Connect) -> None:
    async with live(nats_server, connect) as (board, bus), asked(board, "/api/stream") as answer:
        await bus.put(ACTORS, Heartbeat(actor="w0", role="rollout-worker", problem="no space", beat=1), key="w0")
        await the_first(answer, lambda change: change["kind"] == "lanes" and change["new"])
        assert (await table(board, "/api/runs/0/actors/w0"))["problem"] == "no space"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_said_in_one_line(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["board", str(recorded), "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"asyncrl: --port {port}: is taken on 127.0.0.1; give another, or --port 0 for any that is free\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/none"], "no such run folder"),
        (["{}"], "history.jsonl"),
        ([], "name a run folder"),
        (["{}/one", "--port", "70000"], "a port is 0 to 65535"),
        (["{}/one", "--host", "203.0.113.1"], "cannot be listened on"),
        (["{}/one"] * 17, "at most 16 runs"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    arguments: list[str], said: str, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", *(word.format(recorded.parent) for word in arguments)]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


# -- a browser that does not read --------------------------------------------------------------------------------------

LARGE = {"kind": "rows", "rows": ["x" * 50_000]}


@contextlib.asynccontextmanager
async def stalled(board: Board) -> AsyncIterator[asyncio.StreamReader]:
    """A browser that has requested the stream but reads no more than its buffers take."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", board.port))
    connection.sendall(b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
    assert b"200" in await reader.readline()
    while not board.hub.browsers:
        await asyncio.sleep(0)
    yield reader
    writer.close()


async def test_a_browser_that_fell_behind_is_told_to_read_everything_anew(
    recorded: Path, open_board: OpenBoard
) -> None:
    async with open_board(recorded) as board, stalled(board) as reader:
        for _ in range(10 * MOST_WAITING):  # far more than the buffers on both sides take
            board.hub.broadcast(0, LARGE)
            await asyncio.sleep(0)
        async with asyncio.timeout(120):
            while b'"kind":"restart"' not in await reader.read(2**16):
                pass
        assert len(board.hub.browsers) == 1


async def test_a_browser_that_reads_nothing_is_hung_up_on(
    recorded: Path, open_board: OpenBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens another connection and reads everything from the start."""
    monkeypatch.setattr(server, "STALLED_SECONDS", 0.05)
    async with open_board(recorded) as board, stalled(board) as reader:
        async with asyncio.timeout(120):
            while board.hub.browsers:
                board.hub.broadcast(0, LARGE)
                await asyncio.sleep(0)
            with contextlib.suppress(ConnectionError):
                while await reader.read(2**16):
                    pass
        assert not board.hub.browsers, "nothing is kept for it"


async def test_browsers_that_wait_for_a_slow_log_hold_up_no_others(
    with_groups: Path, open_board: OpenBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def slow(self: GroupIndex, group_id: int) -> Any:
        begun.set()
        assert gate.wait(120)
        raise ConfigError(f"group {group_id} is not here")

    monkeypatch.setattr(GroupIndex, "open", slow)

    async def opened() -> int:
        async with asked(board, "/api/runs/0/groups/5") as answer:
            return answer.status

    async with open_board(with_groups) as board:
        waiting = [asyncio.ensure_future(opened()) for _ in range(MOST_ASKED + 8)]
        await asyncio.to_thread(begun.wait, 120)
        refused, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert {one.result() for one in refused} == {503}
        assert len((await table(board, "/api/runs/0/groups"))["rows"]) > 0
        async with asked(board, "/api/stream") as stream:
            write_rows(with_groups, row(31))
            await the_first(stream, lambda change: change["kind"] == "rows")
        gate.set()
        assert sorted(await asyncio.gather(*waiting)) == [404] * MOST_ASKED + [503] * 8


async def test_groups_are_opened_in_one_thread_because_the_first_one_imports_transformers(
    recorded: Path, open_board: OpenBoard
) -> None:
    async with open_board(recorded) as board:
        names = await asyncio.gather(*(board._opening.run(lambda: threading.current_thread().name) for _ in range(8)))
    assert len(set(names)) == 1
