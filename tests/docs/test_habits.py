"""What contributors are told to use exists: hooks, markers, and the oldest Python."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tests import ROOT
from tests.conftest import KINDS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_hook_is_a_target_of_make_check() -> None:
    (own,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [hook["entry"] for hook in own["hooks"]] == [f"make {hook['id']}" for hook in own["hooks"]]
    assert {hook["id"] for hook in own["hooks"]} == {"format", "lint", "types", "imports"} <= set(targets)


def test_every_test_is_of_one_kind_by_its_place(request: pytest.FixtureRequest) -> None:
    declared = {line.partition(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    assert KINDS.keys() <= declared
    for item in request.session.items:
        assert len({mark.name for mark in item.iter_markers()} & KINDS.keys()) == 1, item.nodeid
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [file for file in files if not any(file.startswith(places) for places in KINDS.values())] == []


def test_the_oldest_python_is_the_one_that_contributors_are_told() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert f"Python {oldest} is the oldest" in (ROOT / "CONTRIBUTING.md").read_text()
