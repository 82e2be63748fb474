"""`asyncrl replay RUN_DIR`: trains again from the recorded log, without any rollout, and compares step by step.

The same batches in the same order at the same versions, as history.jsonl says, along the history that the newest
weights have: groups are read from the log (checkpoint.keep_log = true), and batches are built, packed and trained by
the code that the learner uses, with the run file of the life that took each step. On the reference backend, with as
many threads on a machine of the same kind, every loss and gradient norm is equal to the last bit to that in
metrics.jsonl. Exit code 1 when one is not, or when there is none to compare with.

``--set`` changes the run file from step ``--from-step`` on: another loss, correction or learning rate on the same
data. That is an offline experiment: the numbers differ, and the table says by how much. The data stays what the old
policy sampled: the further the new one moves away from it, the smaller is the effective sample size.

Steps before ``--from-step`` are taken over from the newest checkpoint among them, or trained as recorded.

RUN_DIR is only read. What comes of it goes to RUN_DIR/replay-N or --out: metrics.jsonl (rows as the learner's, without
what only a bus and a clock know), and weights/ (the last version, a model folder).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from asyncrl import config
from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.errors import ConfigError
from asyncrl.messages import TrajectoryGroup
from asyncrl.metrics.sinks import JsonLines
from asyncrl.policies.accounting import Entry, present, steps
from asyncrl.policies.batch import Metric
from asyncrl.policies.staleness import Forks
from asyncrl.protocols import Bus
from asyncrl.recorded import RecordedRun, connected, log_records
from asyncrl.retraining import Trainer

EXACT: Final = ("loss", "grad_norm")
"""Equal to the last bit when nothing was changed."""
SHOWN: Final = ("loss", "offpolicy/ess", "offpolicy/clip_fraction")
CHANGEABLE: Final = (
    *("algorithm.", "critic.", "reference.", "teacher.", "learner."),
    *("staleness.weight", "staleness.learning_rate", "model.dtype"),
)
"""What --set may begin with; the rest of a run file decides nothing once the batches are known."""


class Planned(NamedTuple):
    """One step to train, with what it is trained by."""

    entry: Entry
    life: Entry
    forks: Forks
    run: RunConfig


class Replayed(NamedTuple):
    """One step's numbers; ``old`` is its row in metrics.jsonl, None when a kill came before it was written."""

    step: int
    old: Mapping[str, Any] | None
    new: Mapping[str, Metric]

    def pair(self, name: str) -> tuple[Any, Any]:
        """(old, new) as metrics.jsonl has them; None for what is not finite or not there."""
        value = self.new.get(name)
        is_number = isinstance(value, float | int) and math.isfinite(value)
        return (self.old or {}).get(name), value if is_number else None

    @property
    def is_equal(self) -> bool:
        return all(old == new for old, new in map(self.pair, EXACT))


def replay(
    directory: Path,
    *,
    from_step: int = 1,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    token: str = "",
    as_json: bool = False,
) -> int:
    """Replay the run in ``directory`` and print the comparison; the exit code, as above. Raises ConfigError."""
    recorded = RecordedRun(directory)
    history = present(recorded.history())
    plan, folder = plan_of(recorded, history, from_step=from_step, overrides=overrides)
    is_changed = any(planned.run != recorded.settings(planned.life) for planned in plan)
    with recorded.server(recorded.newest_settings(), token=token) as address:
        if address is None:
            raise ConfigError(
                f"{directory}: its log was in memory and ended with its nats-server; use bus.store = file"
            )
        out = _make_folder(directory, out)

        async def work() -> list[Replayed]:
            found = []
            async with (
                connected(recorded.newest_settings(), address) as bus,
                contextlib.aclosing(train_again(plan, bus, folder=folder, out=out)) as trained,
            ):
                async for step, metrics in trained:
                    if step < from_step:
                        continue
                    found.append(Replayed(step, rows.get((epochs[step], step)), metrics))
                    if not as_json:
                        print(_line(found[-1]), flush=True)
            return found

        rows, epochs = recorded.metrics(), {planned.entry.step: planned.entry.run_epoch for planned in plan}
        if not as_json:
            print(_HEADER)
        found = asyncio.run(work())
    compared = [one for one in found if one.old is not None]
    different = [one.step for one in compared if not one.is_equal]
    if as_json:
        print(json.dumps(_as_json(found, out=out, changed=overrides if is_changed else ())))
    else:
        print(_verdict(found, compared, different, changed=overrides if is_changed else ()) + f"; in {out}")
    return int(not is_changed and (bool(different) or not compared))


