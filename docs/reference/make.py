"""Write the pages of docs/reference, each from the code that it describes, and the names in examples/demo.toml.

python docs/reference/make.py   names and writes every page that is not current
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import algorithms_page
import api_page
import choices
import cli_page
import configuration_page
import megatron_page
import metrics_page
import models_page
import topics_page

FOLDER: Final = Path(__file__).parent
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "configuration.md": configuration_page.page,
    "algorithms.md": algorithms_page.page,
    "cli.md": cli_page.page,
    "metrics.md": metrics_page.page,
    "topics.md": topics_page.page,
    "models.md": models_page.page,
    "megatron.md": megatron_page.page,
    "api.md": api_page.page,
    "../../examples/demo.toml": choices.demo,
}


def main() -> None:
    for name in outdated():
        print(name)
        (FOLDER / name).write_text(PAGES[name]())


def outdated() -> list[str]:
    return [name for name, page in PAGES.items() if _text(FOLDER / name) != page()]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
