"""`asyncrl bill` of a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.audit.run_folder import RecordedRun
from asyncrl.data import demo_task
from asyncrl.policies.audit.entries import HistoryEntry
from tests.harness.command import asyncrl
from tests.harness.learning import demo_run
from tests.integration.test_audit import train_there


@pytest.mark.slow
def test_the_bill_adds_up_and_the_run_reports_its_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_task.write(tmp_path)
    threads = torch.get_num_threads()
    rows = train_there(demo_run(tmp_path, "checkpoint.keep_log=true", "run.steps=3"))
    torch.set_num_threads(threads)
    capsys.readouterr()
    folder = tmp_path / "runs" / "run"
    code, out, err = asyncrl("bill", folder, "--json", "--prompts", "--price", "36", capsys=capsys)
    assert code == 0, err
    bill = json.loads(out)
    for name in ("by_fate", "by_actor"):
        assert sum(row["gpu_seconds"] for row in bill[name].values()) == pytest.approx(bill["gpu_seconds"])
    assert bill["by_fate"]["trained"]["gpu_seconds"] > 0 and {"w0", "learner"} <= bill["by_actor"].keys()
    assert bill["trained_tokens"] == sum(row["length/trained_tokens"] for row in rows)
    assert bill["cost"] == pytest.approx(bill["gpu_seconds"] / 100)
    assert len(bill["by_prompt"]) >= 12 and bill["groups_not_on_the_log"] == 0
    for row in rows:
        assert row["cost/gpu_seconds"] >= row["learner/elapsed_seconds"]
        assert row["cost/gpu_seconds_per_token"] == pytest.approx(
            row["cost/gpu_seconds"] / row["length/trained_tokens"]
        )
    read = RecordedRun.history

    def train_a_step_then(recorded: RecordedRun) -> list[HistoryEntry]:
        """The run is up: a row comes after its line was looked for."""
        found = read(recorded)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(rows[-1] | {"step": 4}) + "\n")
        return found

    monkeypatch.setattr(RecordedRun, "history", train_a_step_then)
    code, out, _ = asyncrl("bill", folder, capsys=capsys)
    assert code == 0 and "GPU-seconds per trained token" in out and "trained" in out and "rolled back" not in out
