"""Serves the numbers of a process's actors to Prometheus: GET /metrics, in its text format.

The learner's endpoint has all metrics of the newest step and evaluation. Every process has the numbers of its actors'
heartbeats and the duration of each wait; a worker, and the process of a server, adds the metrics of its SGLang. The
learner uses the port of metrics.prometheus; other processes on its machine use the first free port after it. Each
process writes its address to RUN_DIR/prometheus/NAME.json, which Prometheus reads as file_sd_configs, and removes the
file when it ends.

Tests: tests/actors/test_prometheus.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from asyncrl.actors.base import Actor
from asyncrl.bus.port import Bus
from asyncrl.config.addresses import host_and_port
from asyncrl.durable_files import write_whole
from asyncrl.errors import ConfigError
from asyncrl.messages import Heartbeat
from asyncrl.metrics import schema

log = logging.getLogger("asyncrl.metrics")

MOST_PROCESSES: Final = 1000
"""How many ports after the learner's are tried."""
FOLDER: Final = "prometheus"

_EVALUATION: Final = re.compile(r"evaluation/([^/[]+)(?:\[(.*)\])?/(.+)")
"""Data set, tag, metric. They become labels, so a dashboard can draw data sets that it does not know."""
_CATEGORY: Final = re.compile(r"reward/(?:(.*)\.)?category/(.+)")
"""Part of the reward, if several make it up, and category of answers. They become labels, as users name them."""
_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*")
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusEndpoint(Actor):
    """actors: of this process;  address: HOST:PORT;  step_numbers: metrics of the newest step, in the learner only"""

    def __init__(
        self,
        bus: Bus,
        *actors: Actor,
        run: str,
        address: str,
        directory: Path,
        step_numbers: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__(f"{actors[0].name}.prometheus", bus)
        self._actors = actors
        self._run = run
        self._host, self._port = host_and_port(address)
        self._target = directory / FOLDER / f"{actors[0].name}.json"
        self._step_numbers = step_numbers
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, and say so if the port is taken: the run goes on without the endpoint."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        try:
            self.port = await self._listen(self._runner)
            await asyncio.to_thread(self._announce)
        except (ConfigError, OSError) as error:
            log.error("%s; %s serves no metrics", error, self._actors[0].name)

    async def run(self) -> None:
        """waits for: its cancellation    answers: HTTP requests"""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        with contextlib.suppress(OSError):
            self._target.unlink(missing_ok=True)

    async def _listen(self, runner: web.AppRunner) -> int:
        is_learners = self._step_numbers is not None
        ports = [self._port] if is_learners or not self._port else range(self._port + 1, self._port + MOST_PROCESSES)
        for port in ports:
            try:
                site = web.TCPSite(runner, self._host, port, reuse_address=True)
                await site.start()
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                return int(runner.addresses[0][1])
        tried = f"port {self._port}" if is_learners else f"the {MOST_PROCESSES} ports behind {self._port}"
        raise ConfigError(
            f"metrics.prometheus: {tried} of {self._host} cannot be used ({problem}); name another HOST:PORT"
        )

    def _announce(self) -> None:
        host = self._host if self._host not in ("0.0.0.0", "::", "") else self.bus.own_address
        labels = {"run": self._run, "actor": self._actors[0].name}
        write_whole(self._target, json.dumps([{"targets": [f"{host}:{self.port}"], "labels": labels}]))

    async def _answer(self, request: web.Request) -> web.Response:
        beats = [actor.heartbeat() for actor in self._actors]
        numbers = {} if self._step_numbers is None else self._step_numbers()
        texts = [exposition(self._run, beats, numbers), *[await actor.server_metrics() for actor in self._actors]]
        return web.Response(body="".join(texts).encode(), headers={"Content-Type": _TEXT})


def exposition(run: str, beats: Sequence[Heartbeat], numbers: Mapping[str, float]) -> str:
    """Return the numbers in the text format, grouped by metric. ``numbers``: keys are names of the schema."""
    found: dict[str, list[str]] = {}
    helps: dict[str, str] = {}

    def add(name: str, value: float, **labels: str) -> None:
        found.setdefault(_name(name), []).append(f"{_name(name)}{_labels(run=run, **labels)} {value!r}")
        helps[_name(name)] = schema.SCHEMA.get(name, "")

    for name, value in numbers.items():
        if evaluation := _EVALUATION.fullmatch(name):
            dataset, tag, metric = evaluation.groups(default="")
            add("evaluation", float(value), actor="learner", dataset=dataset, tag=tag, metric=metric)
        elif category := _CATEGORY.fullmatch(name):
            part, kind = category.groups(default="")
            add("reward/category", float(value), actor="learner", part=part, category=kind)
        elif name.count("/") < 2:  # numbers of one worker are served by that worker
            add(name, float(value), actor="learner")
    for beat in beats:
        add("policy_version", float(beat.policy_version), actor=beat.actor)
        for name, value in beat.numbers.items():
            if name not in numbers:
                add(name, float(value), actor=beat.actor)
        for what, seconds in _waits(beat).items():
            add("waiting_seconds", seconds, actor=beat.actor, what=what)
    return "\n".join((*_families(found, helps), ""))


def _waits(beat: Heartbeat) -> dict[str, float]:
    """Return the seconds of the longest wait of each kind.

    Numbers in its description, such as a weight version, become "N": Prometheus keeps a series for every label value.
    """
    longest: dict[str, float] = {}
    for wait in beat.waits:
        what = _NUMBER.sub("N", wait.what)
        longest[what] = max(longest.get(what, 0.0), float(wait.seconds))
    return longest


def _families(found: Mapping[str, Iterable[str]], helps: Mapping[str, str]) -> Iterator[str]:
    for name, samples in found.items():
        if helps[name]:
            yield f"# HELP {name} {helps[name]}"
        yield f"# TYPE {name} gauge"
        yield from samples


def _name(name: str) -> str:
    return "asyncrl_" + re.sub("[^a-zA-Z0-9_]", "_", name)


def _labels(**labels: str) -> str:
    escaped = {
        key: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for key, value in labels.items()
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped.items()) + "}"
