"""Measure the cost of per-token versions and logprobs: SGLang through our engine against the bare server.

    python -m benchmarks.gpu.engine --gpus 4 --shape 0.6B --json FILE

Each way of running the server gets its own GPU and process. There the same load (--requests at once, --tokens each,
with logprobs) goes in turns to the bare server as whole replies and through SGLangEngine. Each ratio is taken within
one turn, and the median of the turns is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.messages import SamplingParams
from benchmarks.gpu.arm import visible_devices
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model

WAYS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "interval 16": (16, {}),
    "interval 16, no tokenizer": (16, {"skip-tokenizer-init": True}),
    "interval 64, no tokenizer": (64, {"skip-tokenizer-init": True}),
    "interval 16, cumulative": (16, {"incremental-streaming-output": False}),
}
"""Tokens per streamed chunk, and server options, for each way."""

_PROMPT_TOKENS: Final = 128


def prompts(count: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    generator = np.random.default_rng(0)
    return [generator.integers(10, 30, _PROMPT_TOKENS).astype(np.int32) for _ in range(count)]


async def bare(url: str, *, requests: int, tokens: int) -> float:
    """Return tokens/s of whole replies from the bare server."""
    body: dict[str, Any] = {
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def one(prompt: Any) -> int:
            async with session.post(f"{url}/generate", json=body | {"input_ids": prompt.tolist()}) as response:
                meta = (await response.json())["meta_info"]
                return len(meta["output_token_logprobs"])

        began = time.monotonic()
        done = await asyncio.gather(*map(one, prompts(requests)))
        return sum(done) / (time.monotonic() - began)


async def ours(engine: SGLangEngine, *, requests: int, tokens: int) -> float:
    """Return tokens/s through the engine, with version and logprob of every token."""
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    began = time.monotonic()
    done = await asyncio.gather(*(engine.generate(prompt, sampling, seed=0) for prompt in prompts(requests)))
    return sum(len(generation.tokens) for generation in done) / (time.monotonic() - began)


async def measure_server(options: argparse.Namespace, interval: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    is_gpu = has_gpu()
    engine = SGLangEngine(
        options.model,
        device="cuda" if is_gpu else "cpu",
        dtype="bfloat16" if is_gpu else "float32",
        version=(0, 0),
        options=Options(
            stream_interval=interval,
            version_source="stream",
            server_arguments={**(GPU_ARGUMENTS if is_gpu else {}), **arguments},
        ),
        log_path=options.log,
    )
    began = time.monotonic()
    await engine.start()
    try:
        start_seconds = time.monotonic() - began
        load = {"requests": options.requests, "tokens": options.tokens}
        await bare(engine.url, requests=options.requests, tokens=32)
        turns = [(await bare(engine.url, **load), await ours(engine, **load)) for _ in range(options.turns)]
        return {
            "start_seconds": start_seconds,
            "bare_tokens_per_second": statistics.median(plain for plain, _ in turns),
            "tokens_per_second": statistics.median(own for _, own in turns),
            "ratio": statistics.median(own / plain for plain, own in turns),
            "turns": turns,
        }
    finally:
        await engine.close()


def measure_way(way: str, gpu: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way in its own process. An error becomes a row."""
    command = [sys.executable, "-m", "benchmarks.gpu.engine", "--way", way, "--model", str(options.model)]
    for name in ("requests", "tokens", "turns"):
        command += [f"--{name}", str(getattr(options, name))]
    log = options.model.parent / f"engine-{gpu}.log"
    command += ["--log", str(log)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices([gpu])} if has_gpu() else None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=options.limit_seconds, check=False
        )
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and rows:
            row: dict[str, Any] = json.loads(rows[-1])
            return row
        problem = (done.stderr or done.stdout)[-2000:]
    except subprocess.TimeoutExpired as error:
        problem = f"not done after {options.limit_seconds} s: {str(error.stderr or '')[-1000:]}"
    return {"way": way, "error": problem}


def line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['way']:26s}  failed: {row['error']}"
    return (
        f"{row['way']:26s}  {row['bare_tokens_per_second']:9,.0f}  {row['tokens_per_second']:9,.0f}  "
        f"{row['ratio']:6.3f}  {row['start_seconds']:7.0f}"
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--gpus", type=int, default=1)
    add("--shape", choices=SHAPES, default="0.6B")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    add("--requests", type=int, default=256)
    add("--tokens", type=int, default=512)
    add("--turns", type=int, default=4)
    add("--limit-seconds", type=float, default=240.0)
    add("--json", type=Path)
    add("--way", choices=WAYS, help=argparse.SUPPRESS)
    add("--model", type=Path, help=argparse.SUPPRESS)
    add("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.way:
        interval, arguments = WAYS[options.way]
        row = {"way": options.way} | asyncio.run(measure_server(options, interval, arguments))
        print(json.dumps(row), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="asyncrl-engine-") as folder:
        options.model = make_model(SHAPES[options.shape], Path(folder) / "model")
        free = list(range(options.gpus))

        def on_a_gpu(way: str) -> dict[str, Any]:
            gpu = free.pop()
            try:
                return measure_way(way, gpu, options)
            finally:
                free.append(gpu)

        with ThreadPoolExecutor(options.gpus) as pool:
            rows = []
            print(f"{'way':26s}  {'bare':>9s}  {'ours':>9s}  {'ratio':>6s}  start s   ({options.requests} in flight)")
            for row in pool.map(on_a_gpu, options.ways):
                rows.append({"shape": options.shape, "requests": options.requests, "tokens": options.tokens} | row)
                print(line(row), flush=True)
                keep(rows[-1] | {"command": command("benchmarks.gpu.engine"), **machine()}, options.json)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
