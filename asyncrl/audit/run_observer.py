"""Observes a run repeatedly from any machine, for `asyncrl top` and `asyncrl board`. It changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.actors.health_monitor import POLL_SECONDS as POLL_SECONDS
from asyncrl.actors.health_monitor import HealthMonitor, refusal
from asyncrl.adapters.registry import bus_address, observe
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.config.addresses import without_secrets
from asyncrl.errors import AsyncRLError, ConfigError, NoSuchRun
from asyncrl.messages import StepMetrics
from asyncrl.messages.topics import EVALUATION_METRICS, METRICS
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import Finding, Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What one poll saw. metrics: None before the first step;  evaluation: None before the first one"""

    where: str
    observation: Observation
    metrics: StepMetrics | None = None
    evaluation: StepMetrics | None = None
    findings: Sequence[Finding] = field(default_factory=tuple)


class RunObserver:
    """Observes a run repeatedly.

    It tolerates a bus that is away, and follows one that returns at another address: `asyncrl run` gives its own server
    a new port and password each time. Raises ConfigError if the run has no address.
    """

    def __init__(self, run: RunConfig, *, token: str) -> None:
        self._run, self._token = run, token
        self._address = bus_address(run, token=token)
        self._bus: Bus | None = None
        self._has_seen = False
        self._metrics: StepMetrics | None = None
        self._evaluation: StepMetrics | None = None
        self._monitor = HealthMonitor(self._connect)

    async def _connect(self) -> Bus:
        self._bus = await observe(self._run, token=self._token)
        return self._bus

    @property
    def is_connecting(self) -> bool:
        """Whether the last poll saw nothing because the bus did not answer."""
        return self._monitor.error is not None

    async def poll(self) -> RunView:
        """Observe once.

        Raises NoSuchRun, and ConfigError if nothing was seen yet and waiting will not help, as with a wrong token.
        """
        if self._monitor.error is not None:
            await self._follow()
        observation = await self._monitor.poll()
        refused = refusal(self._monitor.error)
        if refused is not None and (isinstance(refused, NoSuchRun) or not self._has_seen):
            raise refused
        self._has_seen |= not self.is_connecting
        if self._bus is not None and not observation.bus_silent:
            with contextlib.suppress(AsyncRLError, OSError, TimeoutError):  # the watcher reports it at the next poll
                async with asyncio.timeout(POLL_SECONDS):
                    found = await self._bus.states(METRICS)
                    self._metrics = found.get("", self._metrics)
                    self._evaluation = found.get(EVALUATION_METRICS, self._evaluation)
        where = f"run {self._run.run.name} on {without_secrets(self._address[0])}"
        return RunView(
            where=where,
            observation=observation,
            metrics=self._metrics,
            evaluation=self._evaluation,
            findings=diagnose(observation),
        )

    async def _follow(self) -> None:
        """Switch to the current address of the run's bus, if it has moved."""
        with contextlib.suppress(ConfigError):  # the run is not up
            address = bus_address(self._run, token=self._token)
            if address != self._address:
                await self._monitor.close()
                self._address, self._bus, self._monitor = address, None, HealthMonitor(self._connect)

    @property
    def address(self) -> tuple[str, str]:
        """(url, token) of the observed bus; changes when the run moves."""
        return self._address

    async def close(self) -> None:
        await self._monitor.close()
