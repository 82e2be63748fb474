"""Write the pages of docs/reference, each from the code that it describes, and the names in examples/demo.toml.

python docs/reference/make.py           writes every page that is not current
python docs/reference/make.py --check   names them and exits with 1
"""

from __future__ import annotations

import sys
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


def main() -> int:
    outdated = [name for name, page in PAGES.items() if _text(FOLDER / name) != page()]
    for name in outdated:
        print(name)
        if "--check" not in sys.argv[1:]:
            (FOLDER / name).write_text(PAGES[name]())
    return 1 if outdated and "--check" in sys.argv[1:] else 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
