"""`asyncrl plan RUN.toml --gpus N`: recommends how to split N GPUs between learner and engines.

It starts one engine, then one copy of the learner's model, then, if this machine has the N GPUs, both on the same ones,
and measures each for a while. Then it simulates the loop for every split that may be the best, with several staleness
bounds. The printed keys go into the run file. The simulation leaves out the time to load new weights (0.1 s each),
evaluations, checkpoints and the bus.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.config.staleness_bound import beyond_what_was_shown
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.planning.allocation import Predicted
    from asyncrl.planning.plan import Allocation


MOST_GPUS: Final = 4096
"""Simulating more takes too long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="number of GPUs to split; on CPUs, number of processes"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="time to measure the engine, then the learner, then both at once (default: 60)",
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    if not 1 <= options.gpus <= MOST_GPUS:
        raise ConfigError(f"--gpus {options.gpus}: must be in 1..{MOST_GPUS}")
    if not 1 <= options.seconds <= 3600:
        raise ConfigError(f"--seconds {options.seconds:g}: must be in [1, 3600]")
    run_config = arguments.load(options)

    from asyncrl.planning.plan import plan  # imports torch

    found = plan(run_config, gpus=options.gpus, seconds=options.seconds, tells=_told)
    print(json.dumps(_as_json(run_config, found)) if options.json else "\n".join(_lines(run_config, found)))
    return 0


