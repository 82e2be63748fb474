"""Every file, module and test that pages, comments and docstrings name exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
SOURCES = [
    path
    for folder in ("asyncrl", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".toml") and path != Path(__file__)
]
FOLDERS = "asyncrl|tests|benchmarks|examples|docs|bin"
FILE = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.-]+\.(?:py|md|toml|jsonl|png))\b")
INSIDE = re.compile(
    r"(?<![\w/.-])((?:actors|adapters|audit|backends|bus|cli|config|engines|environments|launch|messages|metrics|policies|weights)/[\w/]+\.py)\b"
)
MODULE = re.compile(r"\basyncrl(?:\.[a-z_]\w*)+(?:[.:][A-Za-z_]\w*)*")
NOT_MODULES = re.compile(r"asyncrl\.(<|RUN|w\d|run\b.*\.toml)|asyncrl\.\w+\.(prompts|trajectories)")
WRITTEN_BY_RUNS = re.compile(r"docs/results/|examples/(data|out)")
"""A benchmark may write to a place that is not kept."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    assert missing(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_that_a_page_names_can_be_imported(page: Path) -> None:
    named = {name for name in MODULE.findall(page.read_text()) if not NOT_MODULES.match(name)}
    assert sorted(name for name in named if not exists(name)) == []


def test_every_file_that_a_comment_names_exists() -> None:
    wrong = {str(path.relative_to(ROOT)): missing(path.read_text()) for path in SOURCES}
    assert {where: names for where, names in wrong.items() if names} == {}


def missing(text: str) -> list[str]:
    """Return the files that ``text`` names, from the root or from asyncrl/, and that do not exist."""
    absent = [name for name in FILE.findall(text) if not (ROOT / name).exists()]
    absent += [name for name in INSIDE.findall(text) if not (ROOT / "asyncrl" / name).exists()]
    return sorted({name for name in absent if not WRITTEN_BY_RUNS.match(name)})


def exists(name: str) -> bool:
    """Return whether a module or its attribute exists: ``asyncrl.cli.demo``, ``asyncrl.messages.topics:PROMPTS``."""
    parts = re.split(r"[.:]", name)
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
