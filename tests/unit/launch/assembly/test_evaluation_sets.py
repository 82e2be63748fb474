"""Evaluation data sets: every prompt in the order of the file, or the reason why not."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import EvaluationDataset
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.launch.assembly.data import (
    ANSWER_BYTES,
    PROMPT_TOKEN_BYTES,
    TOKEN_BYTES,
    open_set,
    require_space,
    row_limits,
)
from asyncrl.policies.evaluation.questions import EvaluationSet

ROWS = [
    {"prompt": "12", "label": "34", "topic": ["easy", "a/b"]},
    {"prompt": "1234", "label": "5", "topic": "hard"},
    {"prompt": "7", "label": "0", "topic": None},
]


def opened(
    tmp_path: Path, rows: list[dict[str, Any]] = ROWS, *, context: int = 64, tokenizer: Any = None, **keys: Any
) -> EvaluationSet:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_set(
        EvaluationDataset(**{"name": "sums", "path": str(path)} | keys),
        tokenizer=tokenizer or make_tokenizer("01234567"),
        max_new_tokens=8,
        context_tokens=context,
        vocabulary=12,
        limits=row_limits(row_bytes=10_000, labelled_for="exact"),
    )


def test_keeps_prompts_in_order_with_labels_and_tags(tmp_path: Path) -> None:
    made = opened(tmp_path, samples=3, tag_key="topic", temperature=0.5, stop=("7",))
    assert [one.prompt for one in made.questions] == ["12", "1234", "7"]
    assert [one.label for one in made.questions] == ["34", "5", "0"]
    assert [one.tags for one in made.questions] == [("easy", "a-b"), ("hard",), ()]
    assert made.measured.tags == {"easy": 1, "a-b": 1, "hard": 1}
    assert made.measured.has_labels
    assert (made.measured.num_samples, made.sampling.temperature, made.sampling.stop) == (3, 0.5, ("7",))
    assert not made.sampling.is_trained
    assert made.sampling.max_new_tokens == 8


def test_a_tag_may_stand_in_a_table_of_the_row(tmp_path: Path) -> None:
    made = opened(tmp_path, [{"prompt": "1", "label": "2", "metadata": {"topic": "hard"}}], tag_key="metadata.topic")
    assert made.measured.tags == {"hard": 1}


def test_puts_the_system_prompt_before_every_prompt(tmp_path: Path) -> None:
    made = opened(tmp_path, context=1000, chat_template=True, system_prompt="0 0")
    for question, row in zip(made.questions, ROWS, strict=True):
        assert question.prompt.index("0 0") < question.prompt.rindex(str(row["prompt"]))


def test_passes_options_and_tools_to_the_template(tmp_path: Path) -> None:
    row = {"prompt": "12", "label": "34", "tools": [{"name": "add"}]}
    tokenizer = make_tokenizer("01234567")
    tokenizer.chat_template = "{{ tools }}{{ level }}{{ messages[0].content }}"
    keys = {"chat_template": True, "chat_template_options": {"level": 7}, "tools_key": "tools"}
    (question,) = opened(tmp_path, [row], context=1000, tokenizer=tokenizer, **keys).questions
    assert question.prompt == "[{'name': 'add'}]712"


def test_metadata_of_the_data_set_overrides_that_of_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "label": "2", "metadata": {"mode": "train", "id": 1}}, {"prompt": "3", "label": "4"}]
    made = opened(tmp_path, rows, metadata={"mode": "judge"})
    assert [one.metadata for one in made.questions] == [{"mode": "judge", "id": 1}, {"mode": "judge"}]


@pytest.mark.parametrize(
    "keys, problem",
    [
        (
            {"min_new_tokens": 9},
            "min_new_tokens = 9 is over rollout.max_new_tokens (8), which holds where the data set",
        ),
        ({"stop_token_ids": (4, 12)}, "stop_token_ids: 12 is not a token of the model's 12"),
        (
            {"metadata": {"from": dt.date(2026, 1, 1)}},
            "metadata: cannot send this: date is no type of a message; write it as text",
        ),
        ({"max_prompt_tokens": 3}, "prompt 2 has 4 tokens, more than max_prompt_tokens = 3, and an evaluation"),
        ({"max_prompt_tokens": 1}, "prompt 1 has 2 tokens, more than max_prompt_tokens = 1"),
        ({"context": 10}, "prompt 2 has 4 tokens, more than the 2 that an answer leaves of the context"),
        ({"context": 10, "max_prompt_tokens": 30}, "more than the 2 that an answer leaves of the context"),
        ({"rows": ROWS[1:2], "max_prompt_tokens": 3}, "prompt 1 has 4 tokens, more than max_prompt_tokens = 3"),
        ({"max_new_tokens": 64}, "64 new tokens leave no room for a prompt"),
        ({"label_key": "lable"}, "no column 'lable' (label_key); did you mean 'label'"),
        ({"rows": [{"prompt": "1"}]}, "rows.jsonl:1: no label (label_key = 'label'), and reward.kind = 'exact'"),
        ({"rows": [{"prompt": [{"role": "user", "content": "1"}], "label": "2"}]}, "; set chat_template = true"),
    ],
)
def test_refusal_names_the_data_set(keys: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, **keys)
    assert str(error.value).startswith("evaluation.datasets: sums: ")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert "data.label_key" not in str(error.value), "[data] is another table"


def test_refuses_answers_that_do_not_fit_the_log(tmp_path: Path) -> None:
    sets = [opened(tmp_path, samples=7), opened(tmp_path, samples=1)]
    needed = ANSWER_BYTES * (3 * (7 + 1) + 3 * (1 + 1))
    require_space(sets, log_bytes=needed)
    with pytest.raises(ConfigError, match=f"may take {needed:,} bytes, over bus.max_log_bytes .*raise it, or lower"):
        require_space(sets, log_bytes=needed - 1)


def test_whole_recorded_answers_must_fit_the_log(tmp_path: Path) -> None:
    its = opened(tmp_path, samples=7)
    longest = max(len(one.tokens) for one in its.questions)
    counted = ANSWER_BYTES * 3 * (7 + 1)
    whole = 2 * (TOKEN_BYTES * its.sampling.max_new_tokens * 7 + PROMPT_TOKEN_BYTES * longest)
    require_space([its], log_bytes=counted + whole, num_recorded=2)
    with pytest.raises(ConfigError, match="or lower metrics.samples_per_evaluation"):
        require_space([its], log_bytes=counted + whole - 1, num_recorded=2)
