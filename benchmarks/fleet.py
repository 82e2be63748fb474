"""Measure the cost of a trajectory for the bus and its clients, by size of the fleet: 1 to 1,000 rollout workers.

    python -m benchmarks.fleet                                      a quarter of an hour on two cores
    python -m benchmarks.fleet --workers 1 100 1000 --steps 6       less of it
    python -m benchmarks.fleet --each 0.2                           fleets that grow with the work
    python -m benchmarks.fleet --json docs/results/fleet.jsonl      one object a line, for plot_fleet.py

Real: nats-server with JetStream on disk, one connection per worker, every actor of workers and learner, the launcher's
watcher, weights by files. Simulated: the model (fleet_processes.py). The trainer takes a batch at fixed times, so all
fleets do the same work, and the extra cost of a larger fleet is the price of its size.

presence  before the learner starts, all workers wait: only heartbeats, watches and open requests for prompts
load      the steady part of the run, per trajectory: ``whole`` is the load, ``work`` is the load minus presence

A waiting worker has a cost per second, not per trajectory. The load is low, one trajectory per worker in sixteen
seconds in the largest fleet, as with answers of 32k tokens. The goal is a flat cost within 20 %; misses are printed.
Required (else exit code 1): ``asyncrl audit`` is clean, no token is over the bound, and the groups outstanding never
exceed the window.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.audit.account import account_of
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config.staleness import StalenessSection
from asyncrl.messages.topics import PROGRESS, PROMPTS
from benchmarks import fleet_processes
from benchmarks.fleet_probe import MonitoredServer, Reading, between, memory, read
from benchmarks.fleet_processes import Processes
from tests.harness.tiny import files as tiny_files
from tests.harness.tiny.task import Policy

Row = dict[str, Any]

SIZES: Final = (1, 3, 10, 30, 100, 300, 1000)
_NAMES: Final = ("server", "workers", "learner", "watcher")
_LOOK_SECONDS: Final = 1.0
_EACH_STEP_SECONDS: Final = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Parameters that all fleets share.

    rate          prompt groups per second
    seconds       average time of an answer
    num_tokens    tokens of an answer
    steps         number of measured steps, after ``warmup`` steps
    idle_seconds  how long presence is measured
    """

    rate: float
    group_size: int
    num_tokens: int
    seconds: float
    groups_per_batch: int
    max_staleness: int
    warmup: int
    steps: int
    idle_seconds: float
    processes: int

    @property
    def all_steps(self) -> int:
        """Number of all steps. A window of steps follows the measured ones, because it only trains older samples."""
        return self.warmup + self.steps + self.max_staleness + 1

    def run_file(self, folder: Path, *, workers: int, url: str) -> RunConfig:
        window = (self.max_staleness + 1) * self.groups_per_batch
        return RunConfig(
            run=config.RunSection(name=f"fleet-{workers}", directory=str(folder / "runs"), steps=self.all_steps),
            bus=config.BusSection(url=url),
            model=config.ModelSection(path=str(folder / "model")),
            data=config.DataSection(path=str(folder / "prompts.jsonl")),
            rollout=config.RolloutSection(
                workers=workers,
                group_size=self.group_size,
                max_new_tokens=self.num_tokens,
                max_running=math.ceil(window / workers) * self.group_size,
            ),
            learner=config.LearnerSection(
                backend="benchmarks.fleet_processes:FleetBackend",
                device="cpu",
                groups_per_batch=self.groups_per_batch,
                options={"step_seconds": self.groups_per_batch / self.rate},
            ),
            algorithm=config.AlgorithmSection(name="grpo"),
            staleness=StalenessSection(max_staleness=self.max_staleness),
            checkpoint=config.CheckpointSection(every_steps=4),
            metrics=config.MetricsSection(console=False, mismatch_alarm=0),
        )


# -- one fleet ---------------------------------------------------------------------------------------------------------


