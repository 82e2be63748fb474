"""What bin/count-imports counts and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "bin" / "count-imports"


def counted(root: Path, files: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
    """Run the script on a repository of these files; return its exit code and its lines."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ran = subprocess.run([sys.executable, SCRIPT, "--root", root, *arguments], capture_output=True, text=True)
    assert ran.stderr == ""
    return ran.returncode, ran.stdout.splitlines()


def test_every_way_to_import_counts_and_a_pair_of_rooms_counts_once(tmp_path: Path) -> None:
    files = {
        "asyncrl/__init__.py": "",
        "asyncrl/errors.py": "import os\n",
        "asyncrl/bus/__init__.py": "from ..errors import Oops\n",
        "asyncrl/bus/memory.py": "import asyncrl.errors\n\ndef late():\n    from asyncrl.launch import build\n",
        "asyncrl/launch/__init__.py": "",
        "asyncrl/launch/build.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncrl.errors\n",
        "benchmarks/speed.py": "from asyncrl.launch.build import Run\n",
    }
    code, lines = counted(tmp_path, files, "--arrows")
    assert lines == [
        "benchmarks -> run (1)",
        "bus -> errors (2)",
        "bus -> run (1)",
        "run -> errors (1)",
        "rooms 5 (at most 28)",
        "arrows 4 (at most 120)",
        "circles 0 (none allowed)",
    ]
    assert code == 0


def test_files_that_import_each_other_are_named_and_refused(tmp_path: Path) -> None:
    files = {
        "asyncrl/bus/a.py": "from asyncrl.bus import b",
        "asyncrl/bus/b.py": "from asyncrl.bus.c import x",
        "asyncrl/bus/c.py": "def f():\n    import asyncrl.bus.a",
    }
    code, lines = counted(tmp_path, files)
    assert lines[0] == "circle: asyncrl.bus.a <-> asyncrl.bus.b <-> asyncrl.bus.c"
    assert lines[-1] == "circles 1 (none allowed)"
    assert code == 1


def test_too_many_rooms_are_refused(tmp_path: Path) -> None:
    code, lines = counted(tmp_path, {f"asyncrl/room{n}.py": "" for n in range(29)})
    assert lines == ["rooms 29 (at most 28)", "arrows 0 (at most 120)", "circles 0 (none allowed)"]
    assert code == 1


def test_too_many_arrows_are_refused(tmp_path: Path) -> None:
    # 16 rooms, each importing all before it: 16 * 15 / 2 = 120 arrows. An additional room adds one more.
    files = {f"asyncrl/r{n}.py": "".join(f"import asyncrl.r{m}\n" for m in range(n)) for n in range(16)}
    assert counted(tmp_path, files) == (
        0,
        ["rooms 16 (at most 28)", "arrows 120 (at most 120)", "circles 0 (none allowed)"],
    )
    assert counted(tmp_path, {"asyncrl/last.py": "import asyncrl.r0\n"})[0] == 1
