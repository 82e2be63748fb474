"""`asyncrl top RUN`: shows on one screen what a run does now, from any machine.

The screen has the learner's newest metrics, the histogram of staleness, the last heartbeat of every rollout worker, and
the findings of the health monitor. The command changes nothing. With --once, or if stdout is not a terminal, it prints
the screen once.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asyncrl.audit import run_folder
from asyncrl.audit.run_observer import POLL_SECONDS, RunObserver, RunView
from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.logs import as_typed, in_words, printable
from asyncrl.messages import StepMetrics
from asyncrl.messages.roles import LEARNER, WORKER
from asyncrl.policies.health.faults import BUS_SECONDS, SILENT_SECONDS, ActorStatus, Finding
from asyncrl.policies.health.vital_signs import vital_signs

MOST_ROWS = 32
"""Maximum number of worker rows. Silent workers and those furthest behind are shown first."""
BAR = 40
"""Length of the longest bar of the histogram, in characters."""
_BESIDE_BAR = 22
"""Width of what is before and after a bar."""
WIDE = 110
"""Width from which on the numbers to watch say what is normal."""
LEAST_WAIT = 16
"""Minimum width of the column that says what a worker waits for, in characters."""
LEFT_OUT = ("pause s", "queued", "version", "running", "idle")
"""Columns of workers that a narrow screen leaves out, in this order, before it cuts any."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_existing_run(parser)
    parser.add_argument("--once", action="store_true", help="print the screen once and exit, even on a terminal")


def run(options: argparse.Namespace) -> int:
    run_config = run_folder.run_at(options.where, options.overrides, verb="top")
    return top(run_config, token=arguments.bus_token(run_config), once=options.once)


def top(run: RunConfig, *, token: str, once: bool, console: Console | None = None) -> int:
    """Show the run until Ctrl-C (KeyboardInterrupt) and return the exit code.

    Raises ConfigError if the bus is not known or has no such run.
    """
    console = console or Console()
    asyncio.run(_show(run, token=token, once=once or not console.is_terminal, console=console))
    return 0


async def _show(run: RunConfig, *, token: str, once: bool, console: Console) -> None:
    observer = RunObserver(run, token=token)
    block = "█" if console.encoding.startswith("utf") else "#"
    try:
        view = await observer.poll()
        while once and observer.is_connecting and view.observation.bus_silent < BUS_SECONDS:
            view = await observer.poll()
        if once:
            console.print(screen(view, width=console.width, block=block))
            return
        with Live(
            screen(view, width=console.width, block=block), console=console, screen=True, auto_refresh=False
        ) as live:
            while True:
                await asyncio.sleep(POLL_SECONDS)
                live.update(screen(await observer.poll(), width=console.width, block=block), refresh=True)
    finally:
        await observer.close()


def screen(view: RunView, *, width: int, block: str = "█") -> RenderableType:
    """Return what is shown of a run.

    width   of the screen, in characters
    block   character of the histogram's bars
    """
    actors = view.observation.actors
    parts: list[RenderableType] = [
        _headline(view),
        _vital_signs(view.metrics, width=width),
        _learner(view.metrics) if view.metrics is not None else Text("no step is trained yet", style="dim"),
        _staleness(view.metrics.staleness if view.metrics is not None else (), width=width, block=block),
        _workers([seen for seen in actors.values() if seen.beat.role == WORKER], _newest(view), width=width),
        _waits([seen for seen in actors.values() if seen.beat.role != WORKER and seen.beat.waits]),
        _findings(view.findings),
    ]
    return Group(*parts)


def _headline(view: RunView) -> Text:
    metrics = view.metrics
    text = Text(view.where, style="bold")
    if metrics is not None:
        numbers = metrics.numbers
        incarnation = f"{numbers.get('learner/incarnation', 0):.0f}"
        text.append(f"   step {metrics.step}   version {_newest(view)}   incarnation {incarnation}")
    return text.append("   finished" if view.observation.is_finished else "")


def _vital_signs(metrics: StepMetrics | None, *, width: int) -> RenderableType:
    """Return the five numbers to watch, with what is normal where the screen has room for it."""
    table = Table.grid(padding=(0, 2))
    for sign in vital_signs(metrics.numbers, {}) if metrics is not None else ():
        style = "" if sign.is_normal else "red"
        normal = [Text(sign.normal, style="dim")] if width >= WIDE else []
        table.add_row(Text(sign.title, style="bold"), Text(sign.value, style=style), *normal)
    return table


def _newest(view: RunView) -> int:
    """Return the newest policy version in metrics and heartbeats."""
    versions = [seen.beat.policy_version for seen in view.observation.actors.values()]
    trained = view.metrics.numbers.get("weights/version", 0.0) if view.metrics is not None else 0.0
    return max([int(trained), *versions])


