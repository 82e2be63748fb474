"""Two processes have the same checksums if they run the same code with the same functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.launch.checks.own_code import checksums
from asyncrl.policies.health.fleet import CODE, FUNCTIONS, TOKENIZER

RUN = config.only_overrides([])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "inner" / "b.py").write_text("b = 2\n")
    return tmp_path


def test_the_same_code_in_another_folder_has_the_same_checksum(
    package: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = package.rename(tmp_path_factory.mktemp("other") / "there")
    (other / "notes.txt").write_text("no code")
    found = checksums(RUN, package=other)[CODE]
    other.rename(package)
    assert checksums(RUN, package=package)[CODE] == found


def test_a_line_or_a_name_that_differs_makes_another_checksum(package: Path) -> None:
    found = [checksums(RUN, package=package)[CODE]]
    (package / "inner" / "b.py").write_text("b = 3\n")
    found.append(checksums(RUN, package=package)[CODE])
    (package / "inner" / "b.py").rename(package / "b.py")
    found.append(checksums(RUN, package=package)[CODE])
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("override", "is_other"),
    [
        ('reward.kind="exact"', True),
        ('reward.rows={code = "json:loads"}', True),
        ('rollout.function="json:loads"', True),
        ('data.reward_key="kind"', True),
        ("rollout.max_running=3", False),  # specific to a machine
        ("reward.timeout_seconds=3", False),
        ('model.path="elsewhere"', False),
    ],
)
def test_functions_differ_by_their_names_and_not_by_what_a_machine_may_have_of_its_own(
    override: str, is_other: bool, package: Path
) -> None:
    there = checksums(config.only_overrides([override]), package=package)[FUNCTIONS]
    assert (there != checksums(RUN, package=package)[FUNCTIONS]) == is_other


def tokenizer(folder: Path, *, vocabulary: dict[str, int], end: int | list[int] = 1, **form: Any) -> float | None:
    """The checksum of a model folder with this tokenizer.  form: of json.dumps"""
    folder.mkdir(exist_ok=True)
    table = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 1, "content": "<eos>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(table, **form))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return checksums(config.only_overrides([f"model.path={folder}"]), package=folder).get(TOKENIZER)


def test_a_tokenizer_differs_by_its_tokens_and_what_ends_an_answer_but_not_by_its_folder_or_form(
    tmp_path: Path,
) -> None:
    ours = tokenizer(tmp_path / "ours", vocabulary={"a": 2, "b": 3})
    assert ours is not None
    assert tokenizer(tmp_path / "same", vocabulary={"b": 3, "a": 2}, indent=1) == ours
    assert tokenizer(tmp_path / "listed", vocabulary={"a": 2, "b": 3}, end=[1]) == ours
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert tokenizer(tmp_path / "both", vocabulary={"a": 2, "b": 3}) == ours
    assert tokenizer(tmp_path / "other", vocabulary={"a": 3, "b": 2}) != ours
    assert tokenizer(tmp_path / "longer", vocabulary={"a": 2, "b": 3}, end=0) != ours


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": 1}'])
def test_of_a_tokenizer_that_cannot_be_read_nothing_is_said(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert TOKENIZER not in checksums(config.only_overrides([f"model.path={tmp_path}"]), package=tmp_path)


def test_of_code_that_cannot_be_read_nothing_is_said(package: Path) -> None:
    (package / "c.py").mkdir()
    assert checksums(RUN, package=package).keys() == {FUNCTIONS}


def test_our_own_code_has_a_checksum() -> None:
    assert checksums(RUN) == checksums(RUN)
    assert checksums(RUN)[CODE] > 0
