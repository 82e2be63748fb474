"""Make the pictures of the board: two runs of the demo, looked at in a browser.

board.png on a screen of 1400 pixels, board_phone.png on one of 390, and board_answers.png: the answers of a group.

python docs/figures/board.py            two minutes; needs chromium and playwright (bin/install dev)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).parent
FLAGS: Final = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
LARGEST_BYTES: Final = 300_000


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="asyncrl-board-") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        demo = [sys.executable, "-m", "asyncrl.cli.demo"]
        quiet: dict[str, Any] = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL}
        subprocess.run([*demo, "--set", "run.mode=sync"], check=False, **quiet)
        (synchronous,) = (folder / "runs").iterdir()
        synchronous = synchronous.rename(folder / "runs" / "synchronous")
        subprocess.run([*demo, "--set", "run.steps=100"], check=True, **quiet)
        (run,) = (one for one in (folder / "runs").iterdir() if one != synchronous)
        command = [sys.executable, "-m", "asyncrl", "board", str(run), str(synchronous), "--port", "0"]
        board = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert board.stdout is not None
            take_pictures(board.stdout.readline().split()[2])
        finally:
            board.terminate()
            board.wait()


def take_pictures(url: str) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, width, height in (("board", 1400, 1000), ("board_phone", 390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(url)
            page.wait_for_selector("body[data-ready]")
            page.wait_for_timeout(1000)
            save(page, name)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        page.click("[data-tab=groups]")
        page.wait_for_selector("#groups-rows tr")
        page.fill('[aria-label="filter groups"]', str(most_varied(page)))
        page.wait_for_timeout(1000)
        page.locator(f'[data-group="{most_varied(page)}"]').click()
        page.wait_for_selector(".token")
        page.click("[data-mode=logprob]")
        page.wait_for_timeout(300)
        save(page, "board_answers")
        browser.close()


def save(page: Any, name: str) -> None:
    picture = HERE / f"{name}.png"
    page.screenshot(path=picture)
    print(f"{picture}  {picture.stat().st_size:,} bytes")
    if picture.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{picture}: over {LARGEST_BYTES:,} bytes")


def most_varied(page: Any) -> int:
    """The group of the first run whose answers differ most in reward, once it has learned something."""
    asked = "fetch('/api/runs/0/groups?has_text=1&limit=500').then(answer => answer.json())"
    rows = [row for row in page.evaluate(asked)["rows"] if row["step"] > 10 and row["highest"] is not None]
    return int(max(rows, key=lambda row: row["highest"] - row["lowest"])["group_id"])


if __name__ == "__main__":
    main()