_ROWS = (
    ("reward", (("mean", "reward/mean", ".3f"), ("std", "reward/std", ".3f"), ("same", "reward/same_in_group", ".0%"))),
    (
        "loss",
        (("", "loss", "+.4f"), ("grad norm", "grad_norm", ".3g"), ("entropy", "entropy", ".3g"), ("kl", "kl", ".3g")),
    ),
    (
        "learner",
        (
            ("tok/s", "learner/tokens_per_second", ",.0f"),
            ("step s", "learner/step_seconds", ".2f"),
            ("wait s", "learner/wait_seconds", ".2f"),
            ("idle", "learner/idle_ratio", ".1%"),
            ("mfu", "learner/mfu", ".2f"),
        ),
    ),
    (
        "off-policy",
        (
            ("ess", "offpolicy/ess", ".3f"),
            ("k3", "offpolicy/k3", ".2g"),
            ("ratio max", "offpolicy/ratio_max", ".2f"),
            ("fresh mismatch", "mismatch/fresh_mean", ".2g"),
        ),
    ),
    (
        "groups",
        (
            ("buffer", "buffer/groups", ",.0f"),
            ("on the bus", "bus/prompts", ",.0f"),
            ("log lag", "bus/lag", ",.0f"),
            ("dropped", "staleness/dropped_groups", ",.0f"),
            ("failed", "staleness/failed_groups", ",.0f"),
            ("failed samples", "staleness/failed_samples", ",.0f"),
            ("filtered", "staleness/filtered_groups", ",.0f"),
        ),
    ),
    (
        "rollout",
        (
            ("tok/s", "rollout/tokens_per_second", ",.0f"),
            ("idle", "rollout/idle_ratio", ".1%"),
            ("workers", "rollout/workers", ",.0f"),
            ("pause s", "weights/pause_seconds", ".3f"),
            ("lag", "weights/lag_versions", ".0f"),
        ),
    ),
)
"""Cells of each line: label, metric name (metrics/schema.py) and format."""


def _learner(metrics: StepMetrics) -> Table:
    table = Table.grid(padding=(0, 2))
    for title, columns in _ROWS:
        cells = [
            f"[dim]{word}[/] {metrics.numbers[name]:{form}}".strip()
            for word, name, form in columns
            if name in metrics.numbers
        ]
        if cells:
            table.add_row(f"[bold]{title}[/]", "   ".join(cells))
    return table


def _staleness(counts: Sequence[int], *, width: int, block: str) -> RenderableType:
    """Return a histogram bar for each staleness of the trained tokens."""
    if not sum(counts):
        return Text()
    table = Table.grid(padding=(0, 1))
    largest, longest = max(counts), min(BAR, max(1, width - _BESIDE_BAR))
    for age, count in enumerate(counts):
        title = "[bold]staleness[/]" if age == 0 else ""
        bar = block * -(-count * longest // largest)
        table.add_row(title, f"{age:2d}", bar, f"[dim]{count / sum(counts):.1%}[/]")
    return table


def _workers(workers: Sequence[ActorStatus], newest: int, *, width: int) -> RenderableType:
    if not workers:
        return Text("no rollout worker", style="dim")
    shown = sorted(sorted(workers, key=_is_looked_for)[:MOST_ROWS], key=lambda seen: seen.beat.actor)
    rows = [_cells(seen, newest) for seen in shown]
    widths = {name: 2 + max(len(name), *(cell_len(row[name]) for row in rows)) for name in rows[0]}
    too_wide = []
    for name in LEFT_OUT:
        if sum(widths.values()) + LEAST_WAIT > width:
            too_wide.append(name)
            del widths[name]
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=True)
    for name in widths:
        table.add_column(name, justify="left" if name == "worker" else "right", no_wrap=True)
    table.add_column("waits for", no_wrap=True, ratio=1)
    for seen, row in zip(shown, rows, strict=True):
        style = "red" if seen.seconds > SILENT_SECONDS else ""
        table.add_row(*(escape(row[name]) for name in widths), escape(printable(_state(seen))), style=style)
    notes = [f"too narrow for: {', '.join(too_wide)}"] if too_wide else []
    notes += [f"and {left_out:,} more, no further behind"] if (left_out := len(workers) - len(shown)) else []
    return Group(table, *(Text(note, style="dim") for note in notes))


def _cells(seen: ActorStatus, newest: int) -> dict[str, str]:
    """Return the cells of a worker's row by the names of their columns."""
    numbers, beat = seen.beat.numbers, seen.beat
    return {
        "worker": printable(beat.actor),
        "tok/s": f"{numbers.get('rollout/tokens_per_second', 0):,.0f}",
        "running": f"{numbers.get('rollout/running', 0):,.0f}",
        "queued": f"{numbers.get('rollout/queued', 0):,.0f}",
        "idle": f"{numbers.get('rollout/idle_ratio', 0):.0%}",
        "version": str(beat.policy_version),
        "lag": str(max(0, newest - beat.policy_version)),
        "pause s": f"{numbers.get('weights/pause_seconds', 0):.3f}",
    }


def _is_looked_for(seen: ActorStatus) -> tuple[bool, int, str]:
    """Sort key: silent workers first, then those furthest behind."""
    return (seen.seconds <= SILENT_SECONDS, seen.beat.policy_version, seen.beat.actor)


def _state(seen: ActorStatus) -> str:
    if seen.seconds > SILENT_SECONDS:
        return f"not heard for {in_words(seen.seconds)}"
    phase = "" if seen.beat.phase == "running" else seen.beat.phase
    waits = f"{seen.beat.waits_for} ({in_words(seen.beat.waiting_seconds)})" if seen.beat.waits else ""
    return ", ".join(part for part in (phase, waits) if part) or "-"


def _waits(others: Sequence[ActorStatus]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for seen in sorted(others, key=lambda seen: (seen.beat.role != LEARNER, seen.beat.actor)):
        is_at_work = seen.seconds <= SILENT_SECONDS and seen.beat.phase == "running"
        table.add_row(
            escape(printable(seen.beat.actor)),
            ("[dim]waits for[/] " if is_at_work else "") + escape(printable(_state(seen))),
        )
    return table


def _findings(findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text("nothing is wrong", style="green")
    return Group(*(Text(as_typed(printable(f"{finding.fault}: {finding.line}")), style="red") for finding in findings))
