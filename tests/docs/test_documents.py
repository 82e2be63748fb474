"""Files, images and headings that README.md and docs/ refer to exist, and no number placeholder is left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

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
