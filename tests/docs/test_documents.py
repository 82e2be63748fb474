"""Pages: the links, files, modules and tests that they name exist; capabilities have tests; extras are named."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import pattern_of_line

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PLACEHOLDER = re.compile(r"\b(MEASURED|NUMBERS|TODO|TBD|FIXME|XXX)\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """Return valid link anchors, as GitHub derives them from headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", document.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_broken(link: str, *, document: Path) -> bool:
    if re.match(r"[a-z]+:", link):
        return False
    name, _, anchor = link.partition("#")
    target = (document.parent / name).resolve() if name else document
    return not target.exists() or bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_image_exists(document: Path) -> None:
    assert [link for link in LINK.findall(document.read_text()) if is_broken(link, document=document)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_placeholder_is_left(document: Path) -> None:
    assert [line for line in document.read_text().splitlines() if PLACEHOLDER.search(line)] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(page.read_text())]
    assert [page for page in DOCUMENTS if page not in seen] == []


def test_every_test_that_a_document_names_exists() -> None:
    defined = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = {name for page in DOCUMENTS for name in re.findall(r"(?<!trainer\.)\b(test_\w+)", page.read_text())}
    assert named - defined - files == set()


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


CAPABILITIES = re.findall(
    r"^\| (.+?) \| (tests/\S+) \|$", (ROOT / "docs" / "capabilities.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize("test", [test for _, test in CAPABILITIES])
def test_a_capability_has_its_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    if name:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert name.rpartition("::")[2] in functions


NIGHTLY = [
    line for line in (ROOT / "tests" / "nightly.txt").read_text().splitlines() if line and not line.startswith("#")
]


def test_every_test_that_is_left_to_the_night_exists_and_no_capability_needs_it() -> None:
    texts = {path: (ROOT / path).read_text() for path in {line.partition("::")[0] for line in NIGHTLY}}
    for line in NIGHTLY:
        path, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in texts[path] or not name, line
    later = re.compile("|".join(map(pattern_of_line, NIGHTLY)))
    assert not [test for _, test in CAPABILITIES if later.match(test)]


@pytest.mark.parametrize(
    ("line", "left", "kept"),
    [
        ("a.py::test_x", ("a.py::test_x", "a.py::test_x[1-2]"), ("a.py::test_x_too", "a.py::test_x2[1]")),
        ("a.py::test_x[one", ("a.py::test_x[one]", "a.py::test_x[one-2]"), ("a.py::test_x[two]", "a.py::test_x")),
        ("a.py", ("a.py::test_x",), ("tests/a.py::test_x", "a.pyx::test_x")),
    ],
)
def test_a_test_whose_name_begins_like_one_that_is_left_to_the_night_is_not_left(
    line: str, left: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    pattern = re.compile(pattern_of_line(line))
    assert all(map(pattern.match, left)) and not any(map(pattern.match, kept))


QUICKSTART = (ROOT / "docs" / "start" / "quickstart.md").read_text()
EXTRA_ROWS = re.findall(
    r"(?m)^\| (`[^|]+) \| (.+) \|$", QUICKSTART.partition("### On GPUs")[2].partition("### Check")[0]
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_is_named_and_no_other() -> None:
    assert sorted(name for names, _ in EXTRA_ROWS for name in re.findall(r"`([\w-]+)`", names)) == sorted(EXTRAS)


def test_all_holds_what_the_page_says() -> None:
    (said,) = (meaning for names, meaning in EXTRA_ROWS if names == "`all`")
    (held,) = (re.findall(r"\[(.+)\]", requirement)[0].split(",") for requirement in EXTRAS["all"])
    assert re.findall(r"`([\w-]+)`", said) == held
