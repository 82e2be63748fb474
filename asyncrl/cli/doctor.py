"""`asyncrl doctor`: shows in ten seconds, from any machine, what every actor of a run waits for and what is wrong.

It listens long enough to hear every live actor a few times, and changes nothing. Exit code 0: nothing is wrong; 1: it
found a problem; 2: there is no such run, or its bus refuses the connection.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json

from asyncrl.actors.health_monitor import POLL_SECONDS, HealthMonitor, refusal
from asyncrl.adapters.registry import bus_address, observe
from asyncrl.audit import run_folder
from asyncrl.bus.port import Bus
from asyncrl.cli import arguments
from asyncrl.config import RunConfig
from asyncrl.config.addresses import without_secrets
from asyncrl.logs import as_typed, printable
from asyncrl.policies.health.diagnosis import diagnose
from asyncrl.policies.health.faults import SILENT_SECONDS, Finding, Observation

LISTEN_SECONDS = SILENT_SECONDS + 1.5
"""Actors send a heartbeat every 2 s. An actor that was not heard for SILENT_SECONDS of listening is silent. Time in
which the bus does not answer, or this process is not scheduled, does not count as listening."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_existing_run(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    run_config = run_folder.run_at(options.where, options.overrides, verb="doctor")
    return examine(run_config, token=arguments.bus_token(run_config), as_json=options.json)


def examine(run: RunConfig, *, token: str, as_json: bool) -> int:
    """Print what is wrong with the run and return the exit code.

    Raises ConfigError if the bus or the run is unknown, or the token is wrong.
    """
    url, token = bus_address(run, token=token)
    observation = asyncio.run(_listen(run, token=token))
    findings = diagnose(observation)
    where = f"run {run.run.name} on {without_secrets(url)}"
    print(_json(run, observation, findings) if as_json else _text(where, observation, findings))
    return 1 if findings else 0


async def _listen(run: RunConfig, *, token: str) -> Observation:
    async def connect() -> Bus:
        return await observe(run, token=token)

    monitor = HealthMonitor(connect)
    try:
        while True:
            observation = await monitor.poll()
            if (refused := refusal(monitor.error)) is not None:
                raise refused
            is_away = max(observation.bus_silent, observation.bus_refuses) > LISTEN_SECONDS
            if observation.listened >= LISTEN_SECONDS or is_away:
                return observation
            await asyncio.sleep(POLL_SECONDS)
    finally:
        await monitor.close()


def _text(where: str, observation: Observation, findings: list[Finding]) -> str:
    lines = [where + (", finished" if observation.is_finished else "")]
    for name, seen in sorted(observation.actors.items()):
        waits = "; ".join(f"{wait.what} ({wait.seconds:.0f} s)" for wait in seen.beat.waits)
        heard = f"not heard for {seen.seconds:.0f} s" if seen.seconds > SILENT_SECONDS else seen.beat.phase
        version = f"version {seen.beat.policy_version}"
        lines.append(f"  {name:20s} {seen.beat.role:16s} {heard:12s} {version:12s} waits for: {waits or '-'}")
    lines += [f"{finding.fault}: {finding.line}" for finding in findings]
    return as_typed("\n".join(map(printable, lines if findings else [*lines, "nothing is wrong"])))


_FINDING = ("fault", "actor", "text", "cost", "remedy", "seconds", "host", "pid")


def _json(run: RunConfig, observation: Observation, findings: list[Finding]) -> str:
    return json.dumps(
        {
            "run": run.run.name,
            "is_finished": observation.is_finished,
            "listened_seconds": observation.listened,
            "findings": [{name: getattr(finding, name) for name in _FINDING} for finding in findings],
            "actors": {
                name: {"silent_seconds": seen.seconds, "process": seen.process} | dataclasses.asdict(seen.beat)
                for name, seen in sorted(observation.actors.items())
            },
        }
    )
