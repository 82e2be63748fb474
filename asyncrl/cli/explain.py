"""`asyncrl explain RUN_DIR --metric reward/mean --step N`: what moved a metric that is wrong at step N.

It finds the step since which the metric is as it is, and compares the groups of every worker, engine, task, age,
length, and prompt with all other groups of the same steps, before and since (audit/explain.py). What all groups did
alike, such as learning, cancels. Without a suspect it says so.

--replay searches the smallest set of values whose absence removes the change, with at most two tests for each halving.
For rewards and lengths a test looks at the recorded groups that are left. For all other metrics, such as grad_norm or
entropy, each test trains the run again from the checkpoint before the change, without these groups. Exit code 1 if
nothing is found. Needs checkpoint.keep_log = true.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import shlex
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncrl.audit.run_folder import RecordedRun, log_records
from asyncrl.cli import arguments
from asyncrl.errors import ConfigError
from asyncrl.os_process import own_command
from asyncrl.policies.audit.entries import BEGUN, HistoryEntry, present

if TYPE_CHECKING:
    from asyncrl.audit.explain import Observed, Suspect
    from asyncrl.audit.recorded_groups import PromptFinder
    from asyncrl.bus.port import Bus
    from asyncrl.config import RunConfig

MOST_SHOWN: Final = 12
_OF_GROUPS: Final = ("reward/", "length/")
"""Metrics that follow from the groups alone: a replay would not change them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    parser.add_argument("--metric", default="reward/mean", metavar="NAME", help="a number of metrics.jsonl")
    parser.add_argument("--step", type=int, metavar="N", help="step at which it is wrong (default: the last)")
    parser.add_argument("--since", type=int, default=0, metavar="M", help="first such step (default: it is looked for)")
    parser.add_argument("--by", default="", metavar="FIELD", help="only this field, such as worker or prompt")
    parser.add_argument("--replay", action="store_true", help="find the smallest set whose absence removes the change")


