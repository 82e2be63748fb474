"""`asyncrl check` reads every row of the data, and says how much of it is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.errors import ConfigError
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
