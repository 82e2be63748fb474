"""The board's page in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner.sample_files import SAMPLES_FILE
from asyncrl.board.run_state import MOST_ROWS
from asyncrl.board.server import Board
from asyncrl.board.watched_run import WatchedRun
from asyncrl.bus.jetstream.bus import JetStreamBus
from asyncrl.bus.nats_server.server import EmbeddedServer
from asyncrl.messages import Heartbeat, Wait
from asyncrl.messages.topics import ACTORS
from tests.harness.histories import forge
from tests.integration.board.conftest import HOSTILE, OpenBoard, row, write_rows

expect = pytest.importorskip("playwright.async_api", reason="playwright is not installed (bin/install dev)").expect

Browse = Callable[[str], Awaitable[Any]]
Connect = Callable[..., Awaitable[JetStreamBus]]


@contextlib.asynccontextmanager
async def beating(bus: JetStreamBus, beat: Heartbeat) -> AsyncIterator[None]:
    """Keep the heartbeat on the bus, however slow the browser is: the bus drops a heartbeat after 15 s."""
    await bus.put(ACTORS, beat, key=beat.actor)

    async def again() -> None:
        while True:
            await asyncio.sleep(2.0)
            await bus.put(ACTORS, beat, key=beat.actor)

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_two_runs_are_shown_side_by_side_and_a_new_step_appears(
    recorded: Path, tmp_path: Path, open_board: OpenBoard, browse: Browse
) -> None:
    evaluations = (
        {
            "step": step,
            "evaluation/complete": 1.0,
            "evaluation/sums/mean@8": step / 50,
            "evaluation/sums/mean@8/low": 0.0,
            "evaluation/sums/mean@8/high": 1.0,
        }
        for step in (0, 4, 8)
    )
    other = write_rows(tmp_path / "two", *(row(step) for step in range(1, 11)), *evaluations)
    async with open_board(recorded, other) as board:
        page = await browse(board.url)
        titles = await page.locator(".chart h3").all_text_contents()
        assert "Reward" in titles
        assert titles[:2] == ["Reward", "Evaluation on sums: mean@8"]
        reward = page.locator('[data-title="Reward"]')
        await reward.locator("canvas").wait_for()
        assert await reward.locator(".u-series").count() == 3  # the step, and one line per run
        write_rows(recorded, row(31, **{"reward/mean": 0.77}))
        await page.get_by_text("step 31").wait_for()
        # without a pointer, the newest value is shown
        await expect(reward.locator(".u-value").first).to_have_text("31")
        assert "reward 0.77" in await page.locator('[data-run="0"]').text_content()
        await page.locator('[data-run="1"] input').click()
        await expect(reward.locator(".u-series")).to_have_count(2)


async def test_a_run_that_is_hidden_stays_so_when_the_curves_are_read_again(
    recorded: Path, tmp_path: Path, open_board: OpenBoard, browse: Browse
) -> None:
    other = write_rows(tmp_path / "two", row(1))
    async with open_board(recorded, other) as board:
        page = await browse(board.url)
        reward = page.locator('[data-title="Reward"]')
        await expect(reward.locator(".u-series")).to_have_count(3)
        await page.locator('[data-run="1"] input').click()
        await expect(reward.locator(".u-series")).to_have_count(2)
        write_rows(recorded, *(row(step) for step in range(31, 32 + MOST_ROWS)))
        await expect(reward.locator(".u-value").first).to_have_text(str(31 + MOST_ROWS))
        assert await reward.locator(".u-series").count() == 2
        await page.click("[data-tab=staleness]")
        await page.get_by_text("one: staleness of trained tokens").wait_for()
        await expect(page.get_by_text("two: staleness of trained tokens")).to_be_hidden()


async def test_staleness_and_recorded_lanes_are_drawn(recorded: Path, open_board: OpenBoard, browse: Browse) -> None:
    async with open_board(recorded) as board:
        page = await browse(board.url)
        await page.click("[data-tab=staleness]")
        await page.get_by_text("1 versions: 30.0 %").wait_for()
        await page.click("[data-tab=lanes]")
        await page.get_by_text("1–2 of 2 lanes").wait_for()
        await expect(page.get_by_role("button", name="previous")).to_be_hidden()  # only one page
        drawn = "document.querySelector('#lanes-canvas').getContext('2d').getImageData(400, 30, 1, 1).data[3]"
        assert await page.evaluate(drawn) == 255


async def test_a_live_run_has_lanes_and_nothing_that_it_says_becomes_html(
    nats_server: EmbeddedServer, connect: Connect, browse: Browse
) -> None:
    name = f"run-{uuid.uuid4().hex[:8]}"
    bus = await connect(nats_server, run=name)
    wait = Wait(what=HOSTILE, on="load", seconds=1.0)
    beat = Heartbeat(actor=HOSTILE.replace("/", ""), role="rollout-worker", waits=(wait,), problem=HOSTILE, beat=1)
    watched = WatchedRun(
        None, [f"bus.url={nats_server.url}", f"run.name={name}"], token=nats_server.token, verb="board"
    )
    async with beating(bus, beat), Board([watched], host="127.0.0.1", port=0).serving() as board:
        page = await browse(board.url)
        await page.click("[data-tab=lanes]")
        await page.get_by_text("workers: 1 loading").wait_for()
        await page.hover("#lanes-canvas", position={"x": 400, "y": 30})
        await page.get_by_text(f"loading: {HOSTILE}"[:60]).wait_for()
        await page.click("#lanes-canvas", position={"x": 400, "y": 30})
        await expect(page.locator("#actor")).to_contain_text("onerror")
        assert await page.title() == "asyncrl board"
        assert await page.locator("img").count() == 0


async def test_a_group_is_found_opened_and_coloured_by_what_is_recorded(
    with_groups: Path, open_board: OpenBoard, browse: Browse
) -> None:
    async with open_board(with_groups) as board:
        page = await browse(board.url)
        await page.click("[data-tab=groups]")
        rows = page.locator("#groups-rows tr")
        await expect(rows).to_have_count(1)
        await page.get_by_label("with text").click()
        await expect(rows).to_have_count(3)
        await page.select_option('[aria-label="fate"]', "dropped")
        await expect(rows).to_have_count(1)
        await page.select_option('[aria-label="fate"]', "")
        await page.get_by_label("with text").click()
        await page.fill('[aria-label="filter groups"]', "nowhere")
        await page.get_by_text("no group that matches has its text").wait_for()
        await page.fill('[aria-label="filter groups"]', "onerror")
        await expect(rows).to_have_count(1)
        await rows.first.click()
        await expect(page.locator("[data-part=prompt]")).to_have_text(f"What is {HOSTILE}?")
        tokens = page.locator("[data-answer='0'] .token")
        await expect(tokens).to_have_count(4)
        await expect(page.locator(".environment")).to_have_count(1)  # the tool's turn is shown separately
        colours = "tokens => tokens.map(token => token.style.background)"
        first, second, third, _ = await tokens.evaluate_all(colours)
        assert first == second != third  # versions 0 and 1
        await page.click("[data-mode=logprob]")
        first, second, *_ = await tokens.evaluate_all(colours)
        assert first != second
        await page.click("[data-mode=advantage]")
        first, second, *_ = await tokens.evaluate_all(colours)
        assert "40, 150, 70" in first and "200, 60, 40" in second
        await page.click("[data-mode=trainer]")
        first, second, third, _ = await tokens.evaluate_all(colours)
        assert "200, 60, 40" in first and "40, 150, 70" in second  # 0.2 less and 0.5 more than the engine
        assert third == "rgba(40, 150, 70, 0.1)"  # the same as the engine
        await page.get_by_text("the trainer's logprob, when the step trained the token").wait_for()
        await page.click("[data-mode=entropy]")
        first, second, *_ = await tokens.evaluate_all(colours)
        assert "rgba(120, 80, 190, 0.0" in first and "rgba(120, 80, 190, 0.7" in second
        await tokens.nth(1).hover()
        await page.get_by_text("engine logprob -4").wait_for()
        await page.get_by_text("trainer logprob -3.5, +0.5 to the engine's; entropy 3").wait_for()
        assert await page.locator("img").count() == 0
        assert await page.title() == "asyncrl board"


async def test_answers_of_an_evaluation_are_listed_apart_with_what_is_right(
    with_groups: Path, open_board: OpenBoard, browse: Browse
) -> None:
    async with open_board(with_groups) as board:
        page = await browse(board.url)
        await page.click("[data-tab=groups]")
        await page.select_option('[aria-label="fate"]', "evaluated")
        await expect(page.locator("#groups th").first).to_have_text("data set")
        await page.get_by_role("cell", name="sums").click()
        await expect(page.locator("#group h2")).to_have_text("sums, prompt 0 · evaluated at step 1 · worker w0")
        await expect(page.locator("[data-part=label]")).to_contain_text(HOSTILE)
        await expect(page.locator("[data-answer='0'] .token")).to_have_count(4)
        assert await page.locator("img").count() == 0


async def test_where_the_tokenizer_is_not_here_text_is_shown_as_text(
    with_groups: Path, open_board: OpenBoard, browse: Browse
) -> None:
    history = with_groups / "history.jsonl"
    forge(history, "/model", "/nowhere")
    async with open_board(with_groups) as board:
        page = await browse(board.url)
        await page.click("[data-tab=groups]")
        await page.click("#groups-rows tr")
        await page.get_by_text("no text for each token").wait_for()
        await expect(page.locator("[data-answer='0'] .text")).to_have_text(f"01234{HOSTILE}")
        assert await page.locator("img").count() == 0


async def test_what_an_older_asyncrl_did_not_record_is_not_offered(
    with_groups: Path, open_board: OpenBoard, browse: Browse
) -> None:
    path = with_groups / SAMPLES_FILE
    group = json.loads(path.read_bytes())
    for answer in group["answers"]:
        del answer["trainer_logprobs"], answer["entropies"]
    path.write_text(json.dumps(group) + "\n")
    async with open_board(with_groups) as board:
        page = await browse(board.url)
        await page.click("[data-tab=groups]")
        await page.click("#groups-rows tr")
        for mode in ("trainer", "entropy"):
            await expect(page.locator(f"[data-mode={mode}]")).to_be_disabled()
        await page.locator("[data-answer='0'] .token").nth(1).hover()
        await page.get_by_text("engine logprob -4").wait_for()


async def test_the_page_opens_with_whether_each_run_is_healthy_and_fits_a_phone(
    recorded: Path, tmp_path: Path, open_board: OpenBoard, browse: Browse
) -> None:
    parts = {"entropy": 0.5, "reward/format": 0.25}
    short = write_rows(tmp_path / "short", *(row(step, **parts) for step in (1, 2)), row(3, **{"alarm/diverged": 1.0}))
    one = {"evaluation/complete": 1.0, "evaluation/sums/mean@8": 0.3}
    write_rows(short, {"step": 0, **one})
    async with open_board(recorded, short) as board:
        page = await browse(board.url)
        await page.set_viewport_size({"width": 390, "height": 844})
        lines = await page.locator("#health p").all_text_contents()
        assert lines[0] == "✓ one: healthy: no fault and no alarm"
        assert lines[1].startswith("✗ short: not healthy: the learner trains a model that has diverged")
        assert await page.locator(".vital").count() == 1  # only the reward is known
        reward = page.locator('[data-title="Reward"]')
        await expect(reward.locator(".u-value")).to_have_text(["30", "0.3", "0.03"])  # each run's own newest value
        assert await page.locator('[data-title="Parts of the reward"]').count() == 1
        seconds = page.locator('[data-title="Seconds of a step: all, and training alone"]')
        assert "step_seconds (dashed)" in await seconds.text_content()
        await page.wait_for_function("document.documentElement.scrollWidth <= 390")  # the charts have shrunk
        await page.click("[data-tab=lanes]")
        await page.locator("#lanes-info", has_text="lanes").wait_for()
        box = await page.locator("#lanes-canvas").bounding_box()
        assert box["width"] > 300
