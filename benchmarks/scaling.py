"""Calculate a fleet of 8 to 10,000 GPUs: load of the bus, duration of weight updates, staleness of tokens.

    python -m benchmarks.scaling                                   the tables of docs/results/scaling.md, in Markdown
    python -m benchmarks.scaling --set sender_gigabytes=100        with another assumption
    python -m benchmarks.scaling --update docs/results/scaling.md  put the tables into the page

Arithmetic only: each number follows from ``Assumptions`` and from measurements (docs/results/fleet.jsonl). A value is
an assumption with a source, or a measurement. Nothing here ran on more than one machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.fleet_prices import FLEET_RESULTS, Table, fleet_table, measured

FLEETS: Final = (8, 64, 512, 1024, 4096, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """
    gigabytes        size of the bf16 weights
    gpus             GPUs of one engine
    tokens           tokens sampled per second and GPU at 32k
    sequence_tokens  tokens per second of one sequence in a full batch
    """

    name: str
    gigabytes: float
    gpus: int
    tokens: float
    sequence_tokens: float

    @property
    def sequences(self) -> float:
        """Number of sequences in progress in one engine."""
        return self.tokens * self.gpus / self.sequence_tokens


MODELS: Final = (
    Model(name="7B", gigabytes=14, gpus=1, tokens=2000, sequence_tokens=40),
    Model(name="70B", gigabytes=140, gpus=8, tokens=400, sequence_tokens=25),
    Model(name="671B", gigabytes=1342, gpus=16, tokens=200, sequence_tokens=25),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions of the calculation; docs/results/scaling.md has their sources. The command line can set numbers."""

    rollout_share: float = 0.75
    """Share of the GPUs that sample; the rest train."""
    mean_tokens: float = 10_000
    max_tokens: float = 32_768
    group_size: float = 16
    groups_per_batch: float = 512
    max_staleness: float = 4
    bytes_per_token: float = 9
    """4 for the token, 4 for the behavior logprob, 1 for the response mask."""
    partial_copies: float = 1
    """Additional copies of each token, in a segment until its group is published."""
    stream_megabytes: float = 50
    """Per second, of one stream on disk with one replica: measured (docs/results/bus.jsonl, 64 kB, 4 publishers)."""
    stream_messages: float = 10_000
    """Per second, for one core of a nats-server; the 2,600 messages of 1,000 waiting workers took 15 % of a core."""
    headroom: float = 0.5
    """Share of a limit to plan with; at the limit, latency is unbounded."""
    presence_messages: float = 3.5
    """Per second and worker at the server, in and out: its process's heartbeat every 2 s, the watcher's check of it,
    the standing order and watches. Counted; measured if fleet.jsonl has 100 workers."""
    group_messages: float = 10.0
    """Per prompt group at the server, in and out, with saved partial rollouts: measured (docs/results/fleet.jsonl)."""
    load_messages: float = 10.0
    """Per weight version and worker: announcement, progress, lease."""
    learner_megabytes: float = 200
    """Per second, that one learner process reads, decodes and packs."""
    sender_gigabytes: float = 50
    """Per second, of the learner's NIC (400 Gb/s); one GPU sends."""
    shm_gigabytes: float = 4.7
    """Per second and engine, from /dev/shm into the GPU: measured (docs/results/performance.md, 1.19 GB in 0.252 s)."""
    share_gigabytes: float = 100
    """Per second, of a shared file system for all readers together."""
    store_gigabytes: float = 1.2
    """Per second, from the object store of one nats-server with a 10 Gb/s NIC."""
    delta_share: float = 0.03
    """Share of a version's bytes in the lossless sparse delta of a step."""
    host_gpus: float = 8
    turns_share: float = 0.125
    """Share of the engines that may be paused at once."""


def engines(model: Model, gpus: int, given: Assumptions) -> int:
    return int(gpus * given.rollout_share) // model.gpus


def fleets(model: Model, given: Assumptions) -> list[int]:
    """Return the sizes in FLEETS that have room for an engine."""
    return [gpus for gpus in FLEETS if engines(model, gpus, given)]


def sampled(model: Model, gpus: int, given: Assumptions) -> float:
    """Return the tokens per second of the whole fleet."""
    return engines(model, gpus, given) * model.gpus * model.tokens


