"""A run's process manager with fake processes: nothing is started, and processes end on request."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from asyncrl import config
from asyncrl.actors.health_monitor import HealthMonitor
from asyncrl.bus.adapter import BusServer
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config import RunConfig
from asyncrl.errors import LaunchError, NoRoom
from asyncrl.launch.port import ProcessSpec
from asyncrl.launch.processes import launch, process_specs
from asyncrl.launch.processes.fleet import FleetScaler
from asyncrl.launch.processes.process_manager import ProcessManager
from asyncrl.launch.processes.swap import TAKE_OVER
from asyncrl.messages.control import FleetSize, FleetStatus
from asyncrl.messages.topics import FLEET, FLEET_STATUS
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

DEMO = ROOT / "examples" / "demo.toml"


class Process:
    """A fake process. It ends on SIGKILL, on other signals but TAKE_OVER if it ``drains``, or when ``code`` is set."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.pid, self.node = spec, 0, "here"
        self.signals: list[int] = []
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.drains = True
        self.drained_code = 0

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    def signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.code.done() and (number == 9 or (self.drains and number != TAKE_OVER)):
            self.code.set_result(-9 if number == 9 else self.drained_code)


class Launcher:
    """``room``: number of GPUs, which the launcher assigns itself; None leaves that to asyncrl."""

    def __init__(self, room: int | None = None) -> None:
        self.room, self.places = room, room is not None
        self.started: list[Process] = []
        self.fails = 0

    async def start(self, spec: ProcessSpec) -> Process:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise LaunchError("the cluster is away")
        taken = sum(one.spec.num_gpus for one in self.up)
        if self.room is not None and taken + spec.num_gpus > self.room:
            raise NoRoom(f"{spec.num_gpus} GPU asked for, {self.room - taken} free")
        self.started.append(Process(spec))
        return self.started[-1]

    async def release(self, name: str) -> None: ...

    async def close(self) -> None:
        for process in self.started:
            process.signal(9)

    @property
    def up(self) -> list[Process]:
        return [one for one in self.started if not one.code.done()]

    def named(self, name: str) -> Process:
        return [one for one in self.started if one.spec.name == name][-1]


def settings_of(*overrides: str) -> RunConfig:
    return config.load(DEMO, ["learner.device=cpu", *overrides])


def specs_of(launcher: Launcher, *overrides: str) -> process_specs.ProcessSpecs:
    return process_specs.ProcessSpecs(settings_of(*overrides), launcher=launcher, common=["RUN.toml"], environment={})


def manager_of(launcher: Launcher, *overrides: str, server: BusServer | None = None) -> ProcessManager:
    """Return the manager of a learner and two workers, which are not started yet."""
    settings, specs = settings_of(*overrides), specs_of(launcher, *overrides)
    return ProcessManager(
        dataclasses.replace(settings.run, stall_seconds=1e9),
        launcher=launcher,
        children=specs.initial(size=None, resume=False),
        new_worker=specs.new_worker,
        server=server,
    )


class Stage:
    """A running fleet of two workers, and its bus."""

    def __init__(self, launcher: Launcher, *overrides: str, server: BusServer | None = None) -> None:
        self.launcher = launcher
        self.bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
        settings = settings_of(*overrides)
        self.specs = specs_of(launcher, *overrides)
        self.manager = manager_of(launcher, *overrides, server=server)
        self.monitor = HealthMonitor(self._bus)
        scaler = FleetScaler(self._bus, self.manager.fleet, rule=launch._fleet_rule(settings))
        self.task = asyncio.create_task(self.manager.run(self.monitor, scaler))

    async def _bus(self) -> MemoryBus:
        return self.bus

    @property
    def names(self) -> list[str]:
        return [one.spec.name for one in self.launcher.up]

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert not self.task.done(), self.task.result()
            await asyncio.sleep(0.01)

    async def until_up(self, *names: str) -> None:
        await self.until(lambda: set(self.names) == {"learner", *names})

    async def ask(self, count: int) -> FleetStatus:
        """Request this size and return the fleet's answer."""
        size = FleetSize(rollout_workers=count, request=str(count))
        await self.bus.put(FLEET, size)
        while (status := (await self.bus.states(FLEET_STATUS)).get("")) is None or status.request != size.request:
            await asyncio.sleep(0.01)
        return status

    async def end(self) -> int:
        self.launcher.named("learner").signal(15)
        return (await self.task).exit_code
