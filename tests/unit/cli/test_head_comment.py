"""The command that a run file's first comment gives for a file that is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli.head_comment import command_that_makes
from tests import ROOT
from tests.harness.command import asyncrl

HEAD = """# A run.
#
#   python -m makers.data runs/a   # the prompts
#   hf download o/n --local-dir models/n

[run]
# python -m makers.other runs/b
"""


@pytest.mark.parametrize(
    ("problem", "command"),
    [
        ("data.path: runs/a/prompts.jsonl: no such data file", "python -m makers.data runs/a"),
        ("model.path: models/n: no such model folder; from the hub", "hf download o/n --local-dir models/n"),
        ("data.path: runs/ab/prompts.jsonl: no such data file", ""),
        ("data.path: runs/b: no such data file", ""),
        ("learner.ranks must be > 0", ""),
        (f"model.path: {'a/' * 3000}: no such model folder", ""),  # the name of no file
    ],
)
def test_a_missing_file_is_made_by_the_command_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text(HEAD)
    assert command_that_makes(file, problem) == command
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "prompts.jsonl").touch()
    assert "makers.data" not in command_that_makes(file, problem)
    assert command_that_makes(tmp_path / "none.toml", problem) == ""


def test_the_command_is_found_beside_prose_and_behind_the_byte_order_mark_of_an_editor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text("#   It isn't in git:\n#   python -m makers.data runs/a   # ours\n", "utf-8-sig")
    assert command_that_makes(file, "data.path: runs/a/p.jsonl: no such data file") == "python -m makers.data runs/a"


def test_a_comment_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("#   make \x1b[31m runs/a\n")
    _, _, err = asyncrl("check", "run.toml", capsys=capsys)
    assert "\x1b" not in err and "make ?[31m runs/a" in err


def test_a_newcomer_who_checks_an_example_before_its_data_are_made_is_told_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = asyncrl("check", ROOT / "examples" / "counting.toml", capsys=capsys)
    assert (code, err.splitlines()[-1].partition("; make it as ")[2]) == (
        2,
        f"{ROOT}/examples/counting.toml says: python -m asyncrl.data.counting_task runs/counting",
    )
