"""`asyncrl evaluate`: evaluates saved models without a run, in this process."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

import asyncrl
from asyncrl.actors.learner import sample_files
from asyncrl.cli import main
from asyncrl.config import only_overrides
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.launch.evaluate import Results, SavedModel
from tests import ROOT
from tests.harness.engines import Model

FILE = """
[engine]
kind = "inprocess"
options = {threads = 1}
[rollout]
max_new_tokens = 8
[reward]
kind = "asyncrl.data.demo_task:reward"
"""
DATASETS = """
[[evaluation.datasets]]
name = "counts"
path = "PROMPTS"
samples = 4
limit = 6
[[evaluation.datasets]]
name = "greedy"
path = "PROMPTS"
temperature = 0.0
stop = ["7"]
"""


@pytest.fixture
def datasets(demo: Path, tmp_path: Path) -> Path:
    file = tmp_path / "datasets.toml"
    file.write_text(FILE + DATASETS.replace("PROMPTS", str(demo / "prompts.jsonl")))
    return file


def evaluate(*arguments: object) -> int:
    return main.main(["evaluate", *map(str, arguments)])


def test_a_model_folder_is_evaluated(demo: Path, datasets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_the_run = ("--set", "evaluation.enough=0.1")  # of its training: nothing waits for this evaluation
    assert evaluate(demo / "model", "--datasets", datasets, "--json", *of_the_run) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["evaluation/complete"] == 1.0
    assert row["evaluation/counts/prompts"] == 6
    assert row["evaluation/greedy/prompts"] == 32
    assert 0 <= row["evaluation/counts/mean@4"] < 0.3
    assert row["evaluation/counts/mean@4/low"] <= row["evaluation/counts/mean@4"]
    assert {"evaluation/counts/majority@4", "evaluation/counts/pass@2", "evaluation/greedy/mean@1"} <= set(row)


def test_saved_models_are_evaluated_with_no_run_up(
    demo: Path, datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model is evaluated once; the next call evaluates only new ones."""
    run = tmp_path / "my-run"
    for name in ("0-2", "0-10"):
        shutil.copytree(demo / "model", run / "models" / name)
    (run / "checkpoints").mkdir()
    settings = ("--set", f"run.directory={tmp_path}", "--only", "counts")
    assert evaluate(run, "--datasets", datasets, *settings) == 0
    told = capsys.readouterr().out
    assert told.index("models/0-2") < told.index("models/0-10")
    shutil.copytree(demo / "model", run / "models" / "0-20")
    assert evaluate(run, "--datasets", datasets, *settings) == 0
    told = capsys.readouterr()
    assert "0-20" in told.out and "0-10" not in told.out
    assert "evaluated already" in told.err
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 10, 20]
    answered = list(sample_files.read(run, sample_files.SAVED_MODELS_FILE))
    assert [(row.step, row.model) for row in answered] == [(2, "0-2")] * 4 + [(10, "0-10")] * 4 + [(20, "0-20")] * 4
    assert len({row.identity for row in answered}) == 12
    assert all(row.dataset == "counts" and len(row.answers) == 4 and row.label for row in answered)