def step_seconds(model: Model, gpus: int, given: Assumptions) -> float:
    """Return the seconds between two versions if the learner keeps up with sampling."""
    return given.groups_per_batch * given.group_size * given.mean_tokens / sampled(model, gpus, given)


# -- tables ------------------------------------------------------------------------------------------------------------


def bytes_per_gpu(given: Assumptions) -> Table:
    rows = []
    for model in MODELS:
        log = model.tokens * given.bytes_per_token
        rows.append(
            (
                model.name,
                f"{model.tokens:,.0f}",
                f"{given.bytes_per_token:.0f} × {model.tokens:,.0f} = {log / 1e3:.1f}",
                f"{log * given.partial_copies / 1e3:.1f}",
                f"{log * (2 + given.partial_copies) / 1e3:.1f}",
                f"{8e-6 * log * (2 + given.partial_copies):.2f}",
            )
        )
    head = ("model", "tokens/s a GPU", "log kB/s", "partial rollouts kB/s", "at the server, in and out, kB/s", "Mb/s")
    return "Bytes per sampling GPU and second", head, rows


def group_bytes(given: Assumptions) -> Table:
    rows = []
    for size in (8, 16, 32, 64):
        largest, mean = (size * tokens * given.bytes_per_token for tokens in (given.max_tokens, given.mean_tokens))
        rows.append((str(size), f"{mean / 1e6:.2f}", f"{largest / 1e6:.2f}", "yes" if largest < 8 * 2**20 else "no"))
    head = ("group size", "mean MB", "largest MB", "within bus.max_message_bytes (8 MiB)")
    return "One trajectory group as a message", head, rows


def bus_load(given: Assumptions) -> Table:
    rows = []
    for model in MODELS:
        for gpus in fleets(model, given):
            workers, tokens = engines(model, gpus, given), sampled(model, gpus, given)
            log = tokens * given.bytes_per_token
            stored = log * (1 + given.partial_copies)
            groups = tokens / given.mean_tokens / given.group_size
            versions = 1 / step_seconds(model, gpus, given)
            messages = (
                workers * given.presence_messages
                + groups * given.group_messages
                + workers * versions * given.load_messages
            )
            streams = math.ceil(log / (given.headroom * given.stream_megabytes * 1e6))
            servers = max(
                math.ceil(stored / (given.headroom * given.stream_megabytes * 1e6)),
                math.ceil(messages / (given.headroom * given.stream_messages)),
            )
            rows.append(
                (
                    model.name,
                    f"{gpus:,}",
                    f"{workers:,}",
                    f"{tokens:,.0f}",
                    f"{groups:.2f}",
                    f"{log / 1e6:.2f}",
                    f"{stored / 1e6:.2f}",
                    f"{messages:,.0f}",
                    str(streams),
                    str(servers),
                    f"{log / 1e6 / given.learner_megabytes:.0%}",
                )
            )
    head = ("model", "GPUs", "workers", "tokens/s", "groups/s", "log MB/s", "stored MB/s", "messages/s")
    return "What the bus carries", (*head, "log streams", "servers", "learner's host"), rows


