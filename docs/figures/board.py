"""Make the pictures of docs/guides/board.md: two runs of the demo, looked at in a browser.

python docs/figures/board.py            two minutes; needs chromium and playwright (bin/install dev)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).resolve().parents[2]
FIGURES: Final = Path(__file__).parent
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
        live = subprocess.Popen([*demo, "--set", "run.steps=100"], **quiet)
        run = started(folder / "runs", besides=synchronous)
        command = [sys.executable, "-m", "asyncrl", "board", run, synchronous, "--port", "0"]
        board = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert board.stdout is not None
            pictures(board.stdout.readline().split()[2], live)
        finally:
            for process in (board, live):
                process.terminate()
                process.wait()


def started(runs: Path, *, besides: Path) -> Path:
    """The folder of the run that starts now, once it has a learner."""
    while True:
        for folder in runs.iterdir():
            if folder != besides and (folder / "history.jsonl").exists():
                return folder
        time.sleep(0.2)


def pictures(url: str, live: subprocess.Popen[Any]) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        page.click("[data-tab=lanes]")
        page.get_by_text(re.compile("step (8.|9.|100) of 100")).wait_for(timeout=300_000)
        save(page, "lanes")
        live.wait()
        page.get_by_text("done").nth(1).wait_for()
        page.click("[data-tab=curves]")
        page.wait_for_timeout(1000)
        save(page, "curves")
        page.wait_for_timeout(1500)
        page.click("[data-tab=groups]")
        page.wait_for_selector("#groups-rows tr")
        page.set_viewport_size({"width": 1200, "height": 1000})
        page.fill('[aria-label="filter groups"]', str(most_varied(page)))
        page.wait_for_timeout(1000)
        page.locator(f'[data-group="{most_varied(page)}"]').click()
        page.wait_for_selector(".token")
        page.click("[data-mode=logprob]")
        page.wait_for_timeout(300)
        save(page, "answers")
        browser.close()


def most_varied(page: Any) -> int:
    """The group of the first run whose answers differ most in reward, once it has learned something."""
    asked = "fetch('/api/runs/0/groups?has_text=1&limit=500').then(answer => answer.json())"
    rows = [row for row in page.evaluate(asked)["rows"] if row["step"] > 10 and row["highest"] is not None]
    return int(max(rows, key=lambda row: row["highest"] - row["lowest"])["group_id"])


def save(page: Any, name: str) -> None:
    path = FIGURES / f"board_{name}.png"
    page.screenshot(path=path)
    print(f"{path}  {path.stat().st_size:,} bytes")
    if path.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{path}: over {LARGEST_BYTES:,} bytes")


if __name__ == "__main__":
    main()
