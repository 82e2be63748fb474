"""TRL's or slime's public packages in one folder that can be packed and carried to a GPU host.

    python -m benchmarks.gpu.peers.race_bring_up trl FOLDER
    python -m benchmarks.gpu.peers.race_bring_up slime FOLDER --slime CLONE --megatron CLONE

On a machine with a package registry. CLONEs are git repositories of THUDM/slime and NVIDIA/Megatron-LM; slime says
which Megatron, and has the patches. The host has the rest: torch, SGLang, Ray, transformers, accelerate, pyarrow.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.peers.bring_up import write_stand_in

SLIME: Final = "624b824a8"
REQUIREMENTS: Final = {
    "trl": ("trl==1.16.0", "datasets==5.2.0", "multiprocess==0.70.18"),
    "slime": (
        "sglang-router==0.3.2",
        "torch-memory-saver==0.0.10",
        "omegaconf==2.4.0",
        "pylatexenc==2.11",
    ),
}
VERSIONS: Final = {"trl": "trl 1.16.0", "slime": f"slime 0.3.1 ({SLIME}), sglang-router 0.3.2"}

NUMPY: Final = 'assert np.__version__.startswith("1."), "Megatron does not support numpy 2.x"'

ADAPTATIONS: Final = {
    "trl": (
        "SGLang instead of vLLM: its rollout loop with another request, of the length drawn",
        "weights by CUDA handles of one bucket, in place, instead of vLLM's NCCL engine; the engine pauses for it",
        "torch's own FlashAttention under its tree attention, instead of FlashAttention-3 from the kernels hub",
        "a chat template that adds nothing",
    ),
    "slime": (
        "stock SGLang 0.5.16 instead of its patched 0.5.15",
        "the registry's sglang-router instead of its fork",
        "Megatron's local layers, with asyncrl's kernels for attention, norms and rotary embeddings, instead of "
        "Transformer Engine; no Apex",
        "its refusal of NumPy 2 is removed; a stand-in for wandb, which is imported and not used",
        "a generate function and a reward of ten lines: its own request, of the length drawn",
        "no offloading when colocated: both sides fit",
    ),
}


def bring_up(peer: str, folder: Path, *, python_version: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
    python = ["--python-version", python_version, "--implementation", "cp", "--target", str(folder)]
    platforms = [word for number in (17, 28) for word in ("--platform", f"manylinux_2_{number}_x86_64")]
    subprocess.run([*pip, *python, *platforms, "--platform", "manylinux2014_x86_64", *REQUIREMENTS[peer]], check=True)


def add_slime(folder: Path, *, slime: Path, megatron: Path) -> None:
    export(slime, SLIME, folder, "slime", "slime_plugins", "train.py", "train_async.py", "docker", "LICENSE")
    commit = re.search(r"MEGATRON_COMMIT=(\w+)", (folder / "docker/Dockerfile").read_text())
    assert commit is not None
    export(megatron, commit[1], folder, "megatron")
    for patch in ("megatron.patch", "megatron-sglang-aligned.patch"):
        words = ["patch", "--quiet", "--strip", "1", "--input", str(folder / "docker/patch/latest" / patch)]
        subprocess.run(words, cwd=folder, check=True)
    shutil.rmtree(folder / "docker")
    write_stand_in(folder / "wandb" / "__init__.py")
    path = folder / "slime/backends/megatron_utils/initialize.py"
    text = path.read_text()
    if NUMPY not in text:
        raise SystemExit(f"{path} is not what was edited: {NUMPY!r} is not there")
    path.write_text(text.replace(NUMPY, ""))


def export(repository: Path, commit: str, folder: Path, *paths: str) -> None:
    git = ["git", "--git-dir" if (repository / "objects").is_dir() else "-C", str(repository)]
    archive = subprocess.run([*git, "archive", commit, *paths], check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.peers.race_bring_up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", choices=tuple(REQUIREMENTS))
    parser.add_argument("folder", type=Path, help="is recreated")
    parser.add_argument("--slime", type=Path, metavar="CLONE")
    parser.add_argument("--megatron", type=Path, metavar="CLONE")
    parser.add_argument("--python", default="3.12", help="version that it will run on (default 3.12)")
    options = parser.parse_args(given)
    if options.peer == "slime" and not (options.slime and options.megatron):
        parser.error("slime: --slime and --megatron are needed")
    bring_up(options.peer, options.folder, python_version=options.python)
    if options.peer == "slime":
        add_slime(options.folder, slime=options.slime, megatron=options.megatron)
    return 0


if __name__ == "__main__":
    sys.exit(main())
