"""A bare NCCL broadcast from one GPU to another, as the baseline for weight transfers.

    python -m benchmarks.gpu.bare --megabytes 8045 --from-gpu 0 --to-gpu 1

Two processes that do nothing else repeatedly send the same bytes in buckets of the same size (over gloo on a machine
without GPUs). All buckets share one buffer, so that it fits next to an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.gpu.arm import REPOSITORY, visible_devices
from benchmarks.gpu.fleet import has_gpu

_WARM_UP: Final = 2
_LIMIT_SECONDS: Final = 90.0


def measure(num_bytes: int, *, bucket_bytes: int, from_gpu: int, to_gpu: int, rounds: int = 10) -> dict[str, Any]:
    """Return bare_seconds, the median time of a broadcast of all bytes. Raises CalledProcessError, TimeoutExpired."""
    from asyncrl.engines.sglang.server import find_free_port

    words = ["--megabytes", str(num_bytes / 1e6), "--bucket-megabytes", str(bucket_bytes // 2**20)]
    words += ["--rounds", str(rounds), "--port", str(find_free_port())]
    ends = []
    for rank, gpu in enumerate((from_gpu, to_gpu)):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices([gpu]), "NCCL_CUMEM_ENABLE": "0"}
        command = [sys.executable, "-m", "benchmarks.gpu.bare", *words, "--rank", str(rank)]
        ends.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True))
    try:
        said = [end.communicate(timeout=_LIMIT_SECONDS)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
            end.wait()
    for end in ends:
        if end.returncode:
            raise subprocess.CalledProcessError(end.returncode, end.args)
    seconds = json.loads(said[0].splitlines()[-1])
    middle = statistics.median(seconds)
    return {"bare_seconds": middle, "bare_worst": max(seconds), "bare_gigabytes_per_second": num_bytes / middle / 1e9}


def one_end(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=2,
    )
    num_bytes, bucket = int(options.megabytes * 1e6), options.bucket_megabytes * 2**20
    buffer = torch.zeros(min(bucket, num_bytes), dtype=torch.uint8, device=device)
    sizes = [min(bucket, num_bytes - begin) for begin in range(0, num_bytes, bucket)]
    seconds = []
    for _ in range(_WARM_UP + options.rounds):
        began = time.monotonic()
        for size in sizes:
            dist.broadcast(buffer[:size], src=0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    dist.destroy_process_group()
    print(json.dumps(seconds[_WARM_UP:]), flush=True)
    return 0


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--megabytes", type=float, default=8045.0, help="10^6 bytes of one broadcast (default 8045: 4B in bfloat16)")
    add("--bucket-megabytes", type=int, default=2048, help="MiB of a bucket (default 2048)")
    add("--rounds", type=int, default=10)
    add("--from-gpu", type=int, default=0)
    add("--to-gpu", type=int, default=1)
    add("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    add("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.rank >= 0:
        return one_end(options)
    found = measure(
        int(options.megabytes * 1e6),
        bucket_bytes=options.bucket_megabytes * 2**20,
        from_gpu=options.from_gpu if has_gpu() else 0,
        to_gpu=options.to_gpu if has_gpu() else 0,
        rounds=options.rounds,
    )
    print(json.dumps({"megabytes": options.megabytes, "bucket_megabytes": options.bucket_megabytes, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
