"""Compare the speed of `asyncrl regrade` with the speed at which the run was sampled.

    python -m benchmarks.gpu.regrade --shape 0.6B --json docs/results/gpu/regrade.jsonl
    python -m benchmarks.gpu.regrade --rehearse      tiny, on a CPU: shows that all of it works

A run of benchmarks.gpu.one_gpu (async) is recorded with checkpoint.keep_log = true, until --seconds after its first
step. Then each arm grades all of its answers again, as `asyncrl regrade --dry-run`, and the first arm that can writes
the branch as well: every step is trained again with the new rewards, up to the newest. The sampling speed is that of
the run's log: from the beginning of its first group to the end of its last. Grading is timed inside the command; the
branch is both commands from start to end.

Arms, as the second part of a reward beside the recorded one:
  math        the built-in judges (math-verify), as many as there are cores
  dapo        the built-in grader of DAPO: plain Python, one core
  slow        a plain function that takes 50 ms
  slow_async  an async function that takes 50 ms, as a judge behind HTTP

The model's weights are random, so its answers are no text. ``text_of`` makes one of each, as long as such an answer,
with formulas, and a result in the end that is right in a quarter of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.audit.run_folder import RecordedRun, log_records
from asyncrl.bus.port import Bus
from asyncrl.contrib.rewards import dapo
from asyncrl.messages.topics import TRAJECTORIES
from asyncrl.rewards import math
from asyncrl.rewards.port import Reward, Sample
from benchmarks.gpu import one_gpu
from benchmarks.gpu.arm import REPOSITORY, override_words, read_rows, started, tail
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.window import Row, trained_tokens

MODULE: Final = "benchmarks.gpu.regrade"
SLOW_SECONDS: Final = 0.05
KINDS: Final[Mapping[str, str]] = {
    "math": f"{MODULE}:Solved",
    "dapo": f"{MODULE}:solved_by_rules",
    "slow": f"{MODULE}:slow",
    "slow_async": f"{MODULE}:slow_async",
}
RECORDED: Final = {"checkpoint.keep_log": True}
_END_SECONDS: Final = 30.0
"""Time for a run to end by itself."""
_REGRADE_SECONDS: Final = 240.0
HEAD: Final = (
    "arm                 what            seconds   answers/s       tok/s  x sampling  x one by one  answers  steps"
)


# -- rewards -----------------------------------------------------------------------------------------------------------

_PIECES: Final = (
    *(" so", " the", " sum", " of", " both", " sides", " is", " then", ".\n", " we", " get", ",", " and", " for"),
    *(f" {number}" for number in range(12)),
    *(" $x + 1$", " \\frac{3}{4}", " \\sqrt{2}", " x = 2y", " (a + b)^2", " \\cdot", " \\le"),
)


def text_of(sample: Sample) -> str:
    """Return a solution that depends on the answer's tokens, with one piece of text for each."""
    tokens = sample.trajectory.tokens
    found = int(tokens[-1]) % 4
    return "".join([_PIECES[token % len(_PIECES)] for token in tokens]) + f"\nAnswer: \\boxed{{{found}}}"


def _as_solution(sample: Sample) -> Sample:
    label = str(len(sample.prompt.split()) % 4)
    return dataclasses.replace(sample, completion=text_of(sample), plain=None, marked=None, label=label)


class Solved(math.MathReward):
    """Whether the solution's result is that of the prompt, as math-verify judges it."""

    needs_label = False

    def __init__(self) -> None:
        super().__init__(math.Options(processes=os.cpu_count() or 1))

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return await super().__call__([_as_solution(sample) for sample in samples])

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        """Rows have none."""


def solved_by_rules(sample: Sample) -> Reward:
    """Whether the solution's result is that of the prompt, as DAPO judges it."""
    return dapo.DapoReward(dapo.Options())(_as_solution(sample))


def slow(sample: Sample) -> float:
    time.sleep(SLOW_SECONDS)
    return float(int(sample.trajectory.tokens[-1]) % 4 == 0)


async def slow_async(sample: Sample) -> float:
    await asyncio.sleep(SLOW_SECONDS)
    return float(int(sample.trajectory.tokens[-1]) % 4 == 0)


# -- the run -----------------------------------------------------------------------------------------------------------


def record(options: argparse.Namespace, scratch: Path) -> tuple[Path, str]:
    """Do the run. Return its folder, and why it cannot be used ("" if it can)."""
    settings = {**one_gpu.overrides("async", "recorded", options, scratch), **RECORDED, **options.set}
    words = ["-m", "asyncrl", "run", one_gpu.RUN_FILE, *override_words(settings)]
    folder, output = scratch / "runs" / "recorded", (options.out or scratch) / "recorded.out"
    began, first, problem = time.monotonic(), 0.0, ""
    try:
        with started(words, output) as process:
            while not first or time.monotonic() - first < options.seconds:
                time.sleep(0.5)
                if not first and read_rows(folder / "metrics.jsonl"):
                    first = time.monotonic()
                if process.poll() is not None:
                    problem = f"the run ended with exit code {process.returncode}"
                elif not first and time.monotonic() - began > options.limit:
                    problem = f"no step in {options.limit:.0f} s"
                if problem:
                    print(tail(output), flush=True)
                    break
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
    finally:
        if options.out is not None:
            with contextlib.suppress(OSError):
                shutil.copytree(folder / "logs", options.out / "recorded", dirs_exist_ok=True)
                shutil.copyfile(folder / "metrics.jsonl", options.out / "recorded.jsonl")
    return folder, problem


