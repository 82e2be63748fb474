"""[evaluation]: what is refused, in one line, and which versions are due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.config import EvaluationDataset, EvaluationSection
from asyncrl.config.run_file import from_table
from asyncrl.errors import ConfigError

AIME = {"name": "aime", "path": "aime.jsonl", "samples": 8}


def run_of(evaluation: dict[str, Any], **sections: Any) -> config.RunConfig:
    table = {"model": {"path": ""}, "data": {"path": ""}, "evaluation": {"datasets": [AIME]} | evaluation}
    return from_table(table | sections, where="run.toml")


def test_data_sets_are_an_array_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\npath = "d"\n'
        '[[evaluation.datasets]]\nname = "a"\npath = "a.jsonl"\n'
        '[[evaluation.datasets]]\nname = "b"\npath = "b.jsonl"\nk = [1, 3]\nsamples = 3\nreward = {kind = "exact"}\n'
    )
    section = config.load(path).evaluation
    assert [one.name for one in section.datasets] == ["a", "b"]
    assert section.datasets[1].k == (1, 3)
    assert section.datasets[1].reward is not None and section.datasets[1].reward.kind == "exact"
    assert section.is_on
    assert not EvaluationSection().is_on


@pytest.mark.parametrize(
    "evaluation, problem",
    [
        ({"datasets": [AIME | {"k": [0]}]}, "aime: k = 0: pass@k counts from k = 1"),
        ({"datasets": [AIME | {"k": [1, 16]}]}, "aime: k = 16: pass@k needs k answers to a prompt, and samples = 8"),
        ({"datasets": [AIME, AIME]}, "two are called 'aime'"),
        ({"datasets": [AIME, AIME | {"name": "Aime"}]}, "'aime' and 'Aime' differ in case alone"),
        ({"datasets": [AIME | {"name": "a/b"}]}, "name must be letters"),
        ({"datasets": [AIME | {"sample": 1}]}, "datasets: aime: unknown key 'sample'; did you mean 'samples'?"),
        ({"datasets": [{"name": "aime"}]}, "datasets: aime: missing path"),
        ({"datasets": [AIME, {"path": "a.jsonl"}]}, "datasets: 2: missing name"),
        ({"datasets": [AIME | {"samples": "8"}]}, "datasets: aime: samples must be a whole number"),
        ({"datasets": [AIME | {"reward": {"kinds": "math"}}]}, "datasets: aime: reward: unknown key 'kinds'"),
        ({"datasets": ["aime"]}, "must be a table"),
        ({"datasets": [AIME | {"temperature": 0.0}]}, "temperature = 0 gives the same answer every time"),
        ({"datasets": [AIME | {"repetition_penalty": 0}]}, "aime: repetition_penalty must be > 0 and <= 2, got 0"),
        ({"datasets": [AIME | {"presence_penalty": -3}]}, "aime: presence_penalty must be >= -2 and <= 2, got -3"),
        ({"datasets": [AIME | {"frequency_penalty": 3}]}, "aime: frequency_penalty must be >= -2 and <= 2, got 3"),
        ({"datasets": [AIME | {"stop_token_ids": [-5]}]}, "aime: stop_token_ids must be token ids, >= 0, got [-5]"),
        ({"datasets": [AIME | {"stop": list("abc" * 11)}]}, "aime: stop may hold 32 texts, got 33"),
        ({"datasets": [AIME | {"samples": 4, "k": [2, 2]}]}, "aime: k = 2 is there twice"),
        (
            {"datasets": [AIME | {"min_new_tokens": 20, "max_new_tokens": 8}]},
            "aime: min_new_tokens must be <= max_new_tokens (8), got 20",
        ),
        ({"datasets": [AIME | {"system_prompt": "Be brief."}]}, "system_prompt needs chat_template = true"),
        ({"enough": 0.0}, "enough must be > 0 and <= 1, got 0"),
        ({"share": 0.0}, "share = 0 leaves no engine to evaluate on"),
        ({"share": 1.5}, "share = 1.5 is more than all rollout workers; use at most 1"),
        ({"place": "dedicated", "workers": 0}, "workers = 0 leaves no engine to evaluate on"),
        ({"datasets": [], "every_steps": 5}, "every_steps without"),
    ],
)
def test_invalid_evaluation_is_refused_in_one_line(evaluation: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_of(evaluation)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("run.toml: ")


@pytest.mark.parametrize(
    "best, problem", [("gsm8k/mean@8", "evaluation.datasets are aime"), ("aime", "DATASET/METRIC")]
)
def test_checkpoint_best_names_a_known_data_set(best: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_of({}, checkpoint={"best": best})
    with pytest.raises(ConfigError, match='place = "folder"'):
        run_of({"place": "folder"}, checkpoint={"best": "aime/mean@8"})
    with pytest.raises(ConfigError, match="use enough = 1"):
        run_of({"enough": 0.9}, checkpoint={"best": "aime/mean@8"})


def test_data_sets_that_are_never_evaluated_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_steps, at_start and at_end are all off, so nothing is evaluated"):
        run_of({"at_start": False, "at_end": False})
    run_of({"at_start": False, "at_end": False, "place": "folder"})


def due(section: EvaluationSection, *versions: int) -> list[int]:
    """Return which of the versions, stored in this order, are evaluated."""
    found, before = [], -1
    for version in versions:
        if section.is_due(before=before, now=version):
            found.append(version)
        before = version
    return found


def test_evaluation_is_due_at_the_first_stored_version_from_each_interval() -> None:
    section = EvaluationSection(every_steps=10, datasets=(EvaluationDataset(name="a", path="a"),))
    assert due(section, 0, 1, 9, 10, 11, 19, 23, 29, 30) == [0, 10, 23, 30]
    assert due(section, 12, 15) == [12]  # resumed, and no version was evaluated before
    only_ends = EvaluationSection(datasets=section.datasets)
    assert due(only_ends, 0, 5, 100) == [0]
    assert due(EvaluationSection(every_steps=2, at_start=False, datasets=section.datasets), 0, 1, 2) == [2]


def test_secrets_of_a_data_sets_reward_are_in_no_record() -> None:
    from asyncrl.config import record, secret_values

    judge = {"kind": "remote", "options": {"url": "http://judge", "headers": {"x-api-key": "hush"}}}
    run = run_of({"datasets": [AIME | {"reward": judge}]})
    assert "hush" not in repr(record.as_table(run))
    assert "hush" not in repr(secret_values.settings_without_secrets(run))
    again = record.from_table(record.as_table(run), where="history")
    assert [one.name for one in again.evaluation.datasets] == ["aime"]
