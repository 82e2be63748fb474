"""Learner and engine on one GPU under NVIDIA's Multi-Process Service, instead of by turns of time slices.

    python -m benchmarks.gpu.mps --percents 97 88 75 60 50 --json docs/results/gpu/mps.jsonl

multiplies bfloat16 matrices in a process that may use that share of the multiprocessors, and compares with float32.
The daemon is one of this benchmark's own, with its pipes in a folder of its own; the GPU's compute mode stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.gpu.rows import command, keep, machine

_DAEMON: Final = "nvidia-cuda-mps-control"
_LIMIT: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRODUCTS: Final = (
    (16384, 1024, 4096),
    (16384, 2048, 1024),
    (16384, 1024, 6144),
    (16384, 3072, 1024),
    (1024, 16384, 6144),
    (1024, 16384, 1024),
    (4096, 16384, 1024),
    (8192, 1024, 151936),
    (151936, 8192, 1024),
    (8192, 151936, 1024),
    (777, 1024, 1000),
)
"""(m, k, n) of m x k times k x n: those of a learner of 0.6B, forward and backward, and one of odd sizes."""
_TIMES: Final = 4
_ROWS: Final = 256
_ERROR: Final = 0.01
"""Relative to the norm; rounding to bfloat16 is 0.002."""


def is_there() -> bool:
    return shutil.which(_DAEMON) is not None


@contextlib.contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """Run a daemon; yield the variables with which processes use it. Raises OSError, CalledProcessError."""
    places = {name: folder / name for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    for place in places.values():
        place.mkdir(parents=True)
    variables = {name: str(place) for name, place in places.items()}
    # A daemon with CUDA_VISIBLE_DEVICES numbers its GPUs anew, and processes that name one find none.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | variables
    subprocess.run([_DAEMON, "-d"], env=environment, check=True, timeout=30)
    try:
        yield variables
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            subprocess.run([_DAEMON], input="quit\n", text=True, env=environment, check=False, timeout=30)


def errors() -> dict[str, float]:
    """Return m x k x n -> the largest relative error of _ROWS rows of that product; NaN if any element is."""
    import torch

    found = {}
    for m, k, n in PRODUCTS:
        a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((m, k), (k, n)))
        exact = a[:_ROWS].float() @ b.float()
        worst = 0.0
        for first, second in [(a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())] * _TIMES:
            result = torch.full((m, n), math.nan, device="cuda", dtype=torch.bfloat16)
            torch.mm(first, second, out=result)
            error = (result[:_ROWS].float() - exact).norm() / exact.norm()
            worst = max(worst, float(error)) if bool(result.isfinite().all()) else math.nan
        found[f"{m} x {k} x {n}"] = worst
    return found


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--percents", nargs="+", type=int, default=[100, 97, 88, 75, 60, 50])
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.child:
        import torch

        print(json.dumps([torch.cuda.get_device_properties(0).multi_processor_count, errors()]))
        return 0
    if not is_there():
        parser.error(f"this machine has no {_DAEMON}")
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as variables:
        for percent in options.percents:
            environment = os.environ | variables | {_LIMIT: str(percent)}
            words = [sys.executable, "-m", "benchmarks.gpu.mps", "--child"]
            said = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            multiprocessors, found = json.loads(said)
            wrong = [name for name, error in found.items() if not error < _ERROR]
            print(
                f"{percent:4d} %  {multiprocessors:4d} multiprocessors  wrong: {', '.join(wrong) or 'none'}", flush=True
            )
            row = {"percent": percent, "multiprocessors": multiprocessors, "wrong": wrong, "of": len(found)}
            keep({**row, "command": command("benchmarks.gpu.mps"), **machine()}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
