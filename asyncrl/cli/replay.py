"""`asyncrl replay RUN_DIR`: trains a run again from its recorded log, without sampling, and compares step by step.

Each step trains the same batch in the same order at the same version as in the run, with the run file that was in
force at that step (run/replay.py). On the reference backend, with the same number of threads on the same kind of
machine, every loss and gradient norm equals that in metrics.jsonl to the last bit. Exit code 1 if one does not, or if
there is nothing to compare with.

``--set`` changes the run file from step ``--from-step`` on: another loss, correction or learning rate on the same
data. That is an offline experiment: the numbers differ, and the table says by how much. The data stays what the old
policy sampled, so the effective sample size shrinks as the new policy moves away from it.

Steps before ``--from-step`` come from the newest checkpoint before it, or are trained as recorded.

RUN_DIR is only read. The results go to RUN_DIR/replay-N or --out: metrics.jsonl (rows like the learner's, without what
only a bus and a clock know) and weights/ (the last version, a model folder).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncrl.cli import arguments
from asyncrl.errors import ConfigError
from asyncrl.policies.audit.entries import present
from asyncrl.run.run_folder import RecordedRun, connected

if TYPE_CHECKING:
    from asyncrl.policies.batching.batch import Metric

EXACT: Final = ("loss", "grad_norm")
"""Equal to the last bit when nothing was changed."""
SHOWN: Final = ("loss", "offpolicy/ess", "offpolicy/clip_fraction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    parser.add_argument("--from-step", type=int, default=1, metavar="K", help="first step to train (default: 1)")
    arguments.add_overrides(
        parser, "train with another setting from step K on, such as algorithm.correction=none; repeatable"
    )
    parser.add_argument("--out", type=Path, help="folder to write to (default: RUN_DIR/replay-1, -2, ...)")


def run(options: argparse.Namespace) -> int:
    return replay(
        options.run_directory,
        from_step=options.from_step,
        overrides=options.overrides,
        out=options.out,
        token=arguments.bus_token(),
        as_json=options.json,
    )


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
    from asyncrl.run.replay import plan_of, train_again  # imports torch, which --help does without

    recorded = RecordedRun(directory)
    history = present(recorded.history())
    plan, folder = plan_of(recorded, history, from_step=from_step, overrides=overrides)
    is_changed = any(planned.run != recorded.settings(planned.begun) for planned in plan)
    settings = recorded.newest_settings()
    with recorded.server(settings, token=token) as address:
        if address is None:
            raise recorded.no_log_error(settings)
        out = _make_folder(directory, out)

        async def work() -> list[Replayed]:
            found = []
            async with (
                connected(settings, address) as bus,
                contextlib.aclosing(train_again(plan, bus, folder=folder, out=out)) as trained,
            ):
                async for step, metrics in trained:
                    if step < from_step:
                        continue
                    found.append(Replayed(step, rows.get((incarnations[step], step)), metrics))
                    if not as_json:
                        print(_line(found[-1]), flush=True)
            return found

        rows = recorded.metrics()
        incarnations = {planned.entry.step: planned.entry.incarnation for planned in plan}
        if not as_json:
            print(_HEADER)
        try:
            found = asyncio.run(work())
        except Exception:
            shutil.rmtree(out, ignore_errors=True)  # it was made here; what was trained is no replay
            raise
    compared = [one for one in found if one.old is not None]
    different = [one.step for one in compared if not one.is_equal]
    if as_json:
        print(json.dumps(_as_json(found, out=out, changed=overrides if is_changed else ())))
    else:
        print(_verdict(found, compared, different, changed=overrides if is_changed else ()) + f"; in {out}")
    return int(not is_changed and (bool(different) or not compared))


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