def fan_out(given: Assumptions) -> Table:
    rows = []
    for model in MODELS:
        for gpus in fleets(model, given):
            count = engines(model, gpus, given)
            turns = max(1, math.ceil(count * given.turns_share))
            one = model.gigabytes / given.sender_gigabytes
            on_host = max(1, int(given.host_gpus) // model.gpus)
            seconds = {
                "nccl": count * one,
                "pause": turns * one,
                "files": count * model.gigabytes / given.share_gigabytes,
                "store": count * model.gigabytes / given.store_gigabytes,
                "delta": given.delta_share * count * model.gigabytes / given.store_gigabytes,
                "tree": (math.ceil(math.log2(count + 1))) * one,
            }
            shm = f"{_seconds(model.gigabytes / given.shm_gigabytes)}" if count <= on_host else "-"
            step = step_seconds(model, gpus, given)
            rows.append(
                (
                    model.name,
                    f"{gpus:,}",
                    f"{count:,}",
                    _seconds(step),
                    f"{count:,} × {one:.2f} = {_seconds(seconds['nccl'])}",
                    f"{turns:,} × {one:.2f} = {_seconds(seconds['pause'])}",
                    shm,
                    _seconds(seconds["files"]),
                    _seconds(seconds["store"]),
                    _seconds(seconds["delta"]),
                    f"{seconds['nccl'] / step:.1f}",
                    _seconds(seconds["tree"]),
                )
            )
    head = ("model", "GPUs", "engines", "step", "NCCL, all engines", "NCCL, pause of one", "/dev/shm", "files")
    return (
        "Until every engine has a version",
        (*head, "store, full", "store, delta", "steps NCCL is behind", "a tree would take"),
        rows,
    )


def age(given: Assumptions) -> Table:
    rows = []
    for model in MODELS:
        for gpus in fleets(model, given):
            step = step_seconds(model, gpus, given)
            longest, mean = (tokens / model.sequence_tokens for tokens in (given.max_tokens, given.mean_tokens))
            needed = math.ceil(longest / step)
            window = (given.max_staleness + 1) * given.groups_per_batch
            running = engines(model, gpus, given) * model.sequences / given.group_size
            batch = math.ceil(given.groups_per_batch * max(1.0, longest / step / given.max_staleness))
            rows.append(
                (
                    model.name,
                    f"{gpus:,}",
                    _seconds(step),
                    f"{_seconds(mean)}, {_seconds(longest)}",
                    str(needed),
                    f"{window:,.0f}",
                    f"{running:,.0f}",
                    "yes" if running <= window else f"no: {window / running:.0%} of its places",
                    f"{batch:,}",
                    f"{window * given.group_size * given.mean_tokens * given.bytes_per_token / 1e9:.1f}",
                )
            )
    head = ("model", "GPUs", "step", "answer: mean, longest", "versions the longest spans", "window, groups")
    return (
        "Window and age",
        (*head, "groups that fill the engines", "full?", "groups a batch that keep the longest", "window, GB"),
        rows,
    )


def presence(given: Assumptions) -> Table:
    rows = [
        (
            f"{workers:,}",
            f"{workers * given.presence_messages:,.0f}",
            f"{workers * given.presence_messages / given.stream_messages:.0%}",
            f"{workers / 2:,.0f}",
        )
        for workers in (10, 100, 1000, 5000, 10_000)
    ]
    head = ("workers", "messages/s of presence", "of one server's", "heartbeats stored/s (one a process, every 2 s)")
    return "Presence", head, rows


def tables(given: Assumptions) -> Iterator[tuple[str, Table]]:
    yield "fleet", fleet_table(FLEET_RESULTS)
    yield "bytes", bytes_per_gpu(given)
    yield "groups", group_bytes(given)
    yield "presence", presence(given)
    yield "bus", bus_load(given)
    yield "weights", fan_out(given)
    yield "age", age(given)


def _seconds(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    if value >= 90:
        return f"{value / 60:.1f} min"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def markdown(table: Table) -> str:
    title, head, rows = table
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def assumptions_table(given: Assumptions) -> str:
    lines = ["| assumption | value |", "|---|---|"]
    lines += [f"| `{name}` | {value:g} |" for name, value in dataclasses.asdict(given).items()]
    return "\n".join(lines)


def assumptions(values: dict[str, float] | None = None) -> Assumptions:
    """Return the assumptions with measured values filled in; ``values`` take precedence."""
    return Assumptions(**(measured(FLEET_RESULTS) | (values or {})))


# -- command -----------------------------------------------------------------------------------------------------------


def updated(page: str, made: dict[str, str]) -> str:
    """Return ``page`` with the text between <!-- NAME --> and <!-- end --> replaced. Raises ValueError."""
    for name, text in made.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"the page has no <!-- {name} --> ... <!-- end -->")
        page = pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)  # noqa: B023 - used at once
    return page


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", dest="values", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="put the tables into a Markdown page")
    options = parser.parse_args(given)
    names = {field.name for field in dataclasses.fields(Assumptions)}
    values: dict[str, float] = {}
    for item in options.values:
        name, _, number = item.partition("=")
        if name not in names:
            parser.error(f"--set {item}: no such assumption; there are {', '.join(sorted(names))}")
        try:
            values[name] = float(number)
        except ValueError:
            parser.error(f"--set {item}: {number!r} is not a number")
    taken = assumptions(values)
    made = {name: markdown(table) for name, table in tables(taken)}
    made["assumptions"] = assumptions_table(taken)
    if options.update is not None:
        options.update.write_text(updated(options.update.read_text(), made))
        return 0
    print(*made.values(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
