"""A board on a free port, for runs that are up or only recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.actors.learner.history import HISTORY_FILE, History
from asyncrl.actors.learner.sample_files import EVALUATION_FILE, SampleFile
from asyncrl.board.server import Board
from asyncrl.board.watched_run import WatchedRun
from asyncrl.config import record as config_record
from asyncrl.messages.evaluation import FIRST_GROUP_ID
from asyncrl.policies.groups.sample import Answer, GroupSample

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
]
"""Only the board can be reached."""
PATIENCE_MS = 120_000
"""Milliseconds until the page must show what is expected; by default it has five seconds, on a busy machine few."""

OpenBoard = Callable[..., contextlib.AbstractAsyncContextManager[Board]]


def row(step: int, **more: Any) -> dict[str, Any]:
    """Return a row of metrics.jsonl."""
    return {
        "step": step,
        "time": 1e9 + 2.0 * step,
        "reward/mean": step / 100,
        "learner/wait_seconds": 0.5,
        "learner/step_seconds": 1.5,
        "learner/incarnation": 0.0,
        "rollout/w0/idle_ratio": 0.2,
        "staleness/histogram": {"edges": [0.0, 1.0, 2.0, 3.0], "counts": [60, 30, 10]},
        "length/trained": {"edges": [0.0, 1.0, 2.0, 4.0], "counts": [0, 10, 22]},
        "length/dropped": {"edges": [0.0, 1.0], "counts": [0]},
    } | more


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)
    return folder


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a finished run: metrics and timeline of 30 steps of 2 s."""
    folder = write_rows(tmp_path / "one", *(row(step) for step in range(1, 31)))
    with (folder / "timeline.jsonl").open("w") as file:
        for step in range(1, 31):
            end = 1e9 + 2.0 * step
            group = [step, "w0", 0.0, end - 2.0, 1.5, 0.0, end - 0.5]
            times = {"time": end, "seconds": {"wait": 0.5, "train": 1.5}, "groups": [group], "loads": [], "waits": []}
            file.write(json.dumps({"step": step, "incarnation": 0, **times}) + "\n")
    return folder


@pytest.fixture
def open_board() -> OpenBoard:
    """``async with open_board(folder, ...) as board``"""

    @contextlib.asynccontextmanager
    async def open_one(*folders: Path, host: str = "127.0.0.1", token: str = "") -> AsyncIterator[Board]:
        runs = [WatchedRun(folder, [], token="", verb="board") for folder in folders]
        async with Board(runs, host=host, port=0, token=token).serving() as board:
            yield board

    return open_one


@pytest.fixture
async def browse() -> AsyncIterator[Callable[[str], Any]]:
    """``page = await browse(url)``: the page in a real browser without internet access, once it shows something."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed (bin/install dev)")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no chromium: apt-get install chromium, or bin/install dev as root")
    playwright.expect.set_options(timeout=PATIENCE_MS)
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE_MS)
        errors: list[str] = []

        async def browse(url: str) -> Any:
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(PATIENCE_MS)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
            await page.goto(url)
            await page.wait_for_selector("body[data-ready]")
            return page

        yield browse
        await browser.close()
        assert errors == []


HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
"""What a model may write."""


@pytest.fixture
def with_groups(recorded: Path, demo: Path) -> Path:
    """A recorded run with a history and one group with text; an answer of it contains a tool's turn."""
    settings = config_record.as_table(config.only_overrides([f"model.path={demo / 'model'}", "run.steps=30"]))
    history = History(recorded / HISTORY_FILE, incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=settings)
    history.record_trained((0, 1), step=1, sequences=(1, 2), max_staleness=1)
    history.record_lost("dropped", (2,), step=1)
    history.close()
    tokens = (4, 5, 6, 7, 8, 1)
    answer = Answer(
        reward=0.5,
        advantage=-0.25,
        advantages=(1.0, -1.0, 0.0, 0.0, -0.5, -0.5),
        staleness=1,
        finish_reason="stop",
        turns=(("policy", "01"), ("environment", "23"), ("policy", f"4{HOSTILE}")),
        tokens=tokens,
        logprobs=(-0.1, -4.0, 0.0, 0.0, -1.0, -0.5),
        trainer_logprobs=(-0.3, -3.5, None, None, -1.0, -0.5),
        entropies=(0.1, 3.0, None, None, 0.5, 0.5),
        environment=((2, 4),),
        versions=((0, 0, 0), (4, 0, 1)),
    )
    sample = GroupSample(
        group_id=1,
        fate="trained",
        step=1,
        worker="w0",
        prompt=f"What is {HOSTILE}?",
        prompt_tokens=(4,),
        answers=(answer,),
    )
    SampleFile(recorded, most_bytes=2**20).write(sample)
    evaluated = dataclasses.replace(sample, group_id=FIRST_GROUP_ID, fate="evaluated", dataset="sums", label=HOSTILE)
    SampleFile(recorded, name=EVALUATION_FILE).write(evaluated)
    return recorded
