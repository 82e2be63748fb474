"""`asyncrl bill RUN_DIR`: GPU-seconds per trained token, and what they were spent on: fates, tasks, prompts, workers.

It is computed from the run's log, history and metrics (audit/bill.py), while the run is up or afterwards. Without
checkpoint.keep_log = true the log has only the newest groups, and the bill says how many it covers. Prices are per
GPU-hour: --price 3 for all GPUs, --price rollout=2 --price learner=4 by role, --price w3=1 for one worker or server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncrl.audit.run_folder import RecordedRun, log_records
from asyncrl.cli import arguments
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import present

if TYPE_CHECKING:
    from asyncrl.audit.bill import Bill
    from asyncrl.bus.port import Bus, Record
    from asyncrl.messages import TrajectoryGroup

MOST_PROMPTS: Final = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="[WHO=]PRICE",
        help="price of a GPU-hour: of all, of a role (rollout, learner, server), or of a worker or server; repeatable",
    )
    parser.add_argument("--prompts", action="store_true", help="also list the prompts that cost most")


def run(options: argparse.Namespace) -> int:
    from asyncrl.adapters import registry
    from asyncrl.audit.bill import Bill, engine_items, gains_of, intervals_of, learner_items, server_items
    from asyncrl.audit.metric_rows import rows_of_newest_history
    from asyncrl.audit.recorded_groups import PromptFinder, fates_of
    from asyncrl.messages.topics import TRAJECTORIES

    prices = _prices(options.price)
    recorded = RecordedRun(options.run_directory)
    rows = recorded.metrics()  # before the history: the run may be up, and a row without its line was rolled back
    settings, history = recorded.newest_settings(), present(recorded.history())
    fates = fates_of(history)
    finder = None
    if settings.data.reward_key or len(settings.data.files) > 1:  # otherwise there is one task
        from asyncrl.launch.assembly.data import open_rows

        found = recorded.checkpoint()
        has_overlong = found is None or found[0].prompts.overlong > 0
        finder = PromptFinder(open_rows(settings), settings, has_overlong=has_overlong)

    async def read(bus: Bus) -> list[Record[TrajectoryGroup]]:
        async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
            return [record async for record in records]

    read_records = recorded.on_bus(settings, read, token=arguments.bus_token())
    intervals, silent = intervals_of(read_records, fates, finder=finder)
    per_worker = registry.engine_class(settings).num_gpus(settings) or 1
    of_learner = registry.backend_class(settings).num_gpus(settings) or 1
    trained = [entry for entry in history if entry.kind == "trained"]
    bill = Bill(
        items=engine_items(intervals, gpus=per_worker, own=registry.gpus_of_pool_workers(settings))
        + learner_items(rows, intervals, present_steps={one.step: one.incarnation for one in trained}, gpus=of_learner)
        + server_items(rows, gpus=registry.gpus_of_servers(settings)),
        gains=gains_of(rows_of_newest_history(rows)),
        groups_without_time=silent,
    )
    missing = sum(len(entry.groups) for entry in trained) - sum(one.fate == "trained" for one in intervals)
    said = _as_json(bill, prices=prices, missing=missing, has_prompts=options.prompts)
    print(json.dumps(said)) if options.json else _print(said)
    return 0


def _prices(items: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in items:
        who, _, price = item.rpartition("=")
        try:
            found[who] = float(price)
        except ValueError:
            found[who] = math.nan
        if not 0 <= found[who] < math.inf:
            raise ConfigError(f"--price {item}: must be a price of a GPU-hour, as in 3.2, learner=4, or w3=1.5")
    return found


def _as_json(bill: Bill, *, prices: Mapping[str, float], missing: int, has_prompts: bool) -> dict[str, Any]:
    tokens = bill.trained_tokens
    parts: dict[str, Any] = {}
    for name in ("fate", "actor", "task", *(("prompt",) if has_prompts else ())):
        trained = bill.tokens_by(name)
        parts[name] = {
            str(key): {
                "gpu_seconds": seconds,
                "share": seconds / bill.gpu_seconds if bill.gpu_seconds else 0.0,
                "per_trained_token": seconds / trained[key] if trained.get(key) else None,
            }
            for key, seconds in bill.by(name).items()
            if key
        }
    cost = bill.cost(prices) if prices else None
    gains = {}
    for name, (first, last) in bill.gains.items():
        points = (last - first) * 100
        gains[name] = {
            "first": first,
            "last": last,
            "gpu_seconds_per_point": bill.gpu_seconds / points if points > 0 else None,
            "cost_per_point": cost / points if cost is not None and points > 0 else None,
        }
    return {
        "gpu_seconds": bill.gpu_seconds,
        "trained_tokens": tokens,
        "gpu_seconds_per_trained_token": bill.gpu_seconds / tokens if tokens else None,
        "cost": cost,
        "cost_per_million_trained_tokens": cost / tokens * 1e6 if cost is not None and tokens else None,
        "groups_not_on_the_log": missing,
        "groups_without_time": bill.groups_without_time,
        "held_out": gains,
        **{f"by_{name}": part for name, part in parts.items()},
    }


def _print(said: Mapping[str, Any]) -> None:
    per_token = said["gpu_seconds_per_trained_token"]
    line = f"{said['gpu_seconds']:,.1f} GPU-seconds, {said['trained_tokens']:,} trained tokens"
    line += f", {per_token:.4g} GPU-seconds per trained token" if per_token is not None else ""
    print(line)
    if said["cost"] is not None:
        per_million = said["cost_per_million_trained_tokens"]
        print(f"cost {said['cost']:,.4g}" + ("" if per_million is None else f", {per_million:,.4g} per million"))
    for name, title in (("fate", "fate"), ("actor", "process"), ("task", "task"), ("prompt", "prompt")):
        if not (part := said.get(f"by_{name}")):
            continue
        print(f"\n{title:>16} {'GPU-seconds':>12} {'share':>7}  per trained token")
        for key, row in list(part.items())[: MOST_PROMPTS if name == "prompt" else None]:
            per = "-" if row["per_trained_token"] is None else f"{row['per_trained_token']:.4g}"
            print(f"{key[-16:]:>16} {row['gpu_seconds']:12,.1f} {row['share']:7.1%}  {per}")
    for name, row in said["held_out"].items():
        what = f"{row['first']:.4g} -> {row['last']:.4g}"
        if row["gpu_seconds_per_point"] is None:
            print(f"\n{name}: {what}, no gain")
        else:
            cost = "" if row["cost_per_point"] is None else f", costs {row['cost_per_point']:,.4g}"
            print(f"\n{name}: {what}; a point (0.01) takes {row['gpu_seconds_per_point']:,.4g} GPU-seconds{cost}")
    if said["groups_not_on_the_log"]:
        print(
            f"\n{said['groups_not_on_the_log']} trained groups are no longer on the log and not on this bill; "
            "checkpoint.keep_log = true keeps them"
        )
    if said["groups_without_time"]:
        print(f"\n{said['groups_without_time']} failed groups do not say how long they took")
