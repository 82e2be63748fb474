"""Assembles the Prometheus endpoint of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.actors.base import Actor, HeartbeatSender
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig


def prometheus(
    run: RunConfig, bus: Bus, *actors: Actor, step_numbers: Callable[[], Mapping[str, float]] | None = None
) -> list[Actor]:
    """Return the Prometheus endpoint for the actors of a process; empty without metrics.prometheus.

    step_numbers  metrics of the learner's newest step
    """
    if not run.metrics.prometheus:
        return []
    from asyncrl.actors.prometheus import PrometheusEndpoint

    speaking = [actor for actor in actors if not isinstance(actor, HeartbeatSender)]
    return [
        PrometheusEndpoint(
            bus,
            *speaking,
            run=run.run.name,
            address=run.metrics.prometheus,
            directory=run.run_directory,
            step_numbers=step_numbers,
        )
    ]
