"""`asyncrl run` and its roles as a user meets them: the last line, and a run of real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.actor_process import in_event_loop
from asyncrl.errors import AsyncRLError
from asyncrl.launch.processes.process_manager import Outcome
from tests.harness.command import asyncrl
from tests.harness.forked import LAUNCHER, ForkServer


def test_a_run_that_is_not_there_is_not_gone_on_with(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise a typo in the name would begin another run, from version 0."""
    there = ("--set", f"run.directory={tmp_path}")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "history.jsonl").touch()
    code, _, err = asyncrl("run", run_file, *there, "--set", "run.name=reel", "--resume", capsys=capsys)
    assert code == 2
    assert err == (
        f"asyncrl: {tmp_path}/reel: no run to continue; in {tmp_path} there are real; leave out --resume to start one\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("role", ["learner", "rollout-worker"])
@pytest.mark.parametrize(
    ("override", "message", "exit_code"),
    [
        ("run.name=tiny", "start that first", 2),
        ("bus.url=nats://127.0.0.1:9", "nats://127.0.0.1:9", 1),  # it may be up later: a launcher tries again
    ],
    ids=["no bus", "unreachable bus"],
)
def test_a_role_without_a_bus_says_what_to_start(
    role: str, override: str, message: str, exit_code: int, run_file: Path, forks: ForkServer
) -> None:
    code, said = forks.call(role, str(run_file), "--set", override, "--set", "bus.connect_seconds=0.3")
    assert code == exit_code
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ('{"step": 12, "metric": "held/mean@1", "value": 0.59499}', "held/mean@1 0.595 at step 12\n"),
        ('{"step": 12, "metric": "other/mean@1", "value": 0.59499}', ""),
        ('{"step": 12, "met', ""),
        ("[]", ""),
    ],
)
def test_a_run_that_is_done_says_where_its_best_model_is_and_how_good(
    found: str,
    line: str,
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "tiny"

    async def launch(*_: Any, **__: Any) -> Outcome:
        (folder / "best").mkdir(parents=True)
        (folder / "best" / "evaluation.json").write_text(found)
        return Outcome(exit_code=0, reason="")

    monkeypatch.setattr("asyncrl.cli.run.launch", launch)
    monkeypatch.setattr("asyncrl.cli.run.check", lambda run: None)
    held = tmp_path / "held.jsonl"
    overrides = [
        f"run.directory={folder.parent}",
        f'evaluation.datasets=[{{name = "held", path = "{held}"}}]',
        "checkpoint.best=held/mean@1",
    ]
    command = ["run", run_file, *(word for item in overrides for word in ("--set", item))]
    expected = f"best model in {folder / 'best'}: {line}" if line else ""
    assert asyncrl(*command, capsys=capsys) == (0, expected, "")


@pytest.mark.parametrize(("code", "bus"), [(0, "nats"), (130, "nats"), (2, "nats"), (0, "memory"), (130, "memory")])
def test_the_last_line_of_a_run_says_where_its_model_is_or_how_to_continue_it(
    code: int,
    bus: str,
    run_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "a b" / "tiny"

    async def launch(*_: Any, **__: Any) -> Outcome:
        (folder / "weights" / "0-9").mkdir(parents=True)
        (folder / "weights" / "0-12").mkdir()
        (folder / "history.jsonl").touch()
        return Outcome(exit_code=code, reason="")

    monkeypatch.setattr("asyncrl.cli.run.launch", launch)
    override = f"run.directory={folder.parent}"
    last_line = {
        (0, "nats"): f"model in {folder}/weights/0-12\n",
        (0, "memory"): f"model in {folder}/weights/0-12\n",
        (130, "nats"): f"continue with: asyncrl run {run_file} --set '{override}' --set bus.kind=nats --resume\n",
    }
    command = ["run", run_file, "--set", override, "--set", f"bus.kind={bus}"]
    assert asyncrl(*command, capsys=capsys) == (code, last_line.get((code, bus), ""), "")


@pytest.mark.slow
def test_a_run_of_real_processes_trains_resumes_and_refuses_to_overwrite(
    run_file: Path, folder: Path, forks: ForkServer
) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | forks.environment

    def run(*extra: str) -> tuple[int, str]:
        command = ("run", str(run_file), "--set", "rollout.workers=2", "--set", LAUNCHER, *extra)
        return forks.call(*command, environment=environment)

    code, said = run("--set", "run.steps=3")
    assert code == 0, said
    assert "done: 3 steps" in said
    assert said.endswith(f"model in {folder / 'runs' / 'tiny' / 'weights' / '0-3'}\n")
    code, said = run("--set", "run.steps=5")
    assert (code, "--resume" in said) == (2, True), said
    code, said = run("--set", "run.steps=5", "--resume")
    assert code == 0, said
    rows = [json.loads(line) for line in (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert max(row["staleness/max"] for row in rows) <= 4
    assert not (folder / "runs" / "tiny" / "bus.json").exists()


def test_sys_exit_in_a_task_of_user_code_is_an_error_and_not_the_end_of_the_work() -> None:
    async def tool() -> None:
        sys.exit(0)

    async def work() -> int:
        await asyncio.gather(asyncio.create_task(tool()))
        return 0

    with pytest.raises(AsyncRLError, match=r"sys\.exit\(0\)"):
        in_event_loop(work())