def test_every_answer_is_written_to_the_file_that_is_asked_for(
    demo: Path, datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.jsonl"
    command = (demo / "model", "--datasets", datasets, "--only", "counts", "--answers", file, "--json")
    assert evaluate(*command) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (result,) = json.loads(capsys.readouterr().out)
    assert len(rows) == 6
    rewards = [answer["reward"] for row in rows for answer in row["answers"]]
    assert sum(rewards) / len(rewards) == pytest.approx(result["evaluation/counts/mean@4"])
    assert evaluate(*command) == 2
    assert f"--answers {file}: cannot be made: File exists; name another file" in capsys.readouterr().err
    assert evaluate(*command[:-2], tmp_path / "nowhere" / "answers.jsonl") == 2
    assert "cannot be made: No such file or directory" in capsys.readouterr().err


def test_a_try_that_fails_leaves_no_file_that_blocks_the_next_one(
    demo: Path, datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.jsonl"
    command = (demo / "model", "--datasets", datasets, "--only", "counts", "--answers", file)
    assert evaluate(*command, "--set", "rollout.max_new_tokens=100000") == 2
    assert not file.exists()
    file.touch()  # as a try leaves it that was killed
    assert evaluate(*command) == 0
    assert len(file.read_text().splitlines()) == 6


def test_answers_that_are_lost_are_said_and_no_success(
    demo: Path, datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: sample_files.SampleFile, sample: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(sample_files.SampleFile, "write", full)
    file = tmp_path / "answers.jsonl"
    assert evaluate(demo / "model", "--datasets", datasets, "--only", "counts", "--answers", file) == 1
    assert f"{file}: 6 prompts are missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_keeps_the_models_that_are_due_and_they_are_evaluated_when_it_is_over(
    demo: Path, datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """place = "folder": the run itself evaluates nothing; `asyncrl evaluate RUN_DIR` finds all that it keeps."""
    run = asyncrl.Run.from_file(
        ROOT / "examples" / "demo.toml",
        overrides={
            "bus.kind": "memory",
            "run.directory": str(tmp_path),
            "run.name": "kept",
            "run.steps": 5,
            "run.mode": "sync",  # otherwise a version may be skipped, and the next one kept instead
            "model.path": str(demo / "model"),
            "data.path": str(demo / "prompts.jsonl"),
            "learner.backend": "reference",
            "learner.groups_per_batch": 2,
            "rollout.workers": 1,
            "evaluation.place": "folder",
            "evaluation.every_steps": 2,
            "evaluation.datasets": [{"name": "counts", "path": str(demo / "prompts.jsonl")}],
            "metrics.console": False,
        },
    )
    result = asyncio.run(run.train())
    assert (result.exit_code, result.steps) == (0, 5)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert not any(name.startswith("evaluation/") for row in rows for name in row)
    kept = [path.name for path in (run.folder / "models").iterdir()]
    capsys.readouterr()
    assert evaluate(run.folder, "--datasets", datasets, "--only", "counts", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in found] == [2, 4, 5], f"every second one and the newest; {kept} were kept"
    assert all(row["evaluation/complete"] == 1.0 for row in found)


def test_a_model_is_evaluated_again_when_the_questions_or_their_reward_have_changed(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are as many questions as before, under the same name."""
    prompts, datasets, run = tmp_path / "prompts.jsonl", tmp_path / "datasets.toml", tmp_path / "my-run"
    lines = (demo / "prompts.jsonl").read_text().splitlines(keepends=True)
    datasets.write_text(f'{FILE}[[evaluation.datasets]]\nname = "counts"\npath = "{prompts}"\nlimit = 2\n')
    shutil.copytree(demo / "model", run / "models" / "0-2")
    (run / "checkpoints").mkdir()
    own = "asyncrl.data.demo_task:reward"
    for asked, reward in ((lines, own), (lines[1:], own), (lines[1:], "exact")):
        prompts.write_text("".join(asked))
        settings = ("--set", f"run.directory={tmp_path}", "--set", f"reward.kind={reward}")
        assert evaluate(run, "--datasets", datasets, *settings) == 0
        assert "evaluated already" not in capsys.readouterr().err
        assert evaluate(run, "--datasets", datasets, *settings) == 0
        assert "evaluated already" in capsys.readouterr().err
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert len({row["questions"] for row in rows}) == len(rows) == 3


AWAY = """
import pathlib
def reward(sample):
    if pathlib.Path(sample.metadata["away"]).exists():
        raise OSError("the judge is away")
    return 1.0
"""


def test_a_model_is_evaluated_again_until_every_prompt_has_an_answer(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "away_reward.py").write_text(AWAY)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts, datasets, run = tmp_path / "prompts.jsonl", tmp_path / "datasets.toml", tmp_path / "my-run"
    away = tmp_path / "away"
    rows = [{"prompt": "01", "metadata": {"away": str(path)}} for path in (away, tmp_path / "never")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.write_text(f'{FILE}[[evaluation.datasets]]\nname = "counts"\npath = "{prompts}"\n')
    shutil.copytree(demo / "model", run / "models" / "0-2")
    (run / "checkpoints").mkdir()
    command = (run, "--datasets", datasets, "--set", "reward.kind=away_reward:reward")
    away.touch()
    for _ in range(2):
        assert evaluate(*command) == 1
        told = capsys.readouterr()
        assert f"{run / 'models' / '0-2'}: some prompts have no answer; the next call evaluates it again" in told.err
        assert "INCOMPLETE" in told.out
    away.unlink()
    assert evaluate(*command) == 0
    assert "evaluated already" not in capsys.readouterr().err
    assert evaluate(*command) == 0
    assert "evaluated already" in capsys.readouterr().err
    rows = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["evaluation/complete"] for row in rows] == [0.0, 0.0, 1.0]


def test_a_result_that_a_kill_cut_short_does_not_damage_the_next_one(demo: Path, tmp_path: Path) -> None:
    results = Results(tmp_path)
    (tmp_path / "evaluations.jsonl").write_text('{"model": "0-1", "ques')
    settings = only_overrides([f"model.path={demo / 'model'}"])
    results.add(SavedModel(folder=tmp_path / "1-16"), settings, {"evaluation/complete": 1.0}, questions="q")
    assert [row["model"] for row in results.rows()] == ["1-16"]
    assert results.has(SavedModel(folder=tmp_path / "1-16"), questions="q")


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("sglang")
def test_a_model_folder_is_evaluated_on_sglang(
    old_sglang_server: SGLangEngine, old_model: Model, datasets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a server of the user's; includes the stop text of the greedy data set. One of its own is that of
    tests/integration/sglang/test_adapters.py."""
    command = (old_model.folder, "--datasets", datasets, "--json")
    attached = ("--set", "engine.kind=sglang", "--set", "engine.device=cpu")
    assert evaluate(*command, *attached, "--set", f'engine.options={{url="{old_sglang_server.url}"}}') == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["evaluation/complete"], row["evaluation/mixed"]) == (1.0, 0.0)
    assert (row["evaluation/counts/prompts"], row["evaluation/greedy/prompts"]) == (6, 32)
    assert evaluate(*command, "--only", "greedy") == 0
    (here,) = json.loads(capsys.readouterr().out)
    # the likeliest tokens are the same except for near ties
    for metric, near in (("mean@1", 0.05), ("length_mean", 0.5)):
        assert row[f"evaluation/greedy/{metric}"] == pytest.approx(here[f"evaluation/greedy/{metric}"], abs=near)


INTERRUPTING = """
import os, signal, time
def reward(sample):
    if not os.path.exists(sample.metadata["once"]):
        open(sample.metadata["once"], "w").close()
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return 0.0
"""


def test_an_evaluation_that_is_interrupted_says_so_and_notes_nothing(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts, datasets = tmp_path / "prompts.jsonl", tmp_path / "datasets.toml"
    row = {"prompt": "01", "metadata": {"once": str(tmp_path / "once")}}
    prompts.write_text("".join(json.dumps(row) + "\n" for _ in range(32)))
    datasets.write_text(FILE + f'[[evaluation.datasets]]\nname = "counts"\npath = "{prompts}"\n')
    assert evaluate(demo / "model", "--datasets", datasets, "--set", "reward.kind=interrupting:reward") == 130
    told = capsys.readouterr()
    assert told.err.endswith(f"asyncrl evaluate: interrupted; nothing is recorded of {demo / 'model'}\n")
    assert told.out == ""


SLOW = """
import time
def reward(sample):
    time.sleep(0.2)
    return 0.0
"""


def test_a_slow_evaluation_says_how_far_it_is_and_what_it_waits_for(
    demo: Path, datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_reward.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("asyncrl.launch.evaluate.SAY_SECONDS", 0.1)
    settings = ("--only", "counts", "--set", "reward.kind=slow_reward:reward")
    assert evaluate(demo / "model", "--datasets", datasets, *settings) == 0
    assert re.search(
        r"^[0-6] of 6 prompts are answered; it waits for: .*its reward function", capsys.readouterr().err, re.M
    )


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["--only", "aime"], "has no such data set; it has counts, greedy"),
        (["--set", "engine.kind=nothing"], "engine.kind"),
        (["--set", 'evaluation.datasets=[{name="a", path="gone.jsonl"}]'], "a: path gone.jsonl: no such data file"),
        (["--set", 'evaluation.datasets=[{name="a", path="gone.jsonl", k=[2]}]'], "k = 2: pass@k needs k answers"),
        (["--set", "evaluation.datasets=[]"], "names no data set"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], problem: str, demo: Path, datasets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(demo / "model", "--datasets", datasets, *arguments) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert len(told.strip().splitlines()) == 1


def test_what_is_no_model_is_refused(datasets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(tmp_path, "--datasets", datasets) == 2
    assert "is neither a run's folder nor a model's" in capsys.readouterr().err


def test_a_file_without_a_reward_is_refused_since_the_default_may_not_be_the_runs(
    demo: Path, datasets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _, after = datasets.read_text().partition("[reward]")
    datasets.write_text(before + after.partition("\n\n")[2])
    assert evaluate(demo / "model", "--datasets", datasets) == 2
    assert "data set 'counts' names no reward, and there is no [reward]" in capsys.readouterr().err
