"""Decides whether the learner replays the engine's experts (rollout.routing_replay), and their size on the bus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.backends.adapter import BackendAdapter
from asyncrl.config import RunConfig
from asyncrl.data.model_folder import ExpertCounts
from asyncrl.engines.adapter import EngineAdapter
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReplay:
    """reason: why replay is off; empty if it is on.  num_bytes: maximum size of a group's experts in a message; 0 if
    off"""

    reason: str
    num_bytes: int = 0

    @property
    def is_on(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"on, up to {self.num_bytes:,} bytes a group" if self.is_on else f"off: {self.reason}"


def decide(
    run: RunConfig,
    experts: ExpertCounts | None,
    *,
    samples: bool,
    engine: Callable[[RunConfig], type[EngineAdapter]],
    backend: Callable[[RunConfig], type[BackendAdapter]],
) -> RoutingReplay:
    """Decide whether routing replay is on. Raises ConfigError if it is required but not possible.

    experts          experts of the model at model.path; None if it has none
    engine, backend  return the run's adapters; called only if the model has experts
    """
    wanted = run.rollout.routing_replay
    if wanted == "off":
        return RoutingReplay(reason='rollout.routing_replay = "off"')
    if wanted == "auto" and run.algorithm.correction == "none":
        return RoutingReplay(reason='algorithm.correction = "none" needs no agreement with the engine')
    size = _num_bytes(run, experts) if experts is not None else 0
    reason = _impossible(run, experts, samples=samples, engine=engine, backend=backend)
    reason = reason or _too_large(run, size, limit="max_group_bytes")
    if wanted == "auto":
        reason = reason or _too_large(run, size, limit="max_message_bytes")
    if reason and wanted == "on":
        raise ConfigError(f'rollout.routing_replay: "on" cannot be: {reason}')
    return RoutingReplay(reason=reason, num_bytes=0 if reason else size)


def _impossible(
    run: RunConfig,
    experts: ExpertCounts | None,
    *,
    samples: bool,
    engine: Callable[[RunConfig], type[EngineAdapter]],
    backend: Callable[[RunConfig], type[BackendAdapter]],
) -> str:
    if experts is None:
        return f"the model at {run.model.path} has no experts"
    if not samples:
        return f'rollout.function = "{run.rollout.function}" samples nothing'
    if not engine(run).reports_experts(run):
        return f'engine.kind = "{run.engine.kind}" does not report its experts here'
    if not backend(run).replays_experts:
        return f'learner.backend = "{run.learner.backend}" does not replay them; "megatron" does'
    return ""


def _too_large(run: RunConfig, size: int, *, limit: str) -> str:
    """size: bytes of a group's experts;  limit: key of [bus]"""
    allowed: int = getattr(run.bus, limit)
    if (needed := run.largest_group_bytes + size) <= allowed:
        return ""
    return (
        f"a group with its experts may take {needed:,} bytes ({size:,} of them the experts), over bus.{limit} "
        f"({allowed:,}); raise it, or lower rollout.group_size or rollout.max_new_tokens"
    )


def _num_bytes(run: RunConfig, experts: ExpertCounts) -> int:
    tokens = run.data.max_prompt_tokens + run.rollout.max_new_tokens
    return run.rollout.group_size * tokens * experts.bytes_per_token