def run(scene: Scene, *, workers: int) -> Row:
    """Run one fleet, from its start to the audit of its folder."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-fleet-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        tiny_files.write(folder, Policy.new(torch.Generator().manual_seed(0)))
        server = stack.enter_context(MonitoredServer(folder / "bus"))
        run_config = scene.run_file(folder, workers=workers, url=server.url)
        processes = Processes()
        stack.callback(processes.close)
        row = asyncio.run(Fleet(scene, run_config, server, processes).measured())
        steps = [json.loads(line) for line in (run_config.run_directory / "metrics.jsonl").read_text().splitlines()]
        account = account_of(run_config.run_directory, token=server.token)
        row |= {
            "staleness_mean": sum(step["staleness/mean"] for step in steps) / len(steps),
            "staleness_max": max(int(step["staleness/max"]) for step in steps),
            "dropped_groups": int(steps[-1]["staleness/dropped_groups"]),
            "metrics_bytes_per_step": (run_config.run_directory / "metrics.jsonl").stat().st_size / len(steps),
            "audit": account.as_json(),
            "is_clean": account.is_clean,
        }
    return row


class Fleet:
    """The processes of one run, and readings of them from outside."""

    def __init__(self, scene: Scene, run_config: RunConfig, server: MonitoredServer, processes: Processes) -> None:
        self._scene, self._run, self._server, self._processes = scene, run_config, server, processes
        self._parts: dict[str, list[int]] = {name: [] for name in _NAMES} | {"server": [server.pid]}
        self._readings: list[Reading] = []
        self._outstanding = 0

    async def measured(self) -> Row:
        bus = await registry.connect(self._run, token=self._server.token)
        try:
            return await self._measured(bus)
        finally:
            await bus.close()

    async def _measured(self, bus: Bus) -> Row:
        scene, token = self._scene, self._server.token
        started = time.monotonic()
        await self._start_workers()
        joined = time.monotonic() - started
        _say(f"{self._run.rollout.workers} workers have joined in {joined:.1f} s")
        await self._start("watcher", fleet_processes.watcher, self._run, token)
        await asyncio.sleep(3.0)
        first = self._read()
        await asyncio.sleep(scene.idle_seconds)
        presence = between(first, self._read())
        _say(f"presence {load_line(presence)}")
        await self._start("learner", fleet_processes.learner, self._run, token)
        marks: dict[int, Reading] = {}
        async with contextlib.aclosing(self._steps(bus)) as steps:
            async for step in steps:
                if step in (scene.warmup, scene.warmup + scene.steps):
                    marks[step] = self._read()
        first, last = marks[scene.warmup], marks[scene.warmup + scene.steps]
        load = between(first, last)
        _say(f"load     {load_line(load)}")
        steady = [reading for reading in self._readings if first.at <= reading.at <= last.at]
        row = _row(scene, self._run, presence=presence, load=load, readings=steady)
        row |= {"join_seconds": joined, "outstanding_max": self._outstanding, "findings": await self._end()}
        return row

    async def _start_workers(self) -> None:
        count = self._run.rollout.workers
        shares = [range(index, count, self._scene.processes) for index in range(min(count, self._scene.processes))]
        for index, share in enumerate(shares):
            names = [f"worker-{number}" for number in share]
            arguments = (self._run, self._server.token, names, self._scene.seconds, self._scene.num_tokens)
            self._processes.start(f"workers-{index}", fleet_processes.workers, *arguments)
        for index in range(len(shares)):
            await self._ready(f"workers-{index}", part="workers")

    async def _start(self, name: str, main: Any, *arguments: Any) -> None:
        self._processes.start(name, main, *arguments)
        await self._ready(name, part=name)

    async def _ready(self, name: str, *, part: str) -> None:
        await asyncio.to_thread(self._processes.told, name)
        self._parts[part].append(self._processes.pid(name))

    async def _steps(self, bus: Bus) -> AsyncGenerator[int, None]:
        """Yield each step when it is done. Takes readings once a second. Raises RuntimeError if a process has ended."""
        looking = asyncio.create_task(self._look(bus))
        last = 0
        try:
            async with bus.watch(PROGRESS) as states:
                while last < self._run.run.steps:
                    state = asyncio.ensure_future(anext(states))
                    await asyncio.wait((state, looking), return_when=asyncio.FIRST_COMPLETED)
                    if looking.done():
                        state.cancel()
                        looking.result()
                    while last < state.result().step:
                        last += 1
                        yield last
        finally:
            looking.cancel()

    async def _look(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._read()
            published = await bus.last_sequence(PROMPTS)  # read it first, because it only grows
            progress = (await bus.states(PROGRESS)).get("")
            if progress is not None:
                done = progress.groups_trained + progress.groups_dropped + progress.groups_failed
                self._outstanding = max(self._outstanding, published - done - progress.groups_filtered)
                _say(f"step {progress.step}/{self._run.run.steps}", end="\r")
            ended = {name: code for name, code in self._processes.codes().items() if code is not None}
            if ended and (progress is None or not progress.finished):
                raise RuntimeError(f"ended before the run: {ended}; see its log")

    def _read(self) -> Reading:
        reading = read(self._parts, self._server, at=time.monotonic())
        self._readings.append(reading)
        return reading

    async def _end(self) -> Any:
        """Return the watcher's findings, and wait for the other processes, which end by themselves."""
        pipe = self._processes.pipe("watcher")
        pipe.send("end")
        found = await asyncio.to_thread(pipe.recv)
        for name in self._processes.started:
            if name != "watcher":
                code = await asyncio.to_thread(self._processes.join, name, seconds=fleet_processes.STOP_SECONDS)
                if code != 0:
                    raise RuntimeError(f"{name} ended with {code}")
        return found


