"""Runs whose parts are found only by "package.module:name", without changes to asyncrl's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.data import demo_task
from tests.harness.forked import ForkServer

pytestmark = pytest.mark.slow

HERE = "tests.integration.extending"
RUN_FILE = """
[run]
name = "toys"
directory = "{folder}/runs"
steps = 3
[model]
path = "{folder}/model"
[data]
path = "{folder}/prompts.jsonl"
[bus]
{bus}
[engine]
{engine}
device = "cpu"
[reward]
kind = "{here}.toy_functions:reward"
[rollout]
function = "{here}.toy_functions:rollout"
group_size = 2
max_new_tokens = 8
[learner]
backend = "{here}.toy_backend:LimitedBackend"
device = "cpu"
threads = 1
groups_per_batch = 2
options = {{ max_learning_rate = 1e-4 }}
learning_rate = 1e-4
[algorithm]
filters = ["{here}.toy_functions:keep"]
[weights]
{weights}
[launcher]
{launcher}
"""
PLAIN = f'kind = "{HERE}.toy_plain_engine:PlainEngine"'
NOTES = f"""channel = "{HERE}.toy_channel:NotedChannel"
options = {{ note = "mine" }}"""


def asyncrl_run(
    folder: Path,
    forks: ForkServer,
    *,
    bus: str = "",
    launcher: str = "",
    engine: str = PLAIN,
    weights: str = NOTES,
) -> tuple[int, str]:
    """Run `asyncrl run` on the demo's task, with toys for all parts. Return its exit code and its output."""
    demo_task.write(folder)
    run_file = folder / "run.toml"
    parts = {"bus": bus, "launcher": launcher, "engine": engine, "weights": weights}
    run_file.write_text(RUN_FILE.format(folder=folder, here=HERE, **parts))
    return forks.call("run", str(run_file), environment=forks.environment)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs" / "toys" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_parts_that_asyncrl_does_not_know(tmp_path: Path, forks: ForkServer) -> None:
    """Bus, engine, backend, weight channel, reward, rollout function and filter, in one process."""
    bus = f'kind = "{HERE}.toy_bus:CountingBusAdapter"\noptions = {{ log = "{tmp_path}/published" }}'
    code, said = asyncrl_run(tmp_path, forks, bus=bus)
    assert code == 0, said
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all({"reward/digits", "reward/short"} <= row.keys() for row in rows)
    counts = dict(line.split() for line in (tmp_path / "published").read_text().splitlines())
    assert int(counts["trajectories"]) >= 6
    newest = max((tmp_path / "runs" / "toys" / "weights").glob("0-*"), key=lambda path: path.stat().st_mtime)
    assert (newest / "note").read_text() == "mine"


def test_processes_of_a_launcher_send_weights_by_a_channel_and_asyncrl_knows_neither(
    tmp_path: Path, forks: ForkServer
) -> None:
    """No group is stale: the second step needs the weights of the first, and the third those of the second.

    The launcher forks its processes, which saves their imports; that of the page is held by tests/contracts.
    """
    weights = f'''channel = "{HERE}.toy_sockets:SocketChannel"
options = {{ log = "{tmp_path}/taken" }}
[staleness]
max_staleness = 0'''
    engine = f'kind = "{HERE}.toy_engine:LateEngine"\noptions = {{ answer_seconds = 0.01, threads = 1 }}'
    launcher = 'kind = "tests.harness.forked:ForkingLauncher"'
    code, said = asyncrl_run(tmp_path, forks, launcher=launcher, engine=engine, weights=weights)
    assert code == 0, said
    assert len(metrics(tmp_path)) == 3
    assert {"w0 1", "w0 2"} <= set((tmp_path / "taken").read_text().splitlines())


def test_a_run_in_one_process_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_task.write(tmp_path)
    run_file = tmp_path / "run.toml"
    parts = {"bus": 'kind = "memory"', "launcher": "", "engine": PLAIN, "weights": NOTES}
    run_file.write_text(RUN_FILE.format(folder=tmp_path, here=HERE, **parts))
    assert main.main(["run", str(run_file), "--resume"]) == 2
    said = capsys.readouterr().err
    assert said.startswith('asyncrl: --resume: bus.kind = "memory" keeps nothing of a run that has ended')
    assert said.count("\n") == 1
