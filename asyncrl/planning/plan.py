"""Measures one engine and one copy of the model, each in a separate process, and simulates every split of the GPUs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncrl.actors.learner.group_filters import ask
from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.engines.port import Pauses
from asyncrl.environments.load import traits
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.launchers.adapter import launcher_class
from asyncrl.launch.processes.gpus import gpus_of_learner, gpus_per_worker, num_gpus, placement
from asyncrl.messages import TrajectoryGroup
from asyncrl.os_process import signal_on_parent_death
from asyncrl.planning.allocation import (
    BOUNDS,
    ENOUGH,
    Predicted,
    Split,
    Units,
    context_of,
    likely,
    predict,
    recommended,
)
from asyncrl.planning.engine_probe import DRAIN, EngineMeasured, measure_engine
from asyncrl.planning.learner_probe import LearnerMeasured, measure_learner
from asyncrl.planning.simulation import DecodeReading, Plan, Timing, fit_decode, fit_training
from asyncrl.planning.together import Together, slowdowns

LOAD_SECONDS: Final = 0.1
"""Assumed pause of an engine for a new version; not measured, because a step takes many times as long."""
PAUSED: Final = 1e9
"""Factor of a decode step of an engine that pauses while the learner trains."""
END_SECONDS: Final = 10.0
"""Time for a measuring process to end the processes that it started."""
MOST_BOUNDED: Final = 2
"""Number of best splits that are also tried with other staleness bounds."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Measurements of a run, and the resulting predictions.

    context  tokens of a running sequence, its prompt included, on average
    apart  why no engine on the learner's GPUs was planned; empty if it was, or there are no GPUs
    kept   share of the sampled groups that algorithm.filters keep
    found  every simulated split and bound;  best: the best of them;  now: the run file's own, if it uses as many GPUs
    other_way  the value of rollout.beside_learner that the run file does not have: sample or pause
    other      the best of those with engines on the learner's GPUs, with it; None without one, or if they cannot pause
    """

    units: Units
    timing: Timing
    engine: EngineMeasured
    learner: LearnerMeasured
    context: float
    apart: str
    kept: float
    found: tuple[Predicted, ...]
    best: Predicted
    now: Predicted | None
    other_way: str
    other: Predicted | None

    @property
    def recommended(self) -> tuple[Predicted, bool]:
        """Return ``best``, or ``other`` if it is clearly faster, and whether it is ``other``."""
        if self.other is None or self.best.rate >= ENOUGH * self.other.rate:
            return self.best, False
        return self.other, True


def plan(run: RunConfig, *, gpus: int, seconds: float, tells: Callable[[str], None]) -> Allocation:
    """Measure engine and learner for about ``seconds`` each, then simulate.

    Blocks for minutes; ``tells`` is called with progress.

    Raises ConfigError if the run file or this machine does not allow it.
    """
    _require_split(run)
    check(run)
    units = Units.of(run.learner.layout, gpus_per_engine=gpus_per_worker(run))
    of_servers = sum(registry.gpus_of_servers(run).values())
    there, needed = num_gpus(), of_servers + max(gpus_per_worker(run), gpus_of_learner(run) and units.copy)
    shares = _may_share(run, units) and not of_servers and gpus <= there  # the servers' GPUs follow the learner's
    try:
        splits = units.splits(gpus - of_servers, shares=shares)
    except ValueError as error:
        if gpus - of_servers >= max(units.copy, units.engine):
            raise ConfigError(
                f"--gpus {gpus}: learner and engine share the GPUs, so there is no split to plan; `asyncrl check` says "
                f"what memory each has. Give --gpus {of_servers + units.copy + units.engine} at least"
            ) from None
        beside = f" beside the {of_servers} of [servers]" if of_servers else ""
        raise ConfigError(f"--gpus {gpus}: {error}{beside}") from None
    if 0 < there < needed:  # without GPUs, everything runs on the CPU
        raise ConfigError(f"asyncrl plan measures on this machine, which has {there} of the {needed} GPUs needed")
    with tempfile.TemporaryDirectory(prefix="asyncrl-plan-") as folder:
        alone = _alone(run, units, Path(folder))
        tells(
            f"starting an engine, then sampling for {seconds:.0f} s and until the last answer ends, at most "
            f"{(1 + DRAIN) * seconds:.0f} s ..."
        )
        engine = in_process(measure_engine, alone, seconds=seconds)
        tells(f"{len(engine.groups)} groups sampled; starting the learner, then training for {seconds:.0f} s ...")
        learner = in_process(measure_learner, alone, engine.groups, seconds=seconds)
        lengths, asked = [lengths_of(group) for group in engine.groups], plan_of(run, engine)
        # In the cache the samples of a group share their prompt.
        room = context_of(lengths, prompt_tokens=asked.prompt_tokens / run.rollout.group_size)
        measured, apart = timing_of(run, engine, learner, room=room), ""
        if shares:
            tells(f"starting both on the same GPUs, then measuring them for {seconds:.0f} s ...")
            try:
                measured = measure_together(alone, engine.groups, measured, room=room, seconds=seconds)
            except Exception as error:  # errors for a lack of memory depend on the backend
                apart, splits = str(error).partition("\n")[0], [split for split in splits if not split.beside]
                if not splits:
                    raise
    timing = during_steps(measured, run.rollout.beside_learner)
    now = split_of(run, units)
    tried = likely(_possible(run, units, splits), asked, timing, lengths)
    tells(f"simulating {', '.join(map(units.shown, tried))} ...")
    found = predict(asked, timing, lengths, splits=tried, bounds=[run.max_staleness])
    if run.run.mode == "async":
        fast = sorted(found, key=lambda one: -one.rate)[:MOST_BOUNDED]
        others = [bound for bound in BOUNDS if bound != run.max_staleness]
        found += predict(asked, timing, lengths, splits=[one.split for one in fast], bounds=others)
    own = [one for one in found if one.split == now and one.max_staleness == run.max_staleness]
    if not own and now in splits:
        own = predict(asked, timing, lengths, splits=[now], bounds=[run.max_staleness])
        found += own
    other, other_way = None, "sample" if run.rollout.beside_learner == "pause" else "pause"
    sharing = [one for one in found if one.split.beside]
    if sharing and issubclass(registry.engine_class(run), Pauses):
        its, timing = recommended(sharing), during_steps(measured, other_way)
        (other,) = predict(asked, timing, lengths, splits=[its.split], bounds=[its.max_staleness])
    return Allocation(
        units=units,
        timing=measured,
        engine=engine,
        learner=learner,
        context=context_of(lengths, prompt_tokens=asked.prompt_tokens),
        apart=apart,
        kept=asked.kept,
        found=tuple(found),
        best=recommended(found),
        now=own[0] if own else None,
        other_way=other_way,
        other=other,
    )


def timing_of(run: RunConfig, engine: EngineMeasured, learner: LearnerMeasured, *, room: float) -> Timing:
    """room: tokens of the cache for a running sequence, on average"""
    capacity = capacity_of(run, engine, room=room)
    step, sequence, context = fit_decode(in_cache(reading, capacity) for reading in engine.readings)
    rate, constant = fit_training(learner.readings)
    return Timing(
        seconds_per_token=step,
        seconds_per_sequence=sequence,
        seconds_per_context=context,
        capacity=capacity,
        load_seconds=LOAD_SECONDS,
        train_tokens_per_second=rate,
        train_seconds=constant,
    )


def capacity_of(run: RunConfig, engine: EngineMeasured, *, room: float) -> int:
    """Return how many sequences run at once: rollout.max_running, or as many as the engine's cache has room for."""
    most = run.rollout.max_running
    return min(most, max(1, int(engine.cache_tokens / room))) if engine.cache_tokens else most