def _told(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _lines(run_config: RunConfig, found: Allocation) -> Iterator[str]:
    timing, full = found.timing, round(found.engine.most_running)
    lengths = _lengths(found)
    yield (
        f"engine    a decode step takes {1e3 * timing.decode_step(1, found.context):.1f} ms with one sequence and "
        f"{1e3 * timing.decode_step(full, full * found.context):.1f} ms with {full}, the most that ran at once, of "
        f"{found.context:.0f} tokens on average; answers have {sum(lengths) / len(lengths):.0f} tokens on average, "
        f"{max(lengths)} at most"
    )
    yield (
        f"learner   {found.units.copy} of the GPUs {'trains' if found.units.copy == 1 else 'train'} "
        f"{timing.train_tokens_per_second:,.0f} tokens/s, prompts included, plus {timing.train_seconds:.2f} s a step"
    )
    if any(one.split.beside for one in found.found):
        yield (
            "together  on the same GPUs (1+2/1: an engine on the learner's one, too) a decode step takes "
            f"{timing.decode_beside:.2f} times as long while the learner trains, and the learner's step "
            f"{timing.train_beside:.2f} times"
        )
    yield "learner+engines  max_staleness  trained tokens/s  learner busy  engines busy"
    recommended, _ = found.recommended
    for one in sorted(found.found, key=lambda one: (one.split, one.max_staleness)):
        yield _line(found, one, [*([" best"] * (one == recommended)), *([" run file"] * (one == found.now))])
    if found.other is not None:
        way = f' with rollout.beside_learner = "{found.other_way}"'
        yield _line(found, found.other, [*([" best"] * (found.other == recommended)), way])
    yield from (f"note: {note}" for note in notes(run_config, found))
    yield ""
    for section, key, value in settings(run_config, found):
        yield f"--set {section}.{key}={value}"


def _line(found: Allocation, one: Predicted, marks: Sequence[str]) -> str:
    return (
        f"{found.units.shown(one.split):>15}  {one.max_staleness:13d}  {one.rate:16,.0f}  "
        f"{one.reached.learner_busy:12.0%}  {one.reached.engines_busy:12.0%} {','.join(marks)}"
    )


def _lengths(found: Allocation) -> list[int]:
    """Lengths of rollouts, in tokens."""
    from asyncrl.planning.plan import lengths_of

    return [length for group in found.engine.groups for length in lengths_of(group)]


def settings(run_config: RunConfig, found: Allocation) -> list[tuple[str, str, int | str]]:
    """Return (section, key, value) for the recommended keys of the run file."""
    best, is_other = found.recommended
    keys: list[tuple[str, str, int | str]] = [
        ("learner", "ranks", best.split.copies * found.units.copy),
        ("rollout", "workers", best.split.engines + best.split.beside),
    ]
    if best.split.beside:
        own = best.split.copies * found.units.copy
        every = own + best.split.engines * found.units.engine
        keys += [("learner", "gpus", str(list(range(own)))), ("rollout", "gpus", str(list(range(every))))]
    else:
        keys += [(section, "gpus", "[]") for section in ("learner", "rollout") if getattr(run_config, section).gpus]
    if run_config.run.mode == "async":
        keys.append(("staleness", "max_staleness", best.max_staleness))
    if is_other:
        keys.append(("rollout", "beside_learner", found.other_way))
    if found.learner.larger is not None and found.learner.larger > 1.05:
        from asyncrl.planning.learner_probe import LARGER_ROWS

        keys.append(("learner", "micro_batch_tokens", LARGER_ROWS * run_config.learner.micro_batch_tokens))
    return keys


def notes(run_config: RunConfig, found: Allocation) -> Iterator[str]:
    """Yield what the numbers leave out, and how they may be wrong."""
    from asyncrl.planning.allocation import ENOUGH  # imports numpy

    engine = found.engine
    if found.recommended[0].rate < max(one.rate for one in found.found):
        yield f"of all that reach {ENOUGH:.0%} of the fastest, the lowest max_staleness is best: its tokens are younger"
    if run_config.algorithm.filters:
        yield f"algorithm.filters keep {found.kept:.0%} of the groups"
    for key, is_set in (
        ("rollout.extra_samples", run_config.rollout.extra_samples),
        ("rollout.load", run_config.load == "drain"),
        ("weights.every_steps", run_config.weights.every_steps > 1),
    ):
        if is_set:
            yield f"{key} is not simulated"
    if run_config.run.mode == "async" and (problem := _beyond(run_config, found.recommended[0].max_staleness)):
        yield problem
    if engine.num_failed:
        yield f"{engine.num_failed} of {engine.num_failed + len(engine.groups)} groups failed"
    if engine.num_unfinished:
        yield (
            f"{engine.num_unfinished} answers were unfinished when time was up, so the longest are missing; "
            "give more --seconds"
        )
    for place, capacity in (("the", found.timing.capacity), ("beside the learner the", found.timing.capacity_beside)):
        if 0 < capacity < run_config.rollout.max_running:
            yield (
                f"rollout.max_running is {run_config.rollout.max_running}, but {place} engine's memory has room for "
                f"the keys and values of about {capacity} samples"
            )
    if engine.most_running < 0.5 * min(run_config.rollout.max_running, found.timing.capacity):
        yield few_running(run_config, engine.most_running)
    if found.apart:
        yield f"no engine on the learner's GPUs is planned: {found.apart}"
    if found.learner.larger == 0.0:
        yield f"learner.micro_batch_tokens: twice {run_config.learner.micro_batch_tokens:,} does not fit"


def _beyond(run_config: RunConfig, max_staleness: int) -> str:
    """Say what speaks against the recommended bound, which is chosen for its speed."""
    from asyncrl.adapters import registry  # imports torch

    learner, loss = run_config.learner, registry.algorithm(run_config).loss.name
    return beyond_what_was_shown(
        learner.learning_rate,
        max_staleness,
        steps=learner.steps_per_batch,
        trains_adapters=learner.lora.rank > 0,
        loss=loss,
    )


def few_running(run_config: RunConfig, most_running: float) -> str:
    """Say why the engine ran at most ``most_running`` sequences at once, fewer than rollout.max_running."""
    most, window = run_config.rollout.max_running, run_config.window * run_config.rollout.group_size
    if window < most:
        return (
            f"rollout.max_running is {most}, but the window (groups_per_batch x (max_staleness + 1) groups) has only "
            f"{window} samples"
        )
    return (
        f"rollout.max_running is {most}, but no more than {most_running:.0f} samples ran at once: they ended as fast "
        "as others began. Times of steps with more sequences are not measured"
    )


def _as_json(run_config: RunConfig, found: Allocation) -> dict[str, Any]:
    lengths = _lengths(found)
    return {
        "units": dataclasses.asdict(found.units),
        "timing": dataclasses.asdict(found.timing),
        "num_groups": len(found.engine.groups),
        "length_mean": sum(lengths) / len(lengths),
        "length_max": max(lengths),
        "most_running": found.engine.most_running,
        "decode": [dataclasses.asdict(one) for one in found.engine.readings],
        "train": [dataclasses.asdict(one) for one in found.learner.readings],
        "micro_batch_tokens_gain": found.learner.larger,
        "splits": [_row(one) for one in found.found],
        "best": _row(found.best),
        "now": None if found.now is None else _row(found.now),
        "other_way": None if found.other is None else {"beside_learner": found.other_way, **_row(found.other)},
        "settings": {f"{section}.{key}": value for section, key, value in settings(run_config, found)},
        "notes": list(notes(run_config, found)),
    }


def _row(one: Predicted) -> dict[str, Any]:
    return {
        **dataclasses.asdict(one.split),
        "max_staleness": one.max_staleness,
        **dataclasses.asdict(one.reached),
    }
