"""A run trained from Python inside an existing event loop, and its records as rows."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pandas
import pytest

import asyncrl
from asyncrl.actors.learner.history import History
from asyncrl.data import demo_task
from tests import ROOT
from tests.harness.forked import ForkServer


@pytest.mark.slow
async def test_a_run_is_trained_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: ForkServer) -> None:
    for name, value in forks.environment.items():
        monkeypatch.setenv(name, value)
    await asyncio.to_thread(demo_task.write, tmp_path)
    # for `python scripts/train.py`: first on its own path, but not on that of its children
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "reward_beside_the_script.py").write_text("from asyncrl.data.demo_task import reward\n")
    monkeypatch.syspath_prepend(scripts)
    run = asyncrl.Run.from_file(
        ROOT / "examples" / "demo.toml",
        overrides={
            "run.directory": str(tmp_path / "runs"),
            "run.steps": 3,
            "model.path": str(tmp_path / "model"),
            "data.path": str(tmp_path / "prompts.jsonl"),
            "learner.backend": "reference",
            "learner.groups_per_batch": 2,
            "rollout.workers": 1,
            "reward.kind": "reward_beside_the_script:reward",
            "checkpoint.keep_log": True,
            "metrics.console": False,
            "launcher.kind": "tests.harness.forked:ForkingLauncher",
        },
    )
    result = await run.train()
    assert (result.reason, result.exit_code, result.steps) == ("done", 0, 3)
    assert result.metrics["step"] == 3
    assert result.folder == run.folder == tmp_path / "runs" / "demo"
    assert result.model == run.folder / "weights" / "0-3"
    with pytest.raises(asyncrl.ConfigError, match="already holds a run"):
        await run.train()

    opened = asyncrl.open_run(run.folder)
    assert opened.settings.run.steps == 3
    assert [row["step"] for row in opened.metrics()] == [1, 2, 3]
    groups = list(opened.groups())
    assert sum(row["outcome"] == "trained" for row in groups) == 6
    rows = list(opened.trajectories(text=True))  # the event loop of this test keeps running
    trained = {row["group_id"] for row in groups if row["outcome"] == "trained"}
    assert trained <= {row["group_id"] for row in rows}
    assert {row["sample"] for row in rows} == set(range(8))
    assert all(_is_flat(row) for row in (*opened.metrics(), *groups, *rows))
    for row in rows:
        assert len(row["tokens"]) == len(row["response_mask"]) == len(row["behavior_logprobs"]) <= 8
        assert 0 <= row["oldest_version"] <= row["newest_version"] <= 3
        assert 0 <= row["reward"] <= 1
        assert set(row["prompt"]) <= set(demo_task.DIGITS)
    assert next(opened.trajectories())["group_id"] == rows[0]["group_id"]  # the remaining rows stay unread


def _is_flat(row: dict[str, object]) -> bool:
    """Return whether pandas can make a column of each value: numbers, strings, and lists of numbers."""
    flat = (int, float, str, bool, type(None))
    return all(
        isinstance(value, flat) or (isinstance(value, list) and all(isinstance(item, flat) for item in value))
        for value in row.values()
    ) and not any(isinstance(value, float) and math.isinf(value) for value in row.values())


def test_pandas_takes_the_rows(tmp_path: Path) -> None:
    settings = {"model": {"path": "m"}, "data": {"path": "d"}}
    history = History(tmp_path / "history.jsonl", incarnation=0)
    history.begin(step=0, kept=0, max_staleness=4, settings=settings)
    history.record_trained((0, 2), step=1, max_staleness=0)
    history.close()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "length": {"edges": [0, 8], "counts": [3]}}\n')
    run = asyncrl.open_run(tmp_path)
    assert pandas.DataFrame(run.metrics()).iloc[0].to_dict() == {
        "step": 1,
        "loss": 0.5,
        "length/edges": [0, 8],
        "length/counts": [3],
    }
    assert pandas.DataFrame(run.groups())["group_id"].tolist() == [0, 2]