def _row(scene: Scene, run_config: RunConfig, *, presence: Row, load: Row, readings: Sequence[Reading]) -> Row:
    trajectories = scene.steps * scene.groups_per_batch * scene.group_size / load["seconds"]  # per second
    row: Row = {
        "workers": run_config.rollout.workers,
        "trajectories_per_second": trajectories,
        "group_size": scene.group_size,
        "tokens": scene.num_tokens,
        "window": run_config.window,
        "max_staleness": run_config.max_staleness,
        "step_seconds": load["seconds"] / scene.steps,
        "presence": presence,
        "load": load,
        "memory": memory(readings),
        "connections": readings[-1].counts["connections"],
        "subscriptions": readings[-1].counts["subscriptions"],
    }
    for name, less in (("whole", 0.0), ("work", 1.0)):
        row[name] = {
            "cpu_milliseconds": {
                part: 1e3 * (load["cpu"][part] - less * presence["cpu"][part]) / trajectories for part in load["cpu"]
            },
            "messages": (load["messages"] - less * presence["messages"]) / trajectories,
            "bytes": (load["bytes"] - less * presence["bytes"]) / trajectories,
        }
        row[name]["cpu_milliseconds"]["all"] = sum(row[name]["cpu_milliseconds"].values())
    return row


# -- command -----------------------------------------------------------------------------------------------------------


