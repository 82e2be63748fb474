"""The pages of docs/reference match the code."""

from __future__ import annotations

import importlib
import re

import pytest

from tests import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_every_generated_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REFERENCE)
    assert importlib.import_module("make").outdated() == [], "run python docs/reference/make.py"


def test_every_environment_variable_of_the_code_is_listed() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "asyncrl").rglob("*.py"))
    listed = set(re.findall(r"`(ASYNCRL_\w+)`", (REFERENCE / "cli.md").read_text()))
    assert set(re.findall(r"\"(ASYNCRL_[A-Z_]+)\"", code)) - listed == set()


def test_every_key_of_the_run_file_has_a_meaning() -> None:
    rows = [line for line in (REFERENCE / "configuration.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if not row.rsplit(" | ", 1)[1].strip(" |")] == []


def test_table_of_other_frameworks_names_existing_keys() -> None:
    rows = re.findall(r"(?m)^\|.*", (ROOT / "docs" / "start" / "from_trl_and_verl.md").read_text())
    named = {key for row in rows for key in re.findall(r"`([a-z]+\.[a-z_]+)", row.split(" | ")[0])}
    sections = re.split(r"(?m)^## \[(\w+)\].*$", (REFERENCE / "configuration.md").read_text())[1:]
    keys = {
        f"{section}.{key}"
        for section, text in zip(sections[::2], sections[1::2], strict=True)
        for key in re.findall(r"(?m)^\| `(\w+)` ", text)
    }
    assert named - keys == set()
    recipe = {"run.steps", "data.max_prompt_tokens", "rollout.max_running", "learner.steps_per_batch"}
    assert recipe | {"reference.kl_coef", "evaluation.every_steps"} <= named
