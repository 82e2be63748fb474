"""Every code block of README.md and docs/ works, or states why it is not run.

A fenced block has a language. Requirements by language:

bash      a marker in the line above: ``<!-- run -->`` (``<!-- run: exit code 2 -->``) or ``<!-- not run: REASON -->``.
          Commands that start with ``asyncrl`` must parse, run or not. Blocks that run share one folder, into which the
          files of the tutorial are written first; the tutorial's blocks run first.
toml      is part of a run file: known keys, values in range. ``<!-- not run: REASON -->`` for any other.
python    compiles; tests/docs/test_guides.py and tests/unit/policies import and use the modules that are shown.
text      is output, and is not run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.cli import main
from asyncrl.data import demo_task
from tests import ROOT
from tests.harness.forked import LAUNCHER, ForkServer

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = ROOT / "docs" / "start" / "tutorial.md"
FENCE = re.compile(r"(?m)^(?:<!-- (?P<marker>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL)
LANGUAGES = {"bash", "toml", "python", "text"}
EXIT_CODE = re.compile(r"run: exit code (\d+)$")


STEPS = 8
ASYNCRL = f"""[ "$1" != run ] || set -- "$@" --set {shlex.quote(LAUNCHER)} --set run.steps={STEPS}
exec {sys.executable} -m tests.harness.fork_client "$@"
"""
"""The ``asyncrl`` of this repository. It and a run's processes are forked, and a run is limited to this number of
steps, enough for commands that inspect it."""
PYTHON = f"""if [ "${{1-}} ${{2-}}" = "-m asyncrl.data.demo_task" ]; then
  set -- -m tests.harness.fork_client --module "${{@:2}}"
fi
exec {sys.executable} "$@"
"""
"""The ``python`` of this repository. The demo's model is written by a fork, which has imported torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: Path
    language: str
    text: str
    marker: str = ""

    @property
    def is_run(self) -> bool:
        return self.marker == "run" or EXIT_CODE.match(self.marker) is not None

    @property
    def exit_code(self) -> int:
        said = EXIT_CODE.match(self.marker)
        return int(said[1]) if said else 0

    @property
    def reason(self) -> str:
        return self.marker.removeprefix("not run: ") if self.marker.startswith("not run: ") else ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0] if self.text else ''}"


def blocks_of(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text())
    return [
        Block(page=page, language=block["language"], text=block["text"], marker=block["marker"] or "")
        for block in found
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.is_run]
"""The tutorial's commands run first, because the other pages inspect the run that they leave."""


def commands(text: str) -> list[list[str]]:
    """Return the words of each command, without comments; a backslash at the end continues a line."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"&&|;|\|", line.split(" #")[0])]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def test_every_fence_is_found() -> None:
    for page in PAGES:
        assert len(re.findall(r"(?m)^```", page.read_text())) == 2 * len(blocks_of(page)), page


def test_every_block_has_a_language_that_says_what_it_is() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_every_command_is_run_or_says_why_not() -> None:
    silent = [block for block in BLOCKS if block.language == "bash" and not block.is_run and len(block.reason) < 10]
    assert [str(block) for block in silent] == []


def test_every_asyncrl_command_parses() -> None:
    shown = [words for block in BLOCKS if block.language == "bash" for words in commands(block.text)]
    called = [words[1:] for words in shown if words[0] == "asyncrl" and words[1:] != ["--version"]]
    assert len(called) > 20
    for words in called:
        if "--help" not in words:
            main.parser().parse_args(words)  # SystemExit with the reason where it does not


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml" and not block.reason], ids=str)
def test_every_part_of_a_run_file_has_known_keys_and_values_in_range(block: Block, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(block.text)
    shown = tomllib.loads(block.text)
    data = shown.get("data", {})
    needed = [] if "path" in shown.get("model", {}) else ["model.path=somewhere"]
    needed += [] if data.keys() & {"path", "files", "source"} else ["data.path=somewhere"]
    assert config.load(tmp_path / "run.toml", needed)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python" and not block.reason], ids=str
)
def test_every_python_block_compiles(block: Block) -> None:
    assert compile(block.text, str(block.page), "exec").co_code


def test_the_output_of_check_is_as_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [block.text for block in blocks_of(TUTORIAL)]
    shown = texts[texts.index("asyncrl check my_run.toml\n") + 1].splitlines()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    demo_task.write(Path("runs/demo"))
    try:
        assert main.main(["check", "my_run.toml"]) == 0
    finally:
        sys.modules.pop("my_rewards", None)  # other pages have a module of that name
    assert capsys.readouterr().out.splitlines()[-len(shown) :] == shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which commands run: the files of the tutorial, the examples, and an ``asyncrl`` of this
    repository."""
    made = tmp_path_factory.mktemp("docs")
    (made / "examples").symlink_to(ROOT / "examples")
    for block in blocks_of(TUTORIAL):
        if block.marker == "file":
            (made / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
        elif block.marker.startswith("file: "):
            (made / block.marker.removeprefix("file: ")).write_text(block.text)
    (made / "bin").mkdir()
    for name, command in (("asyncrl", ASYNCRL), ("python", PYTHON)):
        (made / "bin" / name).write_text(f"#!/usr/bin/env bash\n{command}")
        (made / "bin" / name).chmod(0o755)
    return made


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a dozen starts of Python with torch, on a busy machine
def test_blocks_shown_as_run_do_run(folder: Path, forks: ForkServer) -> None:
    """A line that several pages show runs once."""
    environment = {
        **os.environ,
        **forks.environment,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    were_run: set[str] = set()
    for block in sorted(RUN, key=lambda block: block.page != TUTORIAL):
        lines = [line.split(" #")[0].rstrip() for line in block.text.replace("\\\n", " ").splitlines()]
        new = [line for line in lines if line not in were_run]
        were_run.update(new)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(new)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == block.exit_code, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