def broken_promises(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if not row["is_clean"]:
            yield f"{row['workers']} workers: the audit is not clean: {row['audit']}"
        if row["staleness_max"] > row["max_staleness"]:
            yield f"{row['workers']} workers: staleness {row['staleness_max']} over the bound {row['max_staleness']}"
        if row["outstanding_max"] > row["window"]:
            yield f"{row['workers']} workers: {row['outstanding_max']} groups outstanding, of {row['window']}"


# -- as readable lines -------------------------------------------------------------------------------------------------

FLAT: Final = 0.2
"""Difference of a cost from the smallest fleet's up to which it counts as flat."""


HEAD = (
    "         traj/s   CPU ms per trajectory                        per trajectory"
    "   presence, per s    MB at most (per min)\n"
    "workers        server workers learner watcher  whole   work   messages     kB"
    "   CPU ms  messages   server      learner"
)


def line(row: Row) -> str:
    cpu, rss = row["whole"]["cpu_milliseconds"], row["memory"]
    return (
        f"{row['workers']:7d} {row['trajectories_per_second']:6.0f} {cpu['server']:7.3f} {cpu['workers']:7.3f}"
        f" {cpu['learner']:7.3f} {cpu['watcher']:7.3f} {cpu['all']:6.2f} {row['work']['cpu_milliseconds']['all']:6.2f}"
        f"   {row['whole']['messages']:8.2f} {row['whole']['bytes'] / 1e3:6.2f}"
        f"   {1e3 * sum(row['presence']['cpu'].values()):6.0f} {row['presence']['messages']:9.0f}"
        f"   {rss['server']['max_megabytes']:4.0f} ({rss['server']['megabytes_per_minute']:+.1f})"
        f"  {rss['learner']['max_megabytes']:4.0f} ({rss['learner']['megabytes_per_minute']:+.1f})"
    )


def flatness(rows: Sequence[Row]) -> Iterator[str]:
    """Compare each fleet with the smallest; yield each cost that is not flat, and by how much."""
    for row in rows[1:]:
        for of in ("whole", "work"):
            for name, pick in _COSTS.items():
                ratio = pick(row[of]) / pick(rows[0][of])
                if abs(ratio - 1) > FLAT:
                    yield f"{row['workers']} workers: {of}, {name}: {ratio:.2f} times that of {rows[0]['workers']}"


_COSTS: Final[Mapping[str, Any]] = {
    "server CPU": lambda cost: cost["cpu_milliseconds"]["server"],
    "workers' CPU": lambda cost: cost["cpu_milliseconds"]["workers"],
    "learner's CPU": lambda cost: cost["cpu_milliseconds"]["learner"],
    "CPU in all": lambda cost: cost["cpu_milliseconds"]["all"],
    "messages": lambda cost: cost["messages"],
    "bytes": lambda cost: cost["bytes"],
}


def load_line(reading: Row) -> str:
    cpu = "  ".join(f"{name} {share:.1%}" for name, share in reading["cpu"].items())
    return f"{reading['messages']:,.0f} messages/s  {reading['bytes'] / 1e6:.2f} MB/s  CPU: {cpu}"


def _say(text: str, *, end: str = "\n") -> None:
    print(f"  {text}", end=end, file=sys.stderr, flush=True)


def write(target: Path, rows: Sequence[Row], *, given: Sequence[str]) -> None:
    """Write the results after every fleet, because the largest fleets come last and take longest."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in [{"machine": machine(given)}, *rows]))


def machine(given: Sequence[str]) -> Row:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python -m benchmarks.fleet", *given]),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=SIZES, metavar="N", help="sizes of the fleet")
    add("--rate", type=float, default=8.0, help="prompt groups a second, at every size (default 8)")
    add("--each", type=float, metavar="RATE", help="trajectories/s of each worker: rate and batch grow with the fleet")
    add("--group-size", type=int, default=8, help="trajectories of a group (default 8)")
    add("--tokens", type=int, default=128, help="of a trajectory (default 128)")
    add("--seconds", type=float, default=4.0, help="that an answer takes on average (default 4)")
    add("--groups", type=int, default=96, help="groups per batch (default 96)")
    add("--max-staleness", type=int, default=3, help="the bound (default 3)")
    add("--warmup", type=int, default=4, help="steps before the measured ones (default 4)")
    add("--steps", type=int, default=3, help="steps measured (default 3)")
    add("--idle-seconds", type=float, default=15.0, help="how long presence is measured (default 15)")
    add("--processes", type=int, default=4, help="that share the workers (default 4)")
    add("--json", type=Path, metavar="FILE", help="write the rows there, one object a line")
    options = parser.parse_args(given)
    if min(options.workers) < 1:
        parser.error("--workers must be at least 1")
    return options


def scene_of(options: argparse.Namespace, workers: int) -> Scene:
    rate, groups = options.rate, options.groups
    if options.each:
        rate = workers * options.each / options.group_size
        groups = max(1, round(_EACH_STEP_SECONDS * rate))
    return Scene(
        rate=rate,
        group_size=options.group_size,
        num_tokens=options.tokens,
        seconds=options.seconds,
        groups_per_batch=groups,
        max_staleness=options.max_staleness,
        warmup=options.warmup,
        steps=options.steps,
        idle_seconds=options.idle_seconds,
        processes=options.processes,
    )


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if a requirement is violated, 130 at Ctrl-C."""
    options = arguments(given)
    started = time.monotonic()
    rows: list[Row] = []
    print(HEAD)
    try:
        for workers in sorted(options.workers):
            rows.append(run(scene_of(options, workers), workers=workers))
            print(line(rows[-1]), flush=True)
            if options.json is not None:
                write(options.json, rows, given=sys.argv[1:] if given is None else given)
    except KeyboardInterrupt:
        return 130
    print("", *flatness(rows), f"\n{time.monotonic() - started:.0f} s", sep="\n")
    problems = list(broken_promises(rows))
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
