"""Measure the cost of answers that end at different times on an SGLang server, where each new prefill stops decoding.

    python -m benchmarks.gpu.arrivals --json FILE                          every way, on one GPU
    python -m benchmarks.gpu.arrivals --ways stock mixed --group 8         groups of one prompt, as a worker begins them
    python -m benchmarks.gpu.arrivals --shape tiny --requests 8 --tokens 32 --group 1       a rehearsal on a CPU

For each way to run the server and each --group: --requests samples of drawn lengths are always in flight, and --group
samples of the same prompt start together once one slot is free. "at once" is the result of the same server if all
samples start and end together. Reports tokens/s while all slots are taken, and from the server's log the prefills per
second and the samples per prefill. eager: without CUDA graphs for prefills.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.engines.sglang.options import PREFILL_DELAY
from benchmarks.gpu.endpoint import Calls, Ends, make_engine, steady, tokens_of_a_call
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model

_STOCK: Final = {"enable-prefill-delayer": False}
_EAGER: Final = {"disable-prefill-cuda-graph": True}


def _delayed(ratio: float) -> dict[str, Any]:
    return {**PREFILL_DELAY, "prefill-delayer-queue-min-ratio": ratio}


WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stock": _STOCK,
    "as asyncrl starts it": {},
    "stock, eager": {**_STOCK, **_EAGER},
    "delayed less": _delayed(0.06),
    "delayed less, eager": {**_delayed(0.06), **_EAGER},
    "delayed, eager": {**PREFILL_DELAY, **_EAGER},
    "mixed": {**_STOCK, "enable-mixed-chunk": True},
}
"""Options of SGLang that override GPU_ARGUMENTS."""

_PROMPT_TOKENS: Final = 100
_PREFILL: Final = re.compile(r"Prefill batch.*?#new-seq: (\d+)")


class Load:
    """Samples on one server."""

    def __init__(self, engine: SGLangEngine, options: argparse.Namespace) -> None:
        self._engine = engine
        self._places: int = options.requests
        self._tokens: int = options.tokens
        self._samples: int = options.requests * options.rounds
        self._vocabulary = SHAPES[options.shape].vocabulary

    async def at_once(self) -> float:
        """Return tokens/s of one sample per slot, all of the same length, from the first to the last token."""
        began = time.monotonic()
        await asyncio.gather(*(self._sample(number, self._tokens) for number in range(self._places)))
        return self._places * self._tokens / (time.monotonic() - began)

    async def staggered(self, group: int) -> float:
        """Return tokens/s while ``group`` samples of a prompt start whenever a slot is free."""
        ends: Ends = []
        running, changed = 0, asyncio.Event()

        async def play(prompt: int, number: int) -> None:
            nonlocal running
            length = tokens_of_a_call(number, tokens=self._tokens, calls=1)
            await self._sample(prompt, length)
            ends.append((time.monotonic(), length))
            running -= 1
            changed.set()

        async with asyncio.TaskGroup() as tasks:
            for prompt in range(self._samples // group):
                while running >= self._places:
                    changed.clear()
                    await changed.wait()
                running += group
                for number in range(group):
                    tasks.create_task(play(prompt, prompt * group + number))
        return steady(ends, skipped=self._places)

    async def _sample(self, prompt: int, length: int) -> None:
        tokens = np.random.default_rng(prompt).integers(1, self._vocabulary, _PROMPT_TOKENS).astype(np.int32)
        await Calls(self._engine, num_tokens=length)(tokens)


async def measure(name: str, options: argparse.Namespace, model: Path) -> None:
    """Print and save a row for each group size."""
    log = model.parent / f"{name.replace(', ', '-').replace(' ', '-')}.log"
    about = {key: value for key, value in vars(options).items() if key not in ("json", "ways", "group")}
    engine = make_engine(model, log=log, arguments=WAYS[name])
    began = time.monotonic()
    await engine.start()
    try:
        started = time.monotonic() - began
        load = Load(engine, options)
        await load.at_once()  # compiles the kernels of these batch sizes
        at_once = await load.at_once()
        for group in options.group:
            before, began = log.stat().st_size, time.monotonic()
            rate = await load.staggered(group)
            seconds = time.monotonic() - began
            prefills = [int(found) for found in _PREFILL.findall(log.read_text(errors="replace")[before:])]
            row = {
                "way": name,
                "group": group,
                "at_once_tokens_per_second": at_once,
                "tokens_per_second": rate,
                "of_at_once": rate / at_once,
                "prefills_per_second": len(prefills) / seconds,
                "samples_a_prefill": sum(prefills) / max(1, len(prefills)),
                "start_seconds": started,
                "load": os.getloadavg()[0],
            }
            row = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
            row |= {**about, "arguments": dict(WAYS[name]), "command": command("benchmarks.gpu.arrivals"), **machine()}
            keep(row, options.json)
            print(json.dumps(row), flush=True)
    finally:
        await engine.close()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.arrivals", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    add("--shape", choices=SHAPES, default="0.6B")
    add("--requests", type=int, default=256, help="samples in flight")
    add("--rounds", type=int, default=4, help="samples that each of these places plays, one after another")
    add("--tokens", type=int, default=512, help="sampled for each, on average")
    add("--group", type=int, nargs="+", default=[8, 1], help="samples of a prompt that begin together; a row for each")
    add("--json", type=Path)
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="asyncrl-arrivals-") as folder:
        model = make_model(SHAPES[options.shape], Path(folder) / "model")
        for name in options.ways:
            try:
                asyncio.run(measure(name, options, model))
            except Exception as error:  # a way that this SGLang lacks must not stop the others
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
