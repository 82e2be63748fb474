"""``bin/demo``: the whole loop learns a small task on a CPU, from random weights, in less than a minute.

Writes the model and the prompts to runs/NAME, runs examples/demo.toml on them, and checks that the reward rose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from asyncrl import config
from asyncrl.data import demo_task
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.processes.gpus import num_gpus
from asyncrl.launch.processes.launch import launch
from asyncrl.os_process import own_command

RUN_FILE: Final = Path("examples/demo.toml")
MODELS: Final = {"dense": "qwen3", "moe": "qwen3_moe"}
ADAPTERS: Final = (
    "learner.lora={rank = 16, alpha = 32.0}",
    "learner.learning_rate=5e-3",
    "staleness.max_staleness=2",
    "learner.decay_steps=60",
    "run.steps=60",
)
"""The bound is what the rate allows; with four versions, the default of adapters, every run set off the drift alarm."""
INITIALIZER_RANGE: Final = 0.05
OF_FROZEN: Final = 0.15
"""Initializer range with adapters. They leave the output layer as initialized; with smaller weights it could never give
a token a probability near 1."""
LOW, HIGH = 0.2, 0.8
"""The reward of the first step must be below LOW, and the mean of the last five steps above HIGH."""


def _server_overrides() -> list[str]:
    """Return overrides for engines that are servers.

    They are slower, so more samples are stale and the run needs more steps. On GPUs they support only bfloat16, and two
    of them may share one.
    """
    on_gpus = ['model.dtype="bfloat16"', "engine.options={server_arguments={mem-fraction-static=0.3}}"]
    return ["engine.options={}", "run.steps=60", *(on_gpus if num_gpus() else [])]


ENGINES: Final[dict[str, Callable[[], list[str]]]] = {"inprocess": list, "sglang": _server_overrides}
"""engine.kind -> additional overrides of the run file."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bin/demo", description="The whole loop learns a small task on a CPU.", allow_abbrev=False
    )
    parser.add_argument("--engine", choices=ENGINES, default="inprocess", help="(default: inprocess)")
    parser.add_argument(
        "--model", choices=MODELS, default="dense", help="dense: a Qwen3; moe: a mixture of experts (default: dense)"
    )
    parser.add_argument("--lora", action="store_true", help="train low-rank adapters instead of the model")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    name = f"demo-{secrets.token_hex(2)}"
    folder = Path("runs") / name
    overrides = [
        f'run.name="{name}"',
        f'model.path="{folder / "model"}"',
        f'data.path="{folder / "prompts.jsonl"}"',
        f'engine.kind="{options.engine}"',
        "evaluation.every_steps=15",
        "evaluation.share=0.5",  # one of the two workers
        f'evaluation.datasets=[{{name = "held_out", path = "{folder / "held_out.jsonl"}", samples = 4}}]',
        *ENGINES[options.engine](),
        *(ADAPTERS if options.lora else ()),
        *options.overrides,
    ]
    initializer_range = OF_FROZEN if options.lora else INITIALIZER_RANGE
    run_config = config.load(RUN_FILE, overrides)
    demo_task.write(folder, architecture=MODELS[options.model], initializer_range=initializer_range)
    try:
        check(run_config)
    except ConfigError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    started = time.monotonic()
    run = launch(run_config, run_file=RUN_FILE, overrides=overrides, resume=False, token="", handles_signals=True)
    outcome = asyncio.run(run)
    if outcome.exit_code != 0:
        return outcome.exit_code
    return report(run_config.run_directory / "metrics.jsonl", seconds=time.monotonic() - started)


def report(metrics: Path, *, seconds: float) -> int:
    """Print how the reward changed, and return the exit code: 0 if it rose as expected."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    held_out = [row["evaluation/held_out/mean@4"] for row in rows if "evaluation/held_out/mean@4" in row]
    last = sum(rewards[-5:]) / len(rewards[-5:])
    print(f"every number of every step is in {metrics}")
    print(f"what the model writes: {own_command()} samples {metrics.parent}")
    print(f"its curves, lanes and answers on a web page: {own_command()} board {metrics.parent}")
    found = f"reward {rewards[0]:.2f} -> {last:.2f} in {seconds:.0f} s"
    if held_out:
        times = f"evaluated {len(held_out)} times meanwhile"
        found += f"; on held-out prompts, {times}: {held_out[0]:.2f} -> {held_out[-1]:.2f}"
    print(found)
    if rewards[0] < LOW and last > HIGH:
        return 0
    print(f"bin/demo: the reward should rise from below {LOW} to above {HIGH}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"bin/demo: {error}", file=sys.stderr)
        sys.exit(2)
    except AsyncRLError as error:
        print(f"bin/demo: {error}", file=sys.stderr)
        sys.exit(1)
