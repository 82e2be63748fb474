"""`asyncrl replay RUN_DIR`: trains a run again from its recorded log, without sampling, and compares step by step.

Each step trains the same batch, in the same order and at the same version as in the run, with the run file that applied
at that step (audit/replay.py). On the reference backend, with the same number of threads on the same kind of
machine, every loss and gradient norm equals the one in metrics.jsonl to the last bit. Exit code 1 if one differs, or if
there is nothing to compare with.

``--set`` changes the run file from step ``--from-step`` on: another loss, correction or learning rate on the same data.
This is an offline experiment: the numbers differ, and the table shows by how much. The data was sampled by the old
policy, so the effective sample size shrinks as the new policy moves away from it.

Steps before ``--from-step`` come from the newest checkpoint before it, or are trained as recorded.

``asyncrl replay RUN.toml --from RUN_DIR`` trains another run file, with its model, algorithm and learner, on the
batches of RUN_DIR, without engines and sampling. ``--batches 7 --times 100`` trains the batch of step 7 a hundred
times. Nothing is compared, so the exit code is 0.

RUN_DIR is only read. The results go to RUN_DIR/replay-N or --out: metrics.jsonl (rows like the learner's, without
metrics of the bus and the clock) and weights/ (the last version, a model folder).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncrl.audit.run_folder import RecordedRun
from asyncrl.cli import arguments
from asyncrl.cli.arguments import step_range
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import present

if TYPE_CHECKING:
    from asyncrl.audit.replay import Planned
    from asyncrl.bus.port import Bus
    from asyncrl.policies.metric import Metric

EXACT: Final = ("loss", "grad_norm")
"""Metrics that must be equal to the last bit if no setting was changed."""
SHOWN: Final = ("loss", "offpolicy/ess", "offpolicy/clip_fraction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_directory", metavar="RUN_DIR", type=Path, help="the run's folder; with --from, the run file to train"
    )
    arguments.add_json(parser)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="RUN_DIR", help="train a run file on the batches of this run"
    )
    parser.add_argument(
        "--batches", default="", metavar="A:B", help="with --from: batches of steps A to B, B included (default: all)"
    )
    parser.add_argument(
        "--times", type=int, default=1, metavar="N", help="with --from: repeat the batches N times (default: 1)"
    )
    parser.add_argument("--from-step", type=int, default=1, metavar="K", help="first step to train (default: 1)")
    arguments.add_overrides(
        parser, "train with another setting from step K on, such as algorithm.correction=none; repeatable"
    )
    parser.add_argument("--out", type=Path, help="folder to write to (default: RUN_DIR/replay-1, -2, ...)")


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        return train_from(options)
    if options.batches or options.times != 1:
        raise ConfigError("--batches, --times: they choose batches of another run; name it with --from RUN_DIR")
    return replay(
        options.run_directory,
        from_step=options.from_step,
        overrides=options.overrides,
        out=options.out,
        token=arguments.bus_token(),
        as_json=options.json,
    )


class Replayed(NamedTuple):
    """Numbers of one step. ``old`` is its row in metrics.jsonl, or None if the run was killed before it was written."""

    step: int
    old: Mapping[str, Any] | None
    new: Mapping[str, Metric]

    def pair(self, name: str) -> tuple[Any, Any]:
        """Return (old, new) as in metrics.jsonl; None for values that are missing or not finite."""
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
    """Replay the run in ``directory``, print the comparison, and return the exit code (see above).

    Raises ConfigError.
    """
    from asyncrl.audit.replay import plan_of  # imports torch; --help works without

    recorded = RecordedRun(directory)
    history = present(recorded.history())
    of_bus = [item for item in overrides if item.startswith("bus.")]
    overrides = [item for item in overrides if item not in of_bus]
    plan, folder = plan_of(recorded, history, from_step=from_step, overrides=overrides)
    is_changed = any(planned.run != recorded.settings(planned.begun) for planned in plan)
    return _train(
        recorded,
        plan,
        folder,
        settings=recorded.newest_settings(of_bus),
        from_step=from_step,
        changed=overrides if is_changed else (),
        out=out,
        token=token,
        as_json=as_json,
    )


def train_from(options: argparse.Namespace) -> int:
    """Train a run file on the recorded batches of another run and return the exit code. Raises ConfigError."""
    from asyncrl import config
    from asyncrl.audit.replay import plan_from  # imports torch; --help works without

    if options.times < 1:
        raise ConfigError(f"--times {options.times}: must be 1 or more")
    if options.from_step != 1:
        raise ConfigError("--from-step: is of a run that is replayed as it was; with --from use --batches A:B")
    if options.run_directory.is_dir():
        raise ConfigError(f"{options.run_directory}: is a folder; with --from, name the run file to train")
    batches = step_range(options.batches, flag="--batches")
    run_config = config.load(options.run_directory, options.overrides)
    recorded = RecordedRun(options.source)
    plan = plan_from(recorded, present(recorded.history()), run=run_config, batches=batches, times=options.times)
    return _train(
        recorded,
        plan,
        None,
        settings=recorded.newest_settings(),
        from_step=1,
        changed=(str(options.run_directory), *options.overrides),
        out=options.out,
        token=arguments.bus_token(),
        as_json=options.json,
        has_old=False,
    )


def _train(
    recorded: RecordedRun,
    plan: Sequence[Planned],
    folder: Path | None,
    *,
    settings: RunConfig,
    from_step: int,
    changed: Sequence[str],
    out: Path | None,
    token: str,
    as_json: bool,
    has_old: bool = True,
) -> int:
    """settings: for the bus of ``recorded``;  has_old: there are recorded rows of the same steps to compare with"""
    from asyncrl.audit.replay import train_again

    rows = recorded.metrics() if has_old else {}
    incarnations = {planned.step: planned.entry.incarnation for planned in plan}

    async def work(bus: Bus) -> tuple[list[Replayed], Path]:
        made, found = _make_folder(recorded.directory, out), []
        if not as_json:
            print(_HEADER)
        try:
            async with contextlib.aclosing(train_again(plan, bus, folder=folder, out=made)) as trained:
                async for step, metrics in trained:
                    if step < from_step:
                        continue
                    found.append(Replayed(step, rows.get((incarnations[step], step)), metrics))
                    if not as_json:
                        print(_line(found[-1]), flush=True)
        except Exception:
            shutil.rmtree(made, ignore_errors=True)  # an incomplete replay is of no use
            raise
        return found, made

    found, out = recorded.on_bus(settings, work, token=token)
    compared = [one for one in found if one.old is not None]
    different = [one.step for one in compared if not one.is_equal]
    if as_json:
        print(json.dumps(_as_json(found, out=out, changed=changed)))
    else:
        print(_verdict(found, compared, different, changed=changed, has_old=has_old) + f"; in {out}")
    return int(not changed and (bool(different) or not compared))


def _make_folder(directory: Path, out: Path | None) -> Path:
    """Create and return ``out``, or the first free RUN_DIR/replay-N."""
    if out is None:
        out = next(path for n in itertools.count(1) if not (path := directory / f"replay-{n}").exists())
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"--out {out}: already exists; name a new folder") from None
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
    found: Sequence[Replayed],
    compared: Sequence[Replayed],
    different: Sequence[int],
    *,
    changed: Sequence[str],
    has_old: bool,
) -> str:
    if not has_old:
        return f"{len(found)} steps of {', '.join(changed)}"
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
