"""AReaL and what it imports that a GPU host lacks, in one folder that can be packed and carried there.

    python -m benchmarks.gpu.peers.bring_up FOLDER        on a machine with a package registry; about 3 MB packed

Its wheels are the registry's. EDITS is all that is changed in them; packages that are imported and never used are
stand-ins of one line. The host has the rest: torch, SGLang, transformers and what benchmarks.gpu needs itself.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VERSION: Final = "1.0.4"

REQUIREMENTS: Final = (
    f"areal=={VERSION}",
    "omegaconf==2.4.0.dev2",
    "hydra-core==1.4.0.dev1",
    "torchdata==0.11.0",
    "colorlog==6.12.0",
    "tenacity==9.2.1",
    "flask==3.1.3",
    "werkzeug==3.1.9",
    "blinker==1.9.0",
    "itsdangerous==2.2.0",
    "lark==1.3.1",
    "jiter==0.15.0",
)

STAND_INS: Final = ("ray", "wandb", "swanlab", "trackio", "tensorboardX", "datasets")

STAND_IN: Final = '''"""Imported by AReaL, not used: every name in it does nothing."""


class Nothing:
    def __init__(self, *given, **named):
        pass

    def __call__(self, *given, **named):
        return given[0] if len(given) == 1 and callable(given[0]) else None

    def __getattr__(self, name):
        return __getattr__(name)


def is_initialized():
    return False


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing if name[0].isupper() else Nothing()
'''

RAY_MODULES: Final = ("exceptions", "runtime_env", "util", "util/placement_group", "util/scheduling_strategies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """``old`` becomes ``new`` in a file of AReaL, wherever it stands there."""

    file: str
    old: str
    new: str
    why: str


EDITS: Final = (
    Edit(
        file="engine/sglang_remote.py",
        old='"master_port": str(meta.nccl_master_port)',
        new='"master_port": int(meta.nccl_master_port)',
        why="master_port is sent as an integer, as SGLang 0.5.16 wants it",
    ),
    Edit(
        file="engine/sglang_remote.py",
        old='in meta_info["output_token_logprobs"]]',
        new='in meta_info.get("output_token_logprobs") or []]',
        why="an abort without logprobs counts as empty: SGLang 0.5.16 says it so",
    ),
    Edit(
        file="utils/network.py",
        old="    try:\n        hostname = socket.gethostname()",
        new='    return "127.0.0.1"\n    try:\n        hostname = socket.gethostname()',
        why="processes meet on the loopback address",
    ),
    Edit(
        file="trainer/ppo/actor.py",
        old="        seqlens = attn_mask.sum(-1)\n\n        ########## Logging code starts",
        new="        seqlens = attn_mask.sum(-1)\n"
        "        from benchmarks.gpu.peers.trained import keep\n"
        '        keep(data["versions"][attn_mask.bool()], trained_version=self.engine.get_version())\n\n'
        "        ########## Logging code starts",
        why="each batch's versions per token are counted before it is trained",
    ),
)

ADAPTATIONS: Final = (
    *(edit.why for edit in EDITS),
    f"stand-ins for {', '.join(STAND_INS)}: imported, never used",
    "stock sglang.launch_server instead of its launcher, which wraps private parts of SGLang 0.5.10; it is started "
    "beside the trainer, not after it",
    "no evaluation engine",
    "a RolloutWorkflow of 30 lines: one answer of the length drawn, top_k = -1 (its default, 1e8, makes SGLang sort "
    "the vocabulary at each step), the reward that asyncrl's arm has",
    "its Archon engine with torch.compile; scheduler.type = local",
)


def bring_up(folder: Path, *, python_version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    site, stand_in = folder / "site", folder / "stand_in"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    python = ["--python-version", python_version, "--implementation", "cp", "--target", str(site)]
    platforms = [word for number in (17, 28) for word in ("--platform", f"manylinux_2_{number}_x86_64")]
    subprocess.run(
        [*pip, *python, *platforms, "--platform", "manylinux2014_x86_64", *REQUIREMENTS],
        check=True,
    )
    for edit in EDITS:
        path = site / "areal" / edit.file
        text = path.read_text()
        if edit.old not in text:
            raise SystemExit(f"{edit.file} is not what was edited: {edit.old!r} is not there")
        path.write_text(text.replace(edit.old, edit.new))
    for name in STAND_INS:
        write_stand_in(stand_in / name / "__init__.py")
    for name in RAY_MODULES:
        write_stand_in(stand_in / "ray" / name / "__init__.py")


def write_stand_in(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STAND_IN)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.peers.bring_up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="is recreated")
    parser.add_argument("--python", default="3.12", help="version that it will run on (default 3.12)")
    options = parser.parse_args(given)
    folder = options.folder
    bring_up(folder, python_version=options.python)
    print(f"{folder}: {sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.0f} MB unpacked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
