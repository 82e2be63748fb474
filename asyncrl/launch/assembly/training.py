"""Runs the learner from assembly to its last line of output, with the other actors of its process."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.actors.learner.learner import Learner
from asyncrl.actors.supervisor import supervise
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import INTERRUPTED, HopelessError
from asyncrl.launch.assembly.build_learner import build_learner
from asyncrl.launch.assembly.metrics_endpoint import prometheus
from asyncrl.launch.checks.shared_settings import settings_checksum
from asyncrl.logs import print_line


async def train(
    run: RunConfig,
    bus: Bus,
    *,
    resume: bool = False,
    beside_engines: bool = False,
    beside: Sequence[Actor] = (),
    run_actors: Callable[..., Awaitable[None]] = supervise,
) -> int:
    """Train to the end of the run, or until the learner is drained, and return the exit code.

    beside_engines  see build_learner
    beside          other actors of this process, which end with the learner
    run_actors      runs the given actors until the first one is done
    """
    started = time.monotonic()
    learner, helpers = await build_learner(run, bus=bus, resume=resume, beside_engines=beside_engines)
    first = learner.step
    if resume:
        print_line(f"resumed at step {learner.step}, policy version {learner.policy_version}")
    gc.freeze()
    endpoint = prometheus(run, bus, learner, *helpers, *beside, step_numbers=lambda: learner.newest_metrics)
    await run_actors(
        learner, *helpers, HeartbeatSender(learner, *helpers, about=settings_checksum(run)), *beside, *endpoint
    )
    was_drained = learner.draining.is_set() and not learner.is_finished
    if not was_drained and learner.step == 0:
        raise HopelessError("the data ended before one batch was full: nothing was trained; see data.path")
    print_line(outcome(run, learner, was_drained=was_drained, first=first, seconds=time.monotonic() - started))
    return INTERRUPTED if was_drained else 0


def outcome(run: RunConfig, learner: Learner, *, was_drained: bool, first: int, seconds: float) -> str:
    """Return the learner's last line of output. ``first``: step that this process began at, ``seconds`` ago"""
    in_all = f" ({learner.step} in all)" if first else ""
    text = (
        f"{'stopped' if was_drained else 'done'}: {learner.step - first} steps in {seconds:.0f} s{in_all}, "
        f"{learner.counts}; policy version {learner.policy_version}, checkpoint in {run.run_directory / 'checkpoints'}"
    )
    if learner.rang:
        text += f"; alarms: {', '.join(f'{name} (until step {step})' for name, step in learner.rang.items())}"
    if learner.done and was_drained:
        text += "; its last evaluation is not over"
    elif not learner.done and not was_drained:
        text += f"; the data has ended before step {run.run.steps}"
    elif learner.step == first and not was_drained:
        text += f"; run.steps = {run.run.steps} were trained before: a larger number goes on"
    return text