def sampled(folder: Path) -> Row:
    """Return what is on the run's log, and how long it took to sample."""
    recorded = RecordedRun(folder)

    async def read(bus: Bus) -> Row:
        groups = answers = tokens = 0
        began, ended = float("inf"), 0.0
        async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
            async for one in records:
                if (group := one.message) is None or group.error:
                    continue
                groups += 1
                answers += len(group.rollouts)
                tokens += sum(int(part.response_mask.sum()) for part in group.trajectories)
                began, ended = min(began, group.began), max(ended, group.began + group.seconds)
        return {"groups": groups, "answers": answers, "tokens": tokens, "seconds": ended - began}

    return recorded.on_bus(recorded.newest_settings(), read, token="")


# -- regrade -----------------------------------------------------------------------------------------------------------


def regrade(arm: str, folder: Path, options: argparse.Namespace, *, writes: bool) -> tuple[Row, float]:
    """Run the command. Return what it prints as JSON ("error": why it, or the first group, failed), and its seconds."""
    parts = {"task": {"kind": KINDS[arm]}, "recorded": {"kind": "benchmarks.gpu.lengths:noise", "weight": 0.0}}
    words = [sys.executable, "-m", "asyncrl", "regrade", str(folder), "--reward", "parts", "--json"]
    words += [*override_words({"reward.parts": parts}), "--out", str(folder.with_name(f"regraded-{arm}"))]
    words += [] if writes else ["--dry-run"]
    began = time.monotonic()
    try:
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=_REGRADE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_REGRADE_SECONDS:.0f} s"}, _REGRADE_SECONDS
    seconds = time.monotonic() - began
    if options.out is not None:
        (options.out / f"{arm}{'-branch' if writes else ''}.err").write_text(done.stderr)
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"}, seconds
    return json.loads(done.stdout.splitlines()[-1]), seconds


def measured(arm: str, what: str, seconds: float, run: Row, *, serial: float | None = None) -> Row:
    """Return a row.  serial: seconds that the answers would take one by one, if that is known"""
    return {
        "arm": arm,
        "what": what,
        "seconds": seconds,
        "answers_per_second": run["answers"] / seconds,
        "tokens_per_second": run["tokens"] / seconds,
        "of_sampling_speed": run["seconds"] / seconds,
        "of_one_by_one": None if serial is None else serial / seconds,
        "answers": run["answers"],
        "steps": run["steps"],
    }


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the rows: of the sampling, of each arm's grading, and of the branch of the first arm that can grade."""
    run = sampled(folder)
    rows = read_rows(folder / "metrics.jsonl")
    run["steps"] = len(rows)
    mean = {"length_mean": run["tokens"] / run["answers"], "trained_tokens": sum(map(trained_tokens, rows))}
    yield measured("-", "sampling", run["seconds"], run) | mean
    has_branch = False
    for arm in options.arms:
        found, whole = regrade(arm, folder, options, writes=False)
        if found["error"]:
            yield {"arm": arm, "what": "grading", "error": found["error"]}
            continue
        serial = SLOW_SECONDS * run["answers"] if arm.startswith("slow") else None
        yield measured(arm, "grading", found["grading_seconds"], run, serial=serial) | {"command_seconds": whole}
        if has_branch:
            continue
        branch, more = regrade(arm, folder, options, writes=True)  # its grades are there
        if branch["error"]:
            yield {"arm": arm, "what": "branch", "error": branch["error"]}
            continue
        has_branch = True
        yield measured(arm, "branch", whole + more, run) | {"training_seconds": more, "step": branch["step"]}


def line(row: Row) -> str:
    start = f"{row['arm']:18s}  {row['what']:12s}"
    if "error" in row:
        return f"{start}  FAILED: {row['error']}"
    serial = "-" if row["of_one_by_one"] is None else f"{row['of_one_by_one']:.1f}"
    return (
        f"{start}  {row['seconds']:9.1f}  {row['answers_per_second']:10,.1f}  {row['tokens_per_second']:10,.0f}"
        f"  {row['of_sampling_speed']:10.2f}  {serial:>12}  {row['answers']:7,d}  {row['steps']:5d}"
    )


def main(given: Sequence[str] | None = None) -> int:
    parser = one_gpu.run_parser(MODULE, __doc__, arms=tuple(KINDS), seconds=70.0)
    options = one_gpu.parse(parser, given, arm=re.compile("|".join(KINDS)))
    common = {"shape": options.shape, "groups": options.groups, "group_size": options.group_size}
    common |= {"command": command(MODULE), "cores": os.cpu_count(), **machine()}
    failed = 0
    with one_gpu.prepared(options) as scratch:
        folder, problem = record(options, scratch)
        print(HEAD, flush=True)
        for row in [{"arm": "-", "what": "sampling", "error": problem}] if problem else measure(options, folder):
            print(line(row), flush=True)
            keep({**common, **row}, options.json)
            failed += "error" in row
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
