"""docs/start/quickstart.md names every extra of pyproject.toml, and the contents of `all`."""

from __future__ import annotations

import re
import tomllib

from tests import ROOT

PAGE = (ROOT / "docs" / "start" / "quickstart.md").read_text()
ROWS = re.findall(r"(?m)^\| (`[^|]+) \| (.+) \|$", PAGE.partition("### On GPUs")[2].partition("### Check")[0])
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_is_named_and_no_other() -> None:
    assert sorted(name for names, _ in ROWS for name in re.findall(r"`([\w-]+)`", names)) == sorted(EXTRAS)


def test_all_holds_what_the_page_says() -> None:
    (said,) = (meaning for names, meaning in ROWS if names == "`all`")
    (held,) = (re.findall(r"\[(.+)\]", requirement)[0].split(",") for requirement in EXTRAS["all"])
    assert re.findall(r"`([\w-]+)`", said) == held
