"""A run's metrics reach the places where users look: metrics.jsonl, the console, W&B."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from asyncrl import config
from asyncrl.actors.learner.metrics_reporter import worker_metrics
from asyncrl.messages import Heartbeat
from asyncrl.metrics.sinks import Console, JsonLines, open_sinks
from asyncrl.metrics.wandb import WandB
from asyncrl.policies.metric import Histogram, Metric
from tests import ROOT
from tests.harness.metric_names import is_known

STALENESS = Histogram(edges=(0.0, 1.0, 2.0), counts=(3, 4))
ROW: dict[str, Metric] = {
    "staleness/mean": 0.5,
    "staleness/max": 1.0,
    "staleness/histogram": STALENESS,
    "staleness/dropped_groups": 2.0,
    "weights/w0/lag_versions": 1.0,
    "learner/idle_ratio": 0.25,
    "rollout/idle_ratio": 0.125,
    "reward/mean": 0.75,
}


def test_metrics_jsonl_has_every_number_of_every_step(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "run" / "metrics.jsonl")
    sink.write(1, ROW)
    sink.write(2, {"loss": -0.5, "grad_norm": math.nan})
    sink.close()
    first, second = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first["staleness/histogram"] == {"edges": [0.0, 1.0, 2.0], "counts": [3, 4]}
    assert first["staleness/mean"] == 0.5
    assert second == {"step": 2, "loss": -0.5, "grad_norm": None}


def test_the_console_prints_one_line_a_step() -> None:
    out = io.StringIO()
    Console(steps=40, out=out).write(7, ROW)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step  7/40  reward  0.750")
    assert "staleness  0.5 (max 1)" in line
    assert "dropped 2" in line


def test_the_console_prints_neither_reward_nor_staleness_of_a_run_that_has_none() -> None:
    out = io.StringIO()
    Console(steps=40, out=out).write(7, {"loss": 1.5, "learner/tokens_per_second": 60.0})
    assert out.getvalue().startswith("step  7/40  loss  +1.5000        60 tok/s  ")
    assert not any(word in out.getvalue() for word in ("reward", "staleness"))


def test_metrics_of_workers_are_reported_singly_and_summed() -> None:
    beats = [
        Heartbeat(
            actor=f"w{n}",
            role="rollout-worker",
            policy_version=7 - n,
            numbers={
                "rollout/tokens_per_second": 100.0,
                "rollout/idle_ratio": 0.5 * n,
                "weights/pause_seconds": 0.01 * n,
            },
        )
        for n in range(2)
    ]
    metrics = worker_metrics(beats, policy_version=8)
    assert metrics["rollout/tokens_per_second"] == 200.0
    assert metrics["rollout/idle_ratio"] == 0.25
    assert metrics["weights/pause_seconds"] == 0.01
    assert metrics["weights/lag_versions"] == 2.0
    assert metrics["weights/w0/lag_versions"] == 1.0
    assert all(is_known(name) for name in metrics)


def test_wandb_gets_staleness_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B runs offline; the rows are read back from the file that `wandb sync` would upload."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandB(project="test", name="run", directory=tmp_path, config={"seed": 1}, resume=False)
    sink.write(1, ROW)
    sink.write(2, ROW | {"staleness/mean": 1.5})
    sink.close()
    wandb.teardown()  # ends the process that writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = list(_history(path))
    assert [row["step"] for row in history] == [1, 2]
    assert (tmp_path / "wandb-id").read_text() in path.name  # a resumed learner continues with this id
    assert [row["staleness/mean"] for row in history] == [0.5, 1.5]
    assert history[0]["staleness/histogram/_type"] == "histogram"
    assert history[0]["staleness/histogram/values"] == [3, 4]
    assert history[0]["staleness/histogram/bins"] == [0.0, 1.0, 2.0]
    for name in ("weights/w0/lag_versions", "learner/idle_ratio", "rollout/idle_ratio", "staleness/dropped_groups"):
        assert history[0][name] == ROW[name]


def test_wandb_gets_the_staleness_bound_as_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("asyncrl.metrics.wandb.WandB", lambda **arguments: given.update(arguments) or Console(1))
    overrides = [f"run.directory={tmp_path}", "metrics.wandb=true", 'staleness.max_staleness="auto"']
    run = config.load(ROOT / "examples" / "demo.toml", overrides)
    for sink in open_sinks(run, resume=False):
        sink.close()
    assert given["config"]["staleness"]["max_staleness"] == run.max_staleness


def _history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged rows of a .wandb file: a 7-byte header, then protobuf records in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2 as wire

    for data in _records(path.read_bytes()):
        record = wire.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(data: bytes) -> Iterator[bytes]:
    block, header, place, partial = 32_768, 7, 7, b""
    while place + header <= len(data):
        if block - place % block < header:  # no room for a header: padding up to the next block
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += header
        partial += data[place : place + length]
        place += length
        if kind in (1, 4):  # a whole record, or its last part
            yield partial
            partial = b""


def test_console_prints_a_line_per_evaluation() -> None:
    out = io.StringIO()
    row = {
        "evaluation/aime/mean@8": 0.4,
        "evaluation/aime/mean@8/low": 0.35,
        "evaluation/aime/mean@8/high": 0.45,
        "evaluation/aime/pass@1": 0.4,
        "evaluation/aime/pass@8": 0.75,
        "evaluation/aime[geometry]/mean@8": 0.1,
        "evaluation/complete": 1.0,
        "evaluation/seconds": 12.5,
        "evaluation/lag_steps": 3.0,
    }
    Console(steps=40, out=out).write(20, row)
    Console(steps=40, out=out).write(30, row | {"evaluation/complete": 0.0})
    whole, cut = out.getvalue().splitlines()
    assert whole == (
        "evaluation of step 20: aime reward mean@8 0.400 (0.350 to 0.450), solved pass@8 0.750  12.5 s, 3 steps ago"
    )
    assert cut.endswith("INCOMPLETE")
