"""docs/configuration.md says what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_the_run_file_is_what_the_code_says() -> None:
    command = [sys.executable, DOCS / "make_configuration.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=DOCS.parent).stdout
    assert (DOCS / "configuration.md").read_text() == made, "python docs/make_configuration.py --update"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in (DOCS / "configuration.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if not row.split(" | ", 3)[3].strip(" |")] == []
