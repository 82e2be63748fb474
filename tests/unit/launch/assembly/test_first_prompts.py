"""A run begins by showing its first prompt, and what is odd about its prompts."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.data.prompts import PromptDataset
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.launch.assembly.data import say_first_prompts
from tests.harness.evaluation import sums


def dataset(tmp_path: Path, *prompts: Any) -> PromptDataset:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "label": "5"}) + "\n" for prompt in prompts))
    section = config.DataSection(path=str(path), shuffle=False, chat_template=True)
    return PromptDataset.open(section, tokenizer=make_tokenizer(), seed=0)


def test_the_learner_shows_the_first_prompt_and_warns_of_oddities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    held_out = dataclasses.replace(sums(), oddities=("evaluation.datasets: held_out: odd",))
    with caplog.at_level(logging.WARNING, logger="asyncrl.data"):
        say_first_prompts(dataset(tmp_path, "2+3", "<image>"), [held_out])
    assert capsys.readouterr().out.splitlines() == [
        'first prompt    "<user>2+3<assistant>" (5 tokens)',
        "its label       '5'",
    ]
    first, second = (record.getMessage() for record in caplog.records)
    assert "data.jsonl:2: has <image> in its text" in first
    assert second == "evaluation.datasets: held_out: odd"


def test_a_row_that_the_run_may_never_reach_does_not_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = dataset(tmp_path, "2+3", [{"role": "user", "content": "a"}])
    rows._tokenizer.chat_template = "{{ messages[0]['content'][9] }}"  # refuses both
    say_first_prompts(rows, [])
    assert capsys.readouterr().out == ""