def in_cache(reading: DecodeReading, capacity: int) -> DecodeReading:
    """Return the reading without the sequences over ``capacity``, which wait in the server."""
    share = min(1.0, capacity / reading.running)
    return dataclasses.replace(reading, running=share * reading.running, context=share * reading.context)


def measure_together(
    run: RunConfig, groups: Sequence[TrajectoryGroup], alone: Timing, *, room: float, seconds: float
) -> Timing:
    """Measure engine and learner at once on the same GPUs; return ``alone`` with how much they slow each other down,
    and the smaller cache.

    Raises ConfigError if there is no room for both, and errors of either.
    """
    together = Together()
    with ThreadPoolExecutor(2) as pool:
        engine = pool.submit(in_process, measure_engine, run, together, seconds=seconds)
        learner = pool.submit(in_process, measure_learner, run, groups, together, seconds=seconds)
        both: list[Future[Any]] = [engine, learner]
        wait(both, return_when=FIRST_EXCEPTION)
        together.give_up()
    capacity = capacity_of(run, engine.result(), room=room)
    readings = [in_cache(reading, capacity) for reading in engine.result().readings]
    decode, train = slowdowns(alone, readings, learner.result().readings)
    return dataclasses.replace(alone, decode_beside=decode, train_beside=train, capacity_beside=capacity)


def during_steps(timing: Timing, way: str) -> Timing:
    """Return the timing where engines on the learner's GPUs do that during its steps.  way: rollout.beside_learner"""
    return dataclasses.replace(timing, decode_beside=PAUSED, train_beside=1.0) if way == "pause" else timing


