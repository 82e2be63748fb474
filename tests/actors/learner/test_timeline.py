"""timeline.jsonl of a loop: times of every step and group, with bounded size; and `asyncrl trace` of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actors.learner.metrics_reporter import MetricsReporter
from asyncrl.actors.learner.sample_files import RotatedLines
from asyncrl.actors.learner.timeline import MOST_ACTORS, Timeline
from asyncrl.audit.timeline import OLDER_FILE, TIMELINE_FILE, read_rows
from asyncrl.messages import Heartbeat, Wait
from tests.harness import fakes
from tests.harness.command import asyncrl
from tests.harness.fakes import Engine, Loop, run_all, worker


def timeline(directory: Path) -> Timeline:
    return Timeline(RotatedLines(directory / TIMELINE_FILE, older=directory / OLDER_FILE, most_bytes=2**20))


async def test_every_group_has_its_times_in_their_order(
    bus_factory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reporter(bus: Any, sinks: Any, **options: Any) -> MetricsReporter:
        return MetricsReporter(bus, sinks, timeline=timeline(tmp_path), **options)

    monkeypatch.setattr(fakes, "MetricsReporter", reporter)
    loop = Loop(await bus_factory(), tmp_path, steps=3)
    await run_all(loop, worker(await bus_factory(), Engine()))
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert len(row["groups"]) == 2
        assert {"wait", "train", "prepare", "export"} <= row["seconds"].keys()
        for _, name, published, began, seconds, reward_seconds, arrived in row["groups"]:
            assert name == "w0"
            assert 0 < published <= began + 0.01 <= arrived + 0.02 <= row["time"] + 0.04
            assert 0 <= reward_seconds <= seconds + 0.001


async def test_loads_are_told_once_and_what_is_no_number_is_none(tmp_path: Path) -> None:
    def beat(name: str, loads: float, **fields: Any) -> Heartbeat:
        numbers = {"weights/loads": loads, "weights/loaded_at": 50.0, "weights/load_seconds": math.inf}
        return Heartbeat(actor=name, role="rollout-worker", policy_version=3, numbers=numbers, **fields)

    waits = (Wait(what="prompts", on="learner", seconds=2.0), Wait(what="a moment", seconds=0.01))
    recorded = timeline(tmp_path)
    await recorded.record(1, {"learner/step_seconds": math.nan}, (), [beat("w0", 1, waits=waits), beat("w1", 0)])
    await recorded.record(2, {}, (), [beat("w0", 1), beat("w1", 1)])
    await recorded.record(3, {}, (), [beat(f"w{number}", 2) for number in range(2 * MOST_ACTORS)])
    rows = rows_of_text(tmp_path)
    assert [[load[:3] for load in row["loads"]] for row in rows[:2]] == [[["w0", 3, 50.0]], [["w1", 3, 50.0]]]
    assert rows[0]["loads"][0][3:] == [0.0, 0.0]
    assert [wait[:3] for wait in rows[0]["waits"]] == [["w0", "prompts", "learner"]]
    assert len(rows[2]["loads"]) == MOST_ACTORS


def rows_of_text(directory: Path) -> list[dict[str, Any]]:
    (directory / "metrics.jsonl").touch()  # marks the folder as a run's
    return read_rows(directory)


def test_the_command_shows_the_evaluations_that_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"incarnation": 0, "seconds": {"train": 1.0}, "groups": [], "loads": [], "waits": []}
    (tmp_path / TIMELINE_FILE).write_text(json.dumps({"step": 2, "time": 102.0} | fields) + "\n")
    rows = [
        {"step": 2, "time": 102.0, "learner/incarnation": 0},
        {"step": 2, "learner/incarnation": 0, "evaluation/complete": 1.0, "evaluation/seconds": 3.0}
        | {"evaluation/time": 106.0},
        # from an older run
        {"step": 1, "learner/incarnation": 0, "evaluation/complete": 1.0, "evaluation/seconds": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = asyncrl("trace", tmp_path, capsys=capsys)
    assert code == 0 and "0 groups, 1 evaluation," in out
    made = json.loads((tmp_path / "trace.json").read_text())
    found = [event for event in made["traceEvents"] if event["name"].startswith("evaluation of")]
    assert [(event["name"], event["ts"], event["dur"]) for event in found] == [
        ("evaluation of version 2", 2_000_000, 3_000_000)  # the trace begins at 101
    ]


def test_the_command_writes_what_a_viewer_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"incarnation": 0, "seconds": {"train": 1.0}, "groups": [], "loads": [], "waits": []}
    lines = [json.dumps({"step": step, "time": 100.0 + step} | fields) for step in range(1, 10)]
    (tmp_path / TIMELINE_FILE).write_text("\n".join([*lines, '{"step": 10, "ti', "[]", '{"step": "x"}']))
    (tmp_path / "metrics.jsonl").touch()
    code, out, _ = asyncrl("trace", tmp_path, "--steps", "3:5", capsys=capsys)
    assert code == 0 and "trace.json: steps 3 to 5, 0 groups" in out
    made = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in made["traceEvents"] if event["ph"] == "X"] == ["step 3", "step 4", "step 5"]
    code, out, _ = asyncrl("trace", tmp_path, "--json", capsys=capsys)
    assert (json.loads(out)["first_step"], json.loads(out)["last_step"]) == (1, 9)
    for arguments, text in {
        ("--steps", "20:30"): "--steps 20:30: timeline.jsonl has steps 1 to 9",
        ("--steps", "5:3"): "--steps 5:3: the first is behind the last",
        ("--steps", "a:b"): "--steps a:b: must be A:B",
        ("--out", str(tmp_path / "no" / "file")): "cannot be written: No such file or directory",
    }.items():
        code, out, err = asyncrl("trace", tmp_path, *arguments, capsys=capsys)
        assert (code, out) == (2, "") and text in err and err.count("\n") == 1
    code, _, err = asyncrl("trace", tmp_path / "nowhere", capsys=capsys)
    assert code == 2 and "holds no run" in err
