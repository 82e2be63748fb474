"""Checks of data before a run: rows of prompts, and the data sets of evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.data import open_evaluation_sets
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import Summary, summarize


def summary_of(run_file: Path, *overrides: str) -> Summary:
    return summarize(config.load(run_file, overrides))


def test_refuses_rows_without_the_label_that_the_reward_needs(run_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "unlabelled.jsonl"
    data.write_text('{"prompt": "12"}\n')
    summary = summary_of(run_file, f"data.path={data}")  # a user's own reward may need only the prompt
    assert "labels            none in 'label' (data.label_key)" in str(summary)
    assert "none in 'label'" not in str(summary_of(run_file))
    for kind in ("exact", "math"):
        with pytest.raises(ConfigError, match=f"unlabelled.jsonl:1: no label .* and reward.kind = '{kind}' compares"):
            summary_of(run_file, f"data.path={data}", f"reward.kind={kind}")
    matching = ("reward.kind=regex", 'reward.options={pattern="1", compare="match"}')
    summary_of(run_file, f"data.path={data}", *matching)


def test_checks_a_row_for_the_reward_that_it_names(run_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "named.jsonl"
    lines = ({"prompt": "1", "rm": kind, "label": label} for kind, label in (("", "Z"), ("gpqa", "B"), ("gpqa", "Z")))
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="named.jsonl:3: 'label': "):
        summary_of(run_file, f"data.path={data}", "data.reward_key=rm")


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        (
            [{"who": "far"}, {"who": "art"}],
            [],
            r"taught.jsonl:2: 'who' names the teacher 'art', .* none of \[servers\]: far",
        ),
        ([{"who": "far"}, {}], [], "taught.jsonl:2: its metadata has no 'who' .teacher.key.; write one of far"),
        ([{}, {}], ["teacher.server=far"], "teacher.key = 'who': no row has it in its metadata"),
    ],
)
def test_checks_the_teacher_that_a_row_names(
    run_file: Path, tmp_path: Path, rows: list[dict[str, str]], settings: list[str], says: str
) -> None:
    data = tmp_path / "taught.jsonl"
    data.write_text("".join(json.dumps({"prompt": "1", "label": "1", "metadata": row}) + "\n" for row in rows))
    opd = ["algorithm.name=opd", "algorithm.options={}", "servers.far.url=http://h/v1", "teacher.key=who"]
    with pytest.raises(ConfigError, match=says):
        summary_of(run_file, f"data.path={data}", *opd, *settings)


def test_refuses_data_whose_prompts_are_all_too_long(run_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "long.jsonl"
    data.write_text('{"prompt": "1234567890"}\n')
    with pytest.raises(ConfigError, match="long.jsonl: all 1 prompts have more than data.max_prompt_tokens = 4 tokens"):
        summary_of(run_file, f"data.path={data}", "data.max_prompt_tokens=4")


def test_refuses_data_that_ends_before_one_batch(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text(
        "".join((run_file.parent / "prompts.jsonl").read_text().splitlines(keepends=True)[:3])
    )
    few = [f"data.path={tmp_path / 'few.jsonl'}", "run.steps=100"]
    with pytest.raises(ConfigError, match=r"data.epochs: 3 rows x 1 are no batch of learner.groups_per_batch = 4"):
        summary_of(run_file, *few, "data.epochs=1")
    assert summary_of(run_file, *few, "data.epochs=3").num_trained_prompts == 8  # of 9 prompts


BEST = 'checkpoint.best="held_out/majority@4"'


def evaluated(rows: Path) -> str:
    return f'evaluation.datasets=[{{name = "held_out", path = "{rows}", samples = 4}}]'


def warnings(run_file: Path, *overrides: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    rows = run_file.parent / "prompts.jsonl"
    check(config.load(run_file, [evaluated(rows), *overrides]))
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("evaluation.")]


@pytest.mark.parametrize(
    ("workers", "share", "said"),
    [
        (2, 0.25, "0.25 of 2 rollout workers is less than one, and an evaluation holds back one, 50 % of them; use "
         'rollout.workers = 4 or more, share = 0.5, or place = "dedicated"'),
        (1, 0.25, "0.25 of 1 rollout worker is less than one, and an evaluation holds back one, 100 % of them; use "
         'rollout.workers = 4 or more, share = 1.0, or place = "dedicated"'),
        (3, 0.3, "0.3 of 3 rollout workers is less than one, and an evaluation holds back one, 33 % of them; use "
         'rollout.workers = 4 or more, share = 0.3334, or place = "dedicated"'),
    ],
)  # fmt: skip
def test_warns_of_a_share_of_less_than_one_worker(
    run_file: Path, caplog: pytest.LogCaptureFixture, workers: int, share: float, said: str
) -> None:
    keys = (f"rollout.workers={workers}", f"evaluation.share={share}")
    assert warnings(run_file, *keys, caplog=caplog) == [f"evaluation.share: {said}"]
    mended = said.partition("share = ")[2].partition(",")[0]
    caplog.clear()
    assert warnings(run_file, keys[0], f"evaluation.share={mended}", caplog=caplog) == []
    assert warnings(run_file, "rollout.workers=4", keys[1], caplog=caplog) == []


@pytest.mark.parametrize("place", ["dedicated", "folder"])
def test_dedicated_engines_have_no_share(run_file: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    keys = ("rollout.workers=1", f'evaluation.place="{place}"')
    assert warnings(run_file, *keys, caplog=caplog) == []


def test_refuses_a_best_model_by_majority_without_labels(run_file: Path, tmp_path: Path) -> None:
    """`asyncrl check` and the learner refuse it with the same function, which opens the data sets."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": "1", "label": "2"}, {"prompt": "12"}, {"prompt": "123", "label": "4"}]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = config.load(run_file, [evaluated(rows), BEST])
    for reads in (summarize, open_evaluation_sets):
        with pytest.raises(ConfigError) as refused:
            reads(run)  # type: ignore[operator]
        assert str(refused.value) == (
            "checkpoint.best: held_out/majority@4 needs a label in every row of evaluation.datasets held_out, and "
            "prompt 2 has none (label_key); label it, or name one of mean@4, pass@1, pass@2, pass@4, pass^1, pass^2, "
            "pass^4"
        )
    first_only = evaluated(rows).replace("samples = 4", "samples = 4, limit = 1")
    open_evaluation_sets(config.load(run_file, [first_only, BEST]))
    open_evaluation_sets(config.load(run_file, [evaluated(rows), 'checkpoint.best="held_out/mean@4"']))