def plan_of(
    recorded: RecordedRun, history: Sequence[Entry], *, from_step: int, overrides: Sequence[str]
) -> tuple[list[Planned], Path | None]:
    """The steps to train, and the backend folder to start from (None: the run's model). Raises ConfigError."""
    trained = list(steps(history))
    if not 1 <= from_step <= len(trained):
        raise ConfigError(f"--from-step {from_step}: {recorded.directory} has steps 1 to {len(trained)}")
    for item in overrides:
        if not item.startswith(CHANGEABLE) or item.startswith("learner.groups_per_batch"):
            raise ConfigError(f"--set {item}: a replay has its batches already; change {', '.join(CHANGEABLE)}...")
    done, folder = recorded.checkpoint_before(from_step, history)
    plan = []
    for entry, life, forks in trained[done:]:
        run = recorded.settings(life)
        if not run.checkpoint.keep_log:
            raise ConfigError(
                f"{recorded.directory}: checkpoint.keep_log was off, so what was trained is no longer on the log; only "
                "a run with checkpoint.keep_log = true can be replayed"
            )
        if entry.step >= from_step:
            run = _changed(life, overrides)
        plan.append(Planned(entry, life, forks, run))
    return plan, folder


def _changed(life: Entry, overrides: Sequence[str]) -> RunConfig:
    table = json.loads(json.dumps(life.settings))
    for item in overrides:
        config.override(table, item)
    return config_record.from_table(table, where="--set")


async def train_again(
    plan: Sequence[Planned], bus: Bus, *, folder: Path | None, out: Path
) -> AsyncGenerator[tuple[int, Mapping[str, Metric]], None]:
    """(step, metrics) of every step of ``plan``, from the backend state in ``folder``; writes its files to ``out``."""
    loop = asyncio.get_running_loop()
    needed = {group_id for planned in plan for group_id in planned.entry.groups}
    held: dict[int, TrajectoryGroup] = {}
    with ThreadPoolExecutor(1, thread_name_prefix="backend") as thread, contextlib.ExitStack() as stack:
        trainer = Trainer(out)
        stack.callback(lambda: thread.submit(trainer.close).result())
        sink = JsonLines(out / "metrics.jsonl")
        stack.callback(sink.close)
        async with contextlib.aclosing(log_records(bus)) as records:
            for planned in plan:
                entry = planned.entry
                while missing := [group_id for group_id in entry.groups if group_id not in held]:
                    record = await anext(records, None)
                    if record is None:
                        raise ConfigError(f"step {entry.step} trained group {missing[0]}, which is not on the log")
                    group = record.message
                    if group is not None and group.group_id in needed and not group.error:
                        held.setdefault(group.group_id, group)
                step = functools.partial(
                    trainer.step,
                    [held.pop(group_id) for group_id in entry.groups],
                    run=planned.run,
                    folder=folder,
                    step=entry.step,
                    max_staleness=planned.life.max_staleness,
                    forks=planned.forks,
                )
                metrics = await loop.run_in_executor(thread, step)
                sink.write(entry.step, metrics)
                yield entry.step, metrics
        last = plan[-1].entry
        await loop.run_in_executor(thread, functools.partial(trainer.export, epoch=last.run_epoch, version=last.step))


def _make_folder(directory: Path, out: Path | None) -> Path:
    """``out``, or the first free RUN_DIR/replay-N."""
    if out is None:
        out = next(path for n in itertools.count(1) if not (path := directory / f"replay-{n}").exists())
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"--out {out}: is there already; name a new folder") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}") from None
    return out


# -- what a person sees ------------------------------------------------------------------------------------------------

_HEADER = "  step" + "".join(f"  {name.rpartition('/')[2] + ' old':>18} {'new':>13}" for name in SHOWN)


def _line(one: Replayed) -> str:
    numbers = "".join(f"  {_number(old):>18} {_number(new):>13}" for old, new in map(one.pair, SHOWN))
    return f"{one.step:6d}{numbers}" + ("  =" if one.old is not None and one.is_equal else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _verdict(
    found: Sequence[Replayed], compared: Sequence[Replayed], different: Sequence[int], *, changed: Sequence[str]
) -> str:
    missing = f"; {len(found) - len(compared)} have no row in metrics.jsonl" if len(compared) < len(found) else ""
    if changed:
        return f"{len(found)} steps with {', '.join(changed)}{missing}"
    if different:
        what = f"loss or gradient norm of {len(different)} of {len(compared)} steps, the first is {different[0]}"
        return f"DIFFERENT: {what}{missing}"
    if not compared:
        return f"NOT COMPARED: none of {len(found)} steps has a row in metrics.jsonl"
    return f"{len(compared)} steps, loss and gradient norm equal to the last bit{missing}"


def _as_json(found: Sequence[Replayed], *, out: Path, changed: Sequence[str]) -> dict[str, Any]:
    compared = [one for one in found if one.old is not None]
    return {
        "out": str(out),
        "changed": list(changed),
        "compared": len(compared),
        "equal": bool(compared) and all(one.is_equal for one in compared),
        "steps": [
            {"step": one.step, "equal": one.old is not None and one.is_equal}
            | {name: dict(zip(("old", "new"), one.pair(name), strict=True)) for name in (*SHOWN, "grad_norm")}
            for one in found
        ],
    }
