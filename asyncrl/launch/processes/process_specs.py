"""How each process of a run is started: its command, GPUs and environment."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence

from asyncrl.adapters import registry
from asyncrl.adapters.registry import gpus_of_servers
from asyncrl.bus.adapter import BusServer
from asyncrl.config import RunConfig
from asyncrl.errors import NoRoom
from asyncrl.launch import colocated
from asyncrl.launch.launchers.placement import Gpus, free, numbers
from asyncrl.launch.port import Launcher, ProcessSpec
from asyncrl.launch.processes.child_process import ChildProcess, RestartPolicy
from asyncrl.launch.processes.gpus import gpus_of_learner, gpus_per_worker, num_gpus, placement
from asyncrl.logs import print_line
from asyncrl.messages.control import FleetSize
from asyncrl.messages.roles import ENGINE_NODE, EVALUATION_WORKER, LEARNER, LEARNER_RANK, MODEL_SERVER, WORKER


class ProcessSpecs:
    """Creates the processes of one run without starting them."""

    def __init__(
        self,
        run_config: RunConfig,
        *,
        launcher: Launcher,
        common: Sequence[str],
        environment: Mapping[str, str],
        server: BusServer | None = None,
    ) -> None:
        """
        common       arguments of every process: the run file and its overrides
        environment  added to the environment of every process
        server       server of the run's own bus, on which each worker has its own token
        """
        self._run = run_config
        self._places = launcher.places
        self._common = common
        self._environment = dict(environment)
        self._server = server
        self._learner_gpus: Gpus = ()
        self._beside: Mapping[str, int] = {}

    def initial(self, *, size: FleetSize | None, resume: bool) -> list[ChildProcess]:
        """Return the learner and its separate ranks, then rollout workers and evaluation workers.

        size  size that `asyncrl scale` set last; None: that of the run file

        Prints which process gets which GPUs, if there are any. Raises ConfigError if there
        are too few GPUs.
        """
        run = self._run
        workers = run.rollout.workers if size is None else size.rollout_workers
        if workers != run.rollout.workers:
            scaled = "the last size set by `asyncrl scale`; rollout.workers is"
            print_line(f"rollout workers: {workers}, {scaled} {run.rollout.workers}")
        run = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, workers=workers))
        gpus = placement(run, places=self._places)
        for name, its in gpus.processes.items():
            if its:
                print_line(f"{name:10s}GPU {numbers(its)}")
        self._learner_gpus = gpus.learner
        self._beside = gpus.beside_learner if colocated.is_at_once(run) else {}
        of_pools = run.pool_workers
        return [
            *self._learner(run, gpus.learner, resume=resume),
            *(
                self._model_server(name, gpus.servers[name], num_gpus=each)
                for name, each in gpus_of_servers(run).items()
            ),
            *(one for number, its in enumerate(gpus.workers) for one in self._worker(f"w{number}", its)),
            *(one for name, pool in of_pools.items() for one in self._worker(name, gpus.processes[name], pool=pool)),
            *(
                one
                for number, its in enumerate(gpus.evaluation_workers)
                for one in self._worker(f"e{number}", its, evaluates=True)
            ),
        ]

    def new_worker(self, name: str, taken: frozenset[int]) -> ChildProcess:
        """Create another rollout worker, on none of the GPUs ``taken``. Raises NoRoom."""
        if registry.engine_class(self._run).machines(self._run) > 1:
            raise NoRoom("engine.options.machines: engines of several machines are started with the run")
        needed = gpus_per_worker(self._run)
        given = self._run.rollout.gpus
        (worker,) = self._worker(
            name, () if self._places else free(num_gpus(), taken=taken, needed=needed, given=given)
        )
        return worker

    def new_learner(
        self, run: RunConfig, overrides: Sequence[str], *, name: str, taken: frozenset[int], shadow: str = ""
    ) -> list[ChildProcess]:
        """Create a learner that waits to take over, on none of the GPUs ``taken``, and its separate ranks.

        Raises NoRoom.

        It keeps the staleness bound of the run's workers: "auto" would follow another learning rate.

        run     the settings with ``overrides``, which come after those of all processes
        shadow  folder of the shadow learner that it takes its state from; "" for none
        """
        needed = gpus_of_learner(run)
        gpus = () if self._places else free(num_gpus(), taken=taken, needed=needed, given=run.learner.gpus)
        overrides = (f"staleness.max_staleness={self._run.staleness_bound}", *overrides)
        ranks = self._learner(run, gpus, resume=True, name=name, overrides=overrides)
        for one in ranks:
            of_shadow = ("--promote", shadow) if shadow and one.spec.role == LEARNER else ()
            one.standby_arguments, one.is_standby = ("--standby", one.name, *of_shadow), True
        return ranks

    def _learner(
        self, run: RunConfig, gpus: Gpus, *, resume: bool, name: str = LEARNER, overrides: Sequence[str] = ()
    ) -> list[ChildProcess]:
        """Return the learner, and with learner.machines its other ranks.  gpus: of all of them"""
        environments = registry.backend_class(run).environments(run, port=_free_port())
        names = [f"{name}-{rank}" if rank else name for rank in range(len(environments))]
        is_one, needed = len(names) == 1, gpus_of_learner(run)
        shares = gpus == self._learner_gpus and colocated.limits_learner(run, self._beside)
        flags = [
            *(["--beside-engines"] if shares else []),
            *(word for item in overrides for word in ("--set", item)),
        ]
        each = len(names) // run.learner.machines
        leaders = names[::each]
        specs = [
            ProcessSpec(
                name=its,
                role=LEARNER_RANK if rank else LEARNER,
                arguments=("learner", *self._common, *flags),
                num_gpus=needed if is_one else min(1, needed),
                gpus=gpus if is_one else gpus[rank : rank + 1],
                environment={**self._environment, **environment},
                beside="" if rank % each == 0 else leaders[rank // each],
                apart=tuple(leader for leader in leaders if rank % each == 0 and leader != its),
                meets="" if is_one else name,
            )
            for rank, (its, environment) in enumerate(zip(names, environments, strict=True))
        ]
        restarts = self._run.run.restarts
        return [
            ChildProcess(spec=spec, restarts=RestartPolicy(restarts), restart_arguments=("--resume",), resumed=resume)
            for spec in specs
        ]

    def _model_server(self, name: str, gpus: Gpus, *, num_gpus: int) -> ChildProcess:
        own = {"ASYNCRL_BUS_TOKEN": self._server.server_token(name)} if self._server is not None else {}
        spec = ProcessSpec(
            name=name,
            role=MODEL_SERVER,
            arguments=("model-server", *self._common, "--name", name),
            num_gpus=num_gpus,
            gpus=gpus,
            environment={**self._environment, **own},
        )
        return ChildProcess(spec=spec, restarts=RestartPolicy(self._run.run.restarts))

    def _worker(self, name: str, gpus: Gpus, *, evaluates: bool = False, pool: str = "") -> list[ChildProcess]:
        """Return a worker, and the other machines of its engine.

        evaluates: it only evaluates;  pool: its pool of rollout.pools, if any
        """
        beside = self._beside.get(name, 0) if set(gpus) & set(self._learner_gpus) else 0  # names are used again
        own = {"ASYNCRL_BUS_TOKEN": self._server.worker_token(name)} if self._server is not None else {}
        has_own = self._run.run.colocated and bool(pool) and not set(gpus) & set(self._learner_gpus)
        of_pool = ["--pool", pool] if pool else []
        flags = [
            *(["--evaluate"] if evaluates else []),
            *of_pool,
            *(["--own-gpus"] if has_own else []),
            *(["--beside-learner", str(beside)] if beside else []),
        ]
        run = self._run.of_pool(pool)
        machines, needed = registry.engine_class(run).machines(run), gpus_per_worker(run)
        each = needed // machines
        names = [name, *(f"{name}-node{number}" for number in range(1, machines))]
        met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())} if machines > 1 else {}
        specs = [
            ProcessSpec(
                name=one,
                role=(EVALUATION_WORKER if evaluates else WORKER) if one == name else ENGINE_NODE,
                arguments=("rollout-worker", *self._common, *flags, "--name", name)
                if one == name
                else ("engine-node", *self._common, *of_pool, "--worker", name, "--name", one),
                num_gpus=each,
                gpus=gpus[number * each : (number + 1) * each],
                environment={**self._environment, **own, **met},
                apart=tuple(other for other in names if other != one),
                meets=name if met else "",
            )
            for number, one in enumerate(names)
        ]
        restarts = self._run.run.restarts
        return [ChildProcess(spec=spec, restarts=RestartPolicy(restarts), is_scaled=not pool) for spec in specs]


def _free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])