def split_of(run: RunConfig, units: Units) -> Split:
    """Return the run file's own split."""
    copies, workers = max(1, run.learner.layout.ranks // units.copy), run.rollout.workers
    try:
        placed = placement(run)
        sharing = sum(bool(set(gpus) & set(placed.learner)) for gpus in placed.workers)
    except ConfigError:  # it is for another machine
        sharing = 0
    return Split(copies, workers - sharing, beside=sharing)


def plan_of(run: RunConfig, engine: EngineMeasured) -> Plan:
    """Return the run as a Plan for simulation. Its split and number of steps are placeholders."""
    filters = registry.filters(run).values()
    kept = [group for group in engine.groups if all(ask(function, group) for function in filters)]
    if not kept:
        raise ConfigError(f"algorithm.filters drop each of the {len(engine.groups)} groups that were sampled")
    packed = sum(len(group.prompt_of(one)) + len(one.tokens) for group in engine.groups for one in group.trajectories)
    sampled = [length for group in engine.groups for length in lengths_of(group)]
    return Plan(
        mode=run.run.mode,
        workers=1,
        learner_machines=1,
        groups_per_batch=run.learner.groups_per_batch,
        group_size=run.rollout.group_size,
        max_staleness=run.max_staleness,
        steps=1,
        warmup=0,
        seed=run.run.seed,
        prompt_tokens=(packed - sum(sampled)) / len(sampled),
        eviction="wait" if run.staleness.waits else "drop",
        discard=run.staleness.discard,
        opens=run.staleness.admission,
        kept=len(kept) / len(engine.groups),
    )


def lengths_of(group: TrajectoryGroup) -> list[int]:
    """Return the number of tokens that the engine sampled for each rollout, over all parts and turns; at least 1."""
    return [max(1, sum(int(part.response_mask.sum()) for part in parts)) for parts in group.rollouts]


def _possible(run: RunConfig, units: Units, splits: Sequence[Split]) -> Sequence[Split]:
    """Return the splits whose learner the backend supports; some backends support only one rank."""
    two = dataclasses.replace(run, learner=dataclasses.replace(run.learner, ranks=2 * units.copy, gpus=()))
    try:
        registry.backend_class(run).check(two)
    except ConfigError:
        return [split for split in splits if split.copies == 1]
    return splits


def _may_share(run: RunConfig, units: Units) -> bool:
    """Return whether an engine may be on the learner's GPUs at the same time: both have GPUs, of one machine."""
    are_here = run.learner.machines == 1 and not launcher_class(run).places
    return bool(are_here and gpus_of_learner(run) and gpus_per_worker(run)) and units.engine <= units.copy


def _require_split(run: RunConfig) -> None:
    if run.run.colocated:
        raise ConfigError("run.colocated: learner and engines share all GPUs, so there is no split to plan; remove it")
    if not traits(run.rollout.function).samples:
        raise ConfigError(f'rollout.function: "{run.rollout.function}" samples nothing, so there is no split to plan')
    for name, kind in (("engine.kind", run.engine.kind), ("learner.backend", run.learner.backend)):
        if kind == "none":
            raise ConfigError(f'{name}: "none" takes no GPUs, so there is no split to plan')
    if run.rollout.pools:
        raise ConfigError("rollout.pools: plan splits GPUs between engines of one size; remove them, and add them back")
    if run.learner.machines > 1 and gpus_of_learner(run) > num_gpus():
        raise ConfigError("learner.machines: plan on a machine that holds a copy of the model, with machines = 1")


def _alone(run: RunConfig, units: Units, folder: Path) -> RunConfig:
    """Return the run with one copy of the model and one engine, in a separate folder, and only training."""
    return dataclasses.replace(
        run,
        run=dataclasses.replace(run.run, directory=str(folder), name="plan"),
        bus=dataclasses.replace(run.bus, kind="memory", url="", options={}),
        learner=dataclasses.replace(run.learner, ranks=units.copy, machines=1, gpus=(), profile_steps=()),
        rollout=dataclasses.replace(run.rollout, workers=1, gpus=()),
        weights=dataclasses.replace(run.weights, channel="files", options={}, models_every=0),
        evaluation=dataclasses.replace(run.evaluation, datasets=(), every_steps=0),
        checkpoint=dataclasses.replace(run.checkpoint, best=""),
    )


def in_process(measure: Callable[..., T], run: RunConfig, *arguments: object, seconds: float) -> T:
    """Run ``measure`` in a fresh process, whose end frees all memory.

    Raises its errors; AsyncRLError if it was killed.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(sender, measure, run, *arguments), kwargs={"seconds": seconds})
    process.start()
    sender.close()
    try:
        found = receiver.recv()
        process.join(END_SECONDS)  # by itself it releases what others would call leaked
    except EOFError:
        raise AsyncRLError(
            f"{measure.__name__}: its process was killed; memory may have run out. See what `asyncrl run` says"
        ) from None
    finally:  # after Ctrl-C too
        process.terminate()
        process.join(END_SECONDS)
        process.kill()
        process.join()
    if isinstance(found, BaseException):
        raise found
    measured: T = found
    return measured


def _tell(sender: Connection, measure: Callable[..., object], *arguments: object, seconds: float) -> None:
    """Send the result or the error of ``measure``."""
    signal_on_parent_death(signal.SIGKILL)
    try:
        sender.send(measure(*arguments, seconds=seconds))
    except Exception as error:
        try:
            sender.send(error)
        except Exception:  # some errors cannot be pickled
            sender.send(AsyncRLError(f"{type(error).__name__}: {error}"))
