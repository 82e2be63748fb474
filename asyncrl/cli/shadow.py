"""`asyncrl shadow RUN_DIR --set algorithm.loss=gspo`: a second learner on what a running run trains.

It trains every batch of the run with another loss, correction, learning rate or bound, takes no prompts, publishes
nothing, and may lag. Its metrics and weights are in RUN_DIR/shadows/NAME: `asyncrl board RUN_DIR` shows its curves with
the run's, `asyncrl evaluate RUN_DIR/shadows/NAME --datasets RUN.toml` evaluates its newest weights, and
`asyncrl promote RUN_DIR NAME` makes it the run's learner. Ends with the run, or with Ctrl-C; the same command goes on.
At the end, and with --compare alone at any time, it prints the metrics in which the two differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl.adapters.bus_file import may_be_up
from asyncrl.audit.run_folder import RecordedRun
from asyncrl.cli import arguments
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.audit.shadow import ShadowStep
    from asyncrl.bus.port import Bus

_END_BYTES: Final = 2**21
"""Bytes of metrics.jsonl, from its end, in which a step's row is looked for."""
SHOWN: Final = ("loss", "offpolicy/ess", "mismatch/mean")
"""Metrics of each step to print, of the run and of the shadow."""

MOST_COMPARED: Final = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN_DIR", type=Path, help="the folder of a run that is up")
    parser.add_argument("--name", default="shadow", help="name of its folder in RUN_DIR/shadows (default: shadow)")
    arguments.add_overrides(parser, "setting of the shadow, such as algorithm.loss=gspo; repeatable")
    parser.add_argument(
        "--most-lag",
        type=int,
        default=50,
        metavar="STEPS",
        help="pass over steps that lie further back than this; 0: none (default: 50)",
    )
    parser.add_argument("--compare", action="store_true", help="only compare what the shadow has trained with the run")


def run(options: argparse.Namespace) -> int:
    from asyncrl.audit.shadow import Shadow, changed_settings, claim, folder_of, settings_of  # imports torch

    if not re.fullmatch(r"[\w.-]+", options.name) or options.name.startswith("."):
        raise ConfigError(f"--name {options.name}: must be letters, digits, '-', '_' and '.'")
    if options.most_lag < 0:
        raise ConfigError(f"--most-lag: must be >= 0, got {options.most_lag}")
    recorded = RecordedRun(options.run_directory)
    folder = folder_of(recorded, options.name)
    if options.compare:
        settings_of(folder)
        _compare(recorded, folder)
        return 0
    settings = recorded.newest_settings()
    changed_settings(recorded.last_start(), options.overrides)

    async def work(bus: Bus) -> None:
        shadow = Shadow(recorded, folder, overrides=options.overrides, most_lag=options.most_lag)
        print("  step" + "".join(f"  {name.rpartition('/')[2] + ' of run':>16} {'shadow':>12}" for name in SHOWN))
        async with contextlib.aclosing(shadow.follow(bus)) as trained:
            async for one in trained:
                print(_line(one, recorded), flush=True)

    with claim(folder, options.overrides):
        if settings.bus.url or may_be_up(recorded.directory):
            recorded.on_bus(settings, work, token=arguments.bus_token())
    if not (folder / "weights").exists():
        raise ConfigError(
            f"{options.run_directory}: the run is over, and none of its steps was trained; start it while the run is up"
        )
    _compare(recorded, folder)
    print(f"the run needs no more steps of this shadow; its weights are in {folder}/weights")
    return 0


def _line(one: ShadowStep, recorded: RecordedRun) -> str:
    old = _row(recorded, one.step)
    numbers = "".join(f"  {_number(old.get(name)):>16} {_number(one.metrics.get(name)):>12}" for name in SHOWN)
    behind = f"  {one.lag} behind" if one.lag else ""
    return f"{one.step:6d}{numbers}{behind}" + (f"  {one.skipped} passed over" if one.skipped else "")


def _compare(recorded: RecordedRun, folder: Path) -> None:
    from asyncrl.audit.shadow import compare

    steps, found = compare(recorded, folder)
    if not steps:
        print("there is no step yet that both have trained")
        return
    head = f"mean of {len(steps)} steps ({steps[0]} to {steps[-1]})"
    print(f"\n{head:36s} {'run':>12} {'shadow':>12}")
    for name, of_run, its in found[:MOST_COMPARED]:
        print(f"{name:36s} {_number(of_run):>12} {_number(its):>12}")
    if not found:
        print("all metrics are the same, to the last bit")


def _row(recorded: RecordedRun, step: int) -> Mapping[str, Any]:
    """Return the run's newest row of a step; empty if it is not written yet."""
    with contextlib.suppress(OSError):
        with (recorded.directory / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                if (row := json.loads(line)).get("step") == step:
                    found: Mapping[str, Any] = row
                    return found
    return {}


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | int) else "-"
