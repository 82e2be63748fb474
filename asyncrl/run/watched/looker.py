"""Looks at a run again and again, from any machine: what `asyncrl top` and `asyncrl board` show. It changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.actors.health_monitor import LARGE_FLEET, HealthMonitor, refusal
from asyncrl.actors.health_monitor import LOOK_SECONDS as LOOK_SECONDS
from asyncrl.config import RunConfig
from asyncrl.config.addresses import without_secrets
from asyncrl.errors import AsyncRLError, ConfigError, NoSuchRun
from asyncrl.messages import StepMetrics
from asyncrl.messages.topics import EVALUATION_METRICS, METRICS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import SILENT_SECONDS, Finding, Observation, Seen
from asyncrl.protocols import Bus
from asyncrl.run.registry import bus_address, observe


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One look. metrics: None before the first step;  evaluation: None before the first."""

    where: str
    observation: Observation
    metrics: StepMetrics | None = None
    evaluation: StepMetrics | None = None
    findings: Sequence[Finding] = field(default_factory=tuple)


class Looker:
    """Looks at a run again and again; a bus that is away is something it sees, and so is one that comes back elsewhere:
    `asyncrl run` gives its own server another port and password each time. Raises ConfigError: it has no address."""

    def __init__(self, run: RunConfig, *, token: str) -> None:
        self._run, self._token = run, token
        self._address = bus_address(run, token=token)
        self._bus: Bus | None = None
        self._has_seen = False
        self._metrics: StepMetrics | None = None
        self._evaluation: StepMetrics | None = None
        self._watcher = HealthMonitor(self._connect)

    async def _connect(self) -> Bus:
        self._bus = await observe(self._run, token=self._token)
        return self._bus

    @property
    def is_connecting(self) -> bool:
        """Whether the last look saw nothing, because the bus has not answered."""
        return self._watcher.error is not None

    async def look(self) -> View:
        """Raises NoSuchRun, and ConfigError when waiting will not help and nothing was seen yet: a wrong token."""
        if self._watcher.error is not None:
            await self._follow()
        observation = await self._watcher.look()
        refused = refusal(self._watcher.error)
        if refused is not None and (isinstance(refused, NoSuchRun) or not self._has_seen):
            raise refused
        self._has_seen |= not self.is_connecting
        if self._bus is not None and not observation.bus_silent:
            with contextlib.suppress(AsyncRLError, OSError, TimeoutError):  # the next look of the watcher says it
                async with asyncio.timeout(LOOK_SECONDS):
                    found = await self._bus.states(METRICS)
                    self._metrics = found.get("", self._metrics)
                    self._evaluation = found.get(EVALUATION_METRICS, self._evaluation)
        where = f"run {self._run.run.name} on {without_secrets(self._address[0])}"
        return View(
            where=where,
            observation=observation,
            metrics=self._metrics,
            evaluation=self._evaluation,
            findings=diagnose(observation),
        )

    async def _follow(self) -> None:
        """To where the run's bus is now, if it has moved."""
        with contextlib.suppress(ConfigError):  # it is not up
            address = bus_address(self._run, token=self._token)
            if address != self._address:
                await self._watcher.close()
                self._address, self._bus, self._watcher = address, None, HealthMonitor(self._connect)

    @property
    def address(self) -> tuple[str, str]:
        """(url, token) of the bus that it looks at; another one once the run has moved."""
        return self._address

    async def close(self) -> None:
        await self._watcher.close()


def is_silent(seen: Seen) -> bool:
    """Whether an actor has missed its heartbeats."""
    return seen.seconds > SILENT_SECONDS


def look_seconds(view: View) -> float:
    """Until the next look: a look costs the bus a message an actor."""
    return LOOK_SECONDS if len(view.observation.actors) <= LARGE_FLEET else 2 * LOOK_SECONDS