@dataclass(slots=True, kw_only=True)
class _Found:
    """What is said. normal, now: means of the metric before ``since`` and since then"""

    metric: str
    step: int
    since: int
    normal: float
    now: float
    suspects: list[Suspect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    by: str = ""
    values: list[str] = field(default_factory=list)
    groups: int = 0
    tests: int = 0
    retract: str = ""
    replayed: tuple[float, float] | None = None
    left: tuple[float, float] | None = None
    """Least and largest value of the metric in whole replays, and in those without ``values``."""


def run(options: argparse.Namespace) -> int:
    from asyncrl.audit.explain import FIELDS, SUSPECT, as_json

    if options.by and options.by not in FIELDS:
        near = difflib.get_close_matches(options.by, FIELDS, 1)
        raise ConfigError(f"--by {options.by}: must be one of {', '.join(FIELDS)}{f'; {near[0]}?' if near else ''}")
    recorded = RecordedRun(options.run_directory)
    history, settings = present(recorded.history()), recorded.newest_settings()
    found = _change(recorded, history, metric=options.metric, step=options.step, since=options.since)
    fields = (options.by,) if options.by else FIELDS

    async def work(bus: Bus) -> None:
        await _explain(recorded, history, bus, settings, found, fields=fields, replays=options.replay)

    recorded.on_bus(settings, work, token=arguments.bus_token())
    strong = [one for one in found.suspects if one.strength >= SUSPECT]
    has_found = bool(found.values) if options.replay else bool(strong)
    if options.json:
        table = {name: getattr(found, name) for name in _Found.__dataclass_fields__}
        suspects = [as_json(one) for one in found.suspects[:100]]
        print(json.dumps(table | {"suspects": suspects, "found": has_found}))
    else:
        _print(found, strong, directory=options.run_directory, has_replayed=options.replay)
    return int(not has_found)


def _change(
    recorded: RecordedRun, history: Sequence[HistoryEntry], *, metric: str, step: int | None, since: int
) -> _Found:
    """Return when the metric changed. Raises ConfigError."""
    from asyncrl.audit.explain import STEPS_BEFORE, change_point

    trained = {entry.step: entry.incarnation for entry in history if entry.kind == "trained"}
    if not trained:
        raise ConfigError(f"{recorded.directory}: has trained no step yet")
    rows = recorded.metrics()
    values: dict[int, float] = {}
    names: set[str] = set()
    for number, incarnation in trained.items():
        row = rows.get((incarnation, number), {})
        names |= {name for name, value in row.items() if isinstance(value, int | float)}
        if isinstance(value := row.get(metric), int | float):
            values[number] = float(value)
    if metric not in names:
        near = difflib.get_close_matches(metric, names, 3)
        raise ConfigError(
            f"--metric {metric}: is no number of a step of this run"
            + (f"; did you mean {' or '.join(near)}" if near else "")
        )
    last = max(values) if step is None else step
    if last not in values:
        raise ConfigError(f"--step {last}: {recorded.directory} has {metric} of steps {min(values)} to {max(values)}")
    if not 0 <= since <= last:
        raise ConfigError(f"--since {since}: must be 1 to {last}, the step that is wrong")
    begun = since or change_point(values, step=last)
    before = [value for number, value in values.items() if begun - STEPS_BEFORE <= number < begun]
    if not before:
        raise ConfigError(f"--step {last}: no step before {begun} has {metric}, with which it could be compared")
    now = [value for number, value in values.items() if begun <= number <= last]
    found = _Found(metric=metric, step=last, since=begun, normal=statistics.fmean(before), now=statistics.fmean(now))
    for entry in history:
        if entry.kind == BEGUN and entry.incarnation and begun - 1 <= entry.step <= last:
            found.notes.append(f"a learner began at step {entry.step} (incarnation {entry.incarnation})")
    return found


async def _explain(
    recorded: RecordedRun,
    history: Sequence[HistoryEntry],
    bus: Bus,
    settings: RunConfig,
    found: _Found,
    *,
    fields: Sequence[str],
    replays: bool,
) -> None:
    from asyncrl.audit.explain import bisect, is_quiet, predicate_of, scan

    observed = await _observe(recorded, history, bus, settings, found, needs_rows="task" in fields)
    found.suspects = scan(observed, since=found.since, fields=fields)
    if not replays:
        return
    of_groups = found.metric.startswith(_OF_GROUPS)
    runs = None
    if not of_groups:
        from asyncrl.audit.explain_replay import Replays

        runs = Replays(
            recorded,
            history,
            bus,
            metric=found.metric,
            since=found.since,
            step=found.step,
            normal=found.normal,
        )
    best: tuple[float, list[str], str] | None = None
    for name in dict.fromkeys(one.field for one in found.suspects):
        ordered = [one.value for one in found.suspects if one.field == name]
        if name == "prompt" and fields != ("prompt",):
            continue  # a few of many prompts may move by chance; --by prompt looks at them

        async def is_gone(values: Collection[str], name: str = name) -> bool:
            found.tests += 1
            kept = [one for one in observed if one.fields.get(name) not in values]
            if runs is None:
                return is_quiet(kept, since=found.since, field=name)
            left = {one.group for one in observed if one.fields.get(name) in values}
            return await runs.is_gone_without(left)

        if runs is None and is_quiet(observed, since=found.since, field=name):
            continue
        values = await bisect(ordered, is_gone)
        if runs is not None and values:
            found.replayed = runs.interval(())
            found.left = runs.interval({one.group for one in observed if one.fields.get(name) in values})
        share = sum(one.share for one in found.suspects if one.field == name and one.value in values)
        if values and share <= 0.5 and (best is None or (len(values), share) < (len(best[1]), best[0])):
            best = (share, values, name)
            if runs is not None:
                break  # each test trains; the first answer is enough
    if best is not None:
        found.values, found.by = best[1], best[2]
        found.groups = sum(one.step >= found.since and one.fields.get(found.by) in found.values for one in observed)
        found.retract = predicate_of(found.by, found.values, since=found.since)


async def _observe(
    recorded: RecordedRun,
    history: Sequence[HistoryEntry],
    bus: Bus,
    settings: RunConfig,
    found: _Found,
    *,
    needs_rows: bool,
) -> list[Observed]:
    """Return the groups that were trained before and since the change. Raises ConfigError if they are trimmed."""
    from asyncrl.audit.explain import STEPS_BEFORE, observe
    from asyncrl.audit.recorded_groups import fates_of, is_answer
    from asyncrl.audit.regrade import no_longer_logged
    from asyncrl.messages.topics import TRAJECTORIES

    finder = _finder(recorded, settings, found) if needs_rows else None
    first = found.since - 3 * STEPS_BEFORE
    fates = {
        group_id: fate
        for group_id, fate in fates_of(history).items()
        if fate.kind == "trained" and first <= fate.step <= found.step
    }
    observed: dict[int, Observed] = {}
    async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
        async for record in records:
            group = record.message
            if group is None or not is_answer(record) or (fate := fates.get(group.group_id)) is None:
                continue
            if fate.sequence in (0, record.sequence):
                observed[group.group_id] = observe(record, fate, metric=found.metric, finder=finder)
    for group_id, fate in sorted(fates.items()):
        if group_id not in observed and fate.step >= found.since - 1:
            raise no_longer_logged(recorded.directory, group_id, fate.step)
    return list(observed.values())


def _finder(recorded: RecordedRun, settings: RunConfig, found: _Found) -> PromptFinder | None:
    from asyncrl.audit.recorded_groups import PromptFinder
    from asyncrl.launch.assembly.data import open_rows

    newest = recorded.checkpoint()
    try:
        rows = open_rows(settings)
    except ConfigError as error:
        found.notes.append(f"task is not looked at: {error}")
        return None
    return PromptFinder(rows, settings, has_overlong=newest is None or newest[0].prompts.overlong > 0)


def _interval(values: tuple[float, float]) -> str:
    least, largest = values
    return f"{least:.4g}" if least == largest else f"{least:.4g} to {largest:.4g}"


# -- what a person sees ------------------------------------------------------------------------------------------------


def _print(found: _Found, strong: Sequence[Suspect], *, directory: Path, has_replayed: bool) -> None:
    now = f"{found.metric} is {found.now:.4g} since step {found.since} (to {found.step})"
    print(f"{now}, and was {found.normal:.4g} before")
    for note in found.notes:
        print(note)
    if found.suspects:
        print(
            f"\n{'field':>8} {'value':>16} {'groups':>7} {'share':>6} {'before':>8} {'since':>8}"
            f"  {'others: before':>14} {'since':>8}  strength"
        )
    for one in found.suspects[:MOST_SHOWN]:
        before = "new" if math.isnan(one.before) else f"{one.before:.4g}"
        print(
            f"{one.field:>8} {one.value[-16:]:>16} {one.groups:7d} {one.share:6.1%} {before:>8} {one.since:8.4g}"
            f"  {one.others_before:14.4g} {one.others_since:8.4g}  {one.strength:8.1f}"
        )
    print()
    if has_replayed and found.values:
        what = f"{found.by} {', '.join(found.values)}"
        print(f"without {what} ({found.groups} groups) the change is gone; found in {found.tests} tests")
        if found.replayed and found.left:
            print(f"replayed, {found.metric} is {_interval(found.replayed)}, and without them {_interval(found.left)}")
        if found.retract:
            words = ["regrade", str(directory), "--retract", found.retract]
            print(f"train without them: {own_command()} {shlex.join(words)}")
    elif has_replayed:
        print(f"nothing is found in {found.tests} tests: there is no small set of groups without which it is gone")
    elif strong:
        print(f"{strong[0].field} {strong[0].value} moved against the others; --replay finds the smallest set that did")
    if not strong and not found.values:
        print(
            "no worker, engine, task, age, or length moved against the others: what changed, changed for all alike, "
            "such as the policy, the settings, or the data as a whole"
        )
