"""Launches processes on a Ray cluster, each run by an actor in its own placement group.

    kind = "ray"          [launcher.options] is ``Options``; docs/guides/deploy.md

Ray finds a machine and reserves its GPUs. Ray carries no data of the run and restarts nothing: when an actor or a
machine dies, its process has ended, and launch/processes/process_manager.py decides what follows. A process keeps its
place over restarts. If its machine is gone, it gets another machine with room. Placement groups and actors belong to
our Ray job: Ray frees them when we are killed, and processes end with their actors (launch/launchers/process_agent.py).

The only file that imports ray. Tests: tests/integration/ray/test_ray.py, on a cluster of two nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.config.adapter import RunConfig
from asyncrl.config.checks import Positive
from asyncrl.errors import ConfigError, LaunchError, NoRoom
from asyncrl.launch.launchers import ray_placement
from asyncrl.launch.launchers.adapter import LauncherAdapter
from asyncrl.launch.launchers.process_agent import MARK, LaunchRequest, OutputChunk, ProcessAgent, StartResult
from asyncrl.launch.launchers.ray_placement import Choice, Machine, Need, Strategy
from asyncrl.launch.port import ProcessSpec
from asyncrl.logs import in_a_line
from asyncrl.messages.roles import LEARNER, LEARNER_RANK, MODEL_SERVER

_NEEDS_RAY: Final = 'launcher.kind: "ray" needs ray; pip install asyncrl[ray]'
NODE_ID: Final = "ray.io/node-id"
"""Label that Ray gives every node."""
_AT_ONCE_SECONDS: Final = 2.0
"""How long to wait for a placement group. If there is room, Ray places it in milliseconds."""
_LOOK_SECONDS: Final = 5.0
_LEARNERS: Final = (LEARNER, LEARNER_RANK)
_LAST_SECONDS: Final = 10.0
_REACH_SECONDS: Final = 3.0
_AWAY_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Resources that each process of a role takes of its machine."""

    cpus: Positive[float] = 1.0
    """CPUs to reserve; Ray also sets OMP_NUM_THREADS to this number."""
    gpus: float = -1.0
    """-1: a GPU for each rank of the learner (tensor_parallel for each worker), none if the cluster has none or the
    role's device is "cpu". A fraction shares one."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Labels that its machine must have (`ray start --labels`), with Ray's operators: "H100", "in(a,b)", "!b"."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Custom resources that it takes; {"node:10.0.0.7" = 0.001} puts it on that machine."""

    def __post_init__(self) -> None:
        if self.gpus < 0 and self.gpus != -1:
            raise ConfigError(f"gpus must be >= 0, or -1 for what the run file says, got {self.gpus}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[launcher.options] of the Ray launcher."""

    address: str = ""
    """HOST:PORT of the cluster's head. Empty: RAY_ADDRESS, else the cluster that this machine is a node of, else a
    new one of this machine alone. "auto": the same, but refused if there is none. ray://HOST:10001: from outside the
    cluster, whose machines must reach this one."""
    strategy: Strategy = "PACK"
    """How processes are placed on machines (launch/launchers/ray_placement.py)."""
    learner: Role = field(default_factory=Role)
    """Resources of the learner: cpus, gpus, labels, resources."""
    rollout_worker: Role = field(default_factory=Role)
    """Resources of each rollout worker, likewise."""
    model_server: Role = field(default_factory=Role)
    """Resources of each server of [servers], likewise."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that processes get from `asyncrl run`; others are those of their own machine."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of all processes: {working_dir = ".", env_vars = {PYTHONPATH = "/code"}, pip = [...]}.
    That of `ray job submit` holds without it."""
    wait_for_nodes: bool = False
    """Wait for machines that will join (Ray's autoscaler) instead of refusing what the cluster cannot hold now."""

    def __post_init__(self) -> None:
        place = self.address.removeprefix("ray://")
        _, colon, port = place.rpartition(":")
        is_whole = (colon and port.isdigit()) or "://" in place  # other schemes are of Ray's plugins
        if self.address not in ("", "auto", "local") and not is_whole:
            raise ConfigError(f'address must be "auto", HOST:PORT or ray://HOST:10001, got {self.address!r}')


@dataclass(slots=True, kw_only=True)
class _Place:
    """Reservation of one process.  machine: "" until Ray has found one"""

    need: Need
    choice: Choice
    group: Any
    machine: str = ""


class RayLauncher(LauncherAdapter):
    options_type = Options
    places = True

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(_NEEDS_RAY)

    def __init__(self, *, run_name: str, log_directory: Path, options: Options) -> None:
        self._run_name = run_name
        self._logs = log_directory
        self._options = options
        self._ray: Any = None
        self.errors: Any = None
        """Ray's exceptions."""
        self._mark = secrets.token_hex(8)
        self._has_marked = False
        self._planned: list[Need] = []
        self._places: dict[str, _Place] = {}
        self._running: dict[str, RayProcess] = {}
        self._turn = asyncio.Lock()
        self._met: set[str] = set()
        """Processes whose address others are told."""
        self._unplaced: set[str] = set()
        """Processes of the learner, and of ``_met``, without a machine."""
        self._placed = asyncio.Condition()
        self._lives = itertools.count(1)

    def connect(self) -> str:
        self._ray = ray = _import_ray()
        self.errors = ray.exceptions
        address = self._options.address
        _require_answer(address or os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(
                address=address or None,
                namespace=f"asyncrl-{self._run_name}",
                runtime_env=dict(self._options.runtime_env) or None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"launcher.options: address {address!r}: {_in_a_line(error)}") from None
        self._refuse_another()
        return str(ray.util.get_node_ip_address())

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        machines = self._machines()
        self._planned = [self._need(spec, machines) for spec in specs]
        self._require_room(self._planned, machines)
        self._met = {spec.meets for spec in specs if spec.meets}
        self._unplaced = {spec.name for spec in specs if spec.role in _LEARNERS} | self._met

    async def start(self, spec: ProcessSpec) -> RayProcess:
        place = await self._find_place(spec)
        ray, need = self._ray, place.need
        taken = {key: amount for key, amount in need.resources.items() if key not in ("CPU", "GPU")}
        actor = (
            ray.remote(ProcessAgent)
            .options(
                name=f"{spec.name}-{next(self._lives)}",
                num_cpus=need.resources["CPU"],
                num_gpus=need.resources.get("GPU", 0),
                resources=taken or None,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(place.group, 0),
            )
            .remote()
        )
        process: RayProcess | None = None
        try:
            started: StartResult = await actor.start.remote(self._launch_request(spec))
            place.machine = await self._machine_of(place)  # a machine may die at any time, and Ray find another
            address = self._address(place.machine)
            if started.problem:
                raise NoRoom(f"{spec.name} on {address}: {started.problem}")
            process = self._running[spec.name] = RayProcess(actor, self, name=spec.name, started=started)
        except self.errors.RayError as error:
            raise LaunchError(f"{spec.name}: {_in_a_line(error)}") from None
        finally:
            if process is None:
                self.kill(actor)
        print(f"{spec.name:10s}on {address}: {ray_placement.amounts(need.resources)}", flush=True)
        return process

    async def release(self, name: str) -> None:
        await self._leave(name)
        async with self._placed:  # nobody waits for what does not come again, such as a learner that was swapped
            self._unplaced.discard(name)
            self._placed.notify_all()

    async def _leave(self, name: str) -> None:
        """Give back the place of a process."""
        self._running.pop(name, None)
        if (place := self._places.pop(name, None)) is not None:
            await asyncio.to_thread(self._ray.util.remove_placement_group, place.group)

    async def close(self) -> None:
        if self._ray is None:
            return
        ending = list(self._running.values())
        for process in ending:
            process.signal(signal.SIGKILL)
        if ending:
            await asyncio.wait([asyncio.ensure_future(one.wait()) for one in ending], timeout=_LAST_SECONDS)
        for name in list(self._places):
            await self.release(name)
        (self._logs / MARK).unlink(missing_ok=True)
        self._ray.shutdown()
        self._ray = None

    # -- what our processes may call -----------------------------------------------------------------------------------

    def kill(self, actor: Any) -> None:
        """Kill an actor, and its process with it."""
        if self._ray is not None:
            self._ray.kill(actor, no_restart=True)

    def on_exit(self, name: str) -> None:
        """Note the end of a process. The next learner, or worker of an engine of several machines, may have another
        place, which its ranks or nodes must learn."""
        if name == LEARNER or name in self._met:
            self._unplaced.add(name)

    def print(self, name: str, news: OutputChunk) -> None:
        for stream, line in news.lines:
            if stream == "log":
                with (self._logs / f"{name}.log").open("a") as file:
                    file.write(line + "\n")
            else:
                with contextlib.suppress(OSError):  # nobody reads it any more, or its disk is full
                    print(f"{name}: {line}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"asyncrl run: {in_a_line(text)}", file=sys.stderr, flush=True)

    # -- places --------------------------------------------------------------------------------------------------------

    async def _find_place(self, spec: ProcessSpec) -> _Place:
        """Return the process's former place if it still exists, else a new one. Waits while the cluster is full, and
        says so."""
        if spec.meets:  # of a learner that is to take over (swap.py)
            self._met.add(spec.meets)
        await self._wait_for_those_before(spec)
        while (place := self._places.get(spec.name)) is None or not await self._is_there(spec, place):
            if spec.role in _LEARNERS or spec.name in self._met:
                self._unplaced.add(spec.name)
            await self._leave(spec.name)
            async with self._turn:  # the next process should see where this one went
                machines = await asyncio.to_thread(self._machines)
                place = self._places[spec.name] = self._reserve(spec, machines)
                await self._poll(place, _AT_ONCE_SECONDS)
            if not place.machine:
                await self._wait_for_room(spec.name, place)
        async with self._placed:
            self._unplaced.discard(spec.name)
            self._placed.notify_all()
        if spec.meets:
            await self._wait_for_those_before(spec)  # again: the address of the one that it meets is told now
        return place

    async def _wait_for_those_before(self, spec: ProcessSpec) -> None:
        """Workers wait until all of the learner is placed: they would be in its way. A rank waits for the learner's
        first process and for the rank whose machine it shares; an engine's node for its worker."""
        if spec.role == LEARNER:
            return
        workers_of_others = self._met - {LEARNER, spec.meets}

        def is_before(name: str) -> bool:
            if spec.role == LEARNER_RANK:
                return name in (spec.meets, spec.beside)
            return name != spec.name and name not in workers_of_others

        async with self._placed:
            await self._placed.wait_for(lambda: not any(map(is_before, self._unplaced)))

    def _reserve(self, spec: ProcessSpec, machines: list[Machine]) -> _Place:
        """Ask Ray for a place. Raises NoRoom if the process could never fit next to our other processes."""
        need, up = self._need(spec, machines), {one.id for one in machines}
        others = [place for place in self._places.values() if place.machine in up]
        self._require_room([*(place.need for place in others), need], machines)
        beside = self._places.get(spec.beside)
        choice = ray_placement.choose(
            need,
            strategy=self._options.strategy,
            machines=machines,
            ours=[place.machine for place in others],
            planned=self._planned,
            beside=beside.machine if beside is not None else "",
            apart=[self._places[name].machine for name in spec.apart if name in self._places],
        )
        if choice.within and choice.within <= choice.without:
            raise NoRoom(f"launcher: {self._options.strategy}: the other processes' machine does not suit {spec.name}")
        try:
            group = self._ray.util.placement_group(
                [dict(need.resources)],
                strategy="STRICT_PACK",
                name=spec.name,
                bundle_label_selector=[_selector(choice) | dict(need.labels)],
                _soft_target_node_id=choice.near or None,
            )
        except (self.errors.RayError, ValueError) as error:
            raise LaunchError(f"{spec.name}: {_in_a_line(error)}") from None
        return _Place(need=need, choice=choice, group=group)

    async def _wait_for_room(self, name: str, place: _Place) -> None:
        """Wait until Ray has found a machine, or no allowed machine is up any more."""
        free = await asyncio.to_thread(self._ray.available_resources)
        self.say(
            f"{name} waits for room: {ray_placement.amounts(place.need.resources)} on one machine; "
            f"free in the whole cluster: {ray_placement.amounts(free, like=place.need.resources)}"
        )
        while not await self._poll(place, _LOOK_SECONDS):
            if not place.choice.may_come_true(await asyncio.to_thread(self._machines)):
                return

    async def _poll(self, place: _Place, seconds: float) -> bool:
        """Wait up to ``seconds`` for a machine. Return whether there is one now."""
        if await asyncio.to_thread(place.group.wait, seconds):
            place.machine = await self._machine_of(place)
        return bool(place.machine)

    async def _machine_of(self, place: _Place) -> str:
        """Return the machine that Ray has found; empty while Ray is looking for one, or looks again after a loss."""
        table = await asyncio.to_thread(self._ray.util.placement_group_table, place.group)
        return str(table["bundles_to_node_id"][0]) if table["state"] == "CREATED" else ""

    async def _is_there(self, spec: ProcessSpec, place: _Place) -> bool:
        """Whether the place's machine is up and still compatible with those of our other processes."""
        if not place.machine or await self._machine_of(place) != place.machine:
            return False
        alive = {one.id for one in await asyncio.to_thread(self._machines)}
        others = {name: one.machine for name, one in self._places.items() if one.need.party != place.need.party}
        shunned = others.keys() if self._options.strategy == "STRICT_SPREAD" else spec.apart
        leader = self._places.get(spec.beside)
        return (
            place.machine in alive
            and place.machine not in {others.get(name) for name in shunned}
            and (leader is None or leader.machine == place.machine)
        )

    def _require_room(self, needs: list[Need], machines: list[Machine]) -> None:
        if self._options.wait_for_nodes:
            return
        if problem := ray_placement.refusal(needs, strategy=self._options.strategy, machines=machines):
            raise NoRoom(f"launcher: {problem}; see launcher.options, or add machines with `ray start`")

    def _need(self, spec: ProcessSpec, machines: list[Machine]) -> Need:
        role = self._options.learner if spec.role in _LEARNERS else self._options.rollout_worker
        role = self._options.model_server if spec.role == MODEL_SERVER else role
        has_gpus = any(one.capacity.get("GPU", 0) for one in machines)
        gpus = role.gpus if role.gpus >= 0 else spec.num_gpus if has_gpus else 0
        resources = {"CPU": role.cpus} | ({"GPU": float(gpus)} if gpus else {})
        return Need(
            name=spec.name,
            resources=resources | {key: float(amount) for key, amount in role.resources.items()},
            labels={key: str(value) for key, value in role.labels.items()},
            beside=spec.beside,
            apart=spec.apart,
        )

    def _machines(self) -> list[Machine]:
        return [
            Machine(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                capacity=node["Resources"],
                labels=node["Labels"],
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _address(self, machine: str) -> str:
        return next((one.address for one in self._machines() if one.id == machine), machine)

    # -- what the agent is asked to do ---------------------------------------------------------------------------------

    def _launch_request(self, spec: ProcessSpec) -> LaunchRequest:
        if not self._has_marked:
            self._logs.mkdir(parents=True, exist_ok=True)
            (self._logs / MARK).write_text(self._mark)
            self._has_marked = True
        given = {name: os.environ[name] for name in self._options.environment if name in os.environ}
        met = {"MASTER_ADDR": self._address(self._places[spec.meets].machine)} if spec.meets else {}
        return LaunchRequest(
            arguments=("-m", "asyncrl", *spec.arguments),
            directory="" if "working_dir" in self._ray.get_runtime_context().runtime_env else os.getcwd(),
            environment=given | dict(spec.environment) | met,
            shares_folder=spec.role in _LEARNERS,
            mark=self._mark,
            log=str(self._logs.absolute() / f"{spec.name}.log"),
        )

    def _refuse_another(self) -> None:
        try:
            self._ray.util.get_placement_group(LEARNER)
        except ValueError:
            return
        self._ray.shutdown()
        raise ConfigError(
            f'run.name: a run "{self._run_name}" is up on this Ray cluster; end it first (a run that was just killed '
            "disappears within moments), or take another name"
        )


class RayProcess:
    """One start of a process. Prints its output with its name before each line."""

    def __init__(self, actor: Any, launcher: RayLauncher, *, name: str, started: StartResult) -> None:
        self._actor, self._launcher, self._name = actor, launcher, name
        self.pid, self.node = started.pid, started.host
        self._seen = 0
        self._code: int | None = None
        self._reading = asyncio.Lock()

    async def wait(self) -> int:
        async with self._reading:
            while self._code is None:
                if (code := await self._next()) is not None:
                    self._code = code
                    self._launcher.on_exit(self._name)
        return self._code

    def signal(self, number: int) -> None:
        if self._code is None:
            self._actor.signal.remote(number)
            if number == signal.SIGKILL:  # also kill the actor from here, in case its machine does not answer
                asyncio.get_running_loop().call_later(_ANSWER_SECONDS, self._launcher.kill, self._actor)

    async def _next(self) -> int | None:
        try:
            news: OutputChunk = await self._actor.news.remote(self._seen)
        except self._launcher.errors.ActorUnavailableError:
            await asyncio.sleep(_AWAY_SECONDS)  # network trouble, or an end that Ray has not noticed yet: ask again
            return None
        except self._launcher.errors.RayError as error:
            self._launcher.say(f"{self._name}: its actor is gone: {_in_a_line(error)}")
            self._launcher.kill(self._actor)  # the old process must not run next to the new one
            return -signal.SIGKILL
        self._launcher.print(self._name, news)
        self._seen = news.last
        if news.code is not None:
            self._launcher.kill(self._actor)
        return news.code


def _selector(choice: Choice) -> dict[str, str]:
    """Return the choice as Ray's label selector, which has one condition per label: so ``within`` wins over
    ``without``."""
    if choice.within:
        return {NODE_ID: f"in({','.join(sorted(choice.within - choice.without))})"}
    return {NODE_ID: f"!in({','.join(sorted(choice.without))})"} if choice.without else {}


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError:
        raise ConfigError(_NEEDS_RAY) from None
    return ray


def _require_answer(address: str) -> None:
    """Fail early if no cluster answers: Ray itself tries for minutes. Raises ConfigError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"launcher.options: address {address}: no Ray cluster answers ({error.strerror or error}); "
            "start one with `ray start --head`"
        ) from None


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
