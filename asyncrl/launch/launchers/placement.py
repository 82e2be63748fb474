"""Assigns the GPUs of one machine to the processes of a run. Pure: numbers in, numbers out.

GPUs are numbered from 0, as this machine's processes see them. The learner's ranks take the first GPUs, workers the
next. When no GPU is left, workers share: assignment starts again at the first worker GPU, or at GPU 0 if the learner
has all. `learner.gpus` and `rollout.gpus` override this. Processes on the CPU get no GPUs.

Servers of frozen models, then pools of workers with engines of their own, get their GPUs before the other workers and
share none unless the run file names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from asyncrl.errors import ConfigError, NoRoom

Gpus = tuple[int, ...]

SMALLEST_PROCESS_BYTES: Final = 16 * 2**20
"""Memory of a Python process that has only connected to the bus. An engine or a backend takes far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """``count`` processes with ``each`` GPUs.  given: the GPUs that the run file names under the key ``where``.gpus"""

    where: str
    each: int
    count: int = 1
    given: Gpus = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """learner: the GPU of each rank.  servers: the GPUs of each server.  workers, pools, evaluation_workers: the GPUs
    of each worker."""

    learner: Gpus
    workers: tuple[Gpus, ...]
    evaluation_workers: tuple[Gpus, ...] = ()
    servers: Mapping[str, Gpus] = field(default_factory=dict)
    pools: Mapping[str, tuple[Gpus, ...]] = field(default_factory=dict)

    @property
    def processes(self) -> dict[str, Gpus]:
        """GPUs by the process names that `asyncrl run` uses: learner, w0, w1, …, e0, e1, … and those of the run file"""
        workers = {f"w{number}": gpus for number, gpus in enumerate(self.workers)}
        evaluating = {f"e{number}": gpus for number, gpus in enumerate(self.evaluation_workers)}
        of_pools = {f"{name}-{i}": gpus for name, every in self.pools.items() for i, gpus in enumerate(every)}
        return {"learner": self.learner} | dict(self.servers) | workers | of_pools | evaluating

    @property
    def engines(self) -> dict[str, int]:
        """How many engines there are on the GPU of each engine that has one, by process name; of several GPUs the
        most."""
        its = {name: gpus for name, gpus in self.processes.items() if gpus and name not in ("learner", *self.servers)}
        on_gpu = Counter(gpu for gpus in its.values() for gpu in gpus)
        return {name: max(map(on_gpu.__getitem__, gpus)) for name, gpus in its.items()}

    @property
    def beside_learner(self) -> dict[str, int]:
        """``engines`` that are on a GPU of the learner."""
        return {name: num for name, num in self.engines.items() if set(self.processes[name]) & set(self.learner)}

    def __str__(self) -> str:
        shown = [f"{name} {numbers(gpus)}" for name, gpus in self.processes.items() if gpus]
        return "; ".join(shown) or "none, all on the CPU"


def place(
    num_gpus: int,
    *,
    ranks: int,
    workers: int,
    gpus_per_worker: int,
    learner_gpus: Sequence[int] = (),
    rollout_gpus: Sequence[int] = (),
    evaluation_workers: int = 0,
    evaluation_gpus: Sequence[int] = (),
    servers: Mapping[str, Asked] = MappingProxyType({}),
    pools: Mapping[str, Asked] = MappingProxyType({}),
) -> Placement:
    """Assign the GPUs. ``ranks`` or ``gpus_per_worker`` 0: the learner or the workers compute on the CPU.

    Evaluation workers come after the others, with the same number of GPUs each.

    Raises ConfigError for a GPU that does not exist, and if ranks would share one.
    """
    _check_exist(learner_gpus, num_gpus, "learner.gpus")
    _check_exist(rollout_gpus, num_gpus, "rollout.gpus")
    _check_exist(evaluation_gpus, num_gpus, "evaluation.gpus")
    for asked in (*servers.values(), *pools.values()):
        _check_exist(asked.given, num_gpus, f"{asked.where}.gpus")
    if num_gpus == 0:
        return Placement(
            learner=(),
            workers=((),) * workers,
            evaluation_workers=((),) * evaluation_workers,
            servers=dict.fromkeys(servers, ()),
            pools={name: ((),) * asked.count for name, asked in pools.items()},
        )
    learner = _learner(num_gpus, ranks, learner_gpus)
    total = workers + evaluation_workers
    taken = {*learner, *(gpu for asked in (*servers.values(), *pools.values()) for gpu in asked.given)}
    own = {name: _own(num_gpus, asked, taken) for name, asked in (*servers.items(), *pools.items())}
    placed = frozenset(gpu for name in own for its in own[name] for gpu in its)
    pool = _pool(num_gpus, learner, gpus_per_worker, rollout_gpus, placed=placed) if total and gpus_per_worker else ()
    dealt = tuple(_deal(pool, worker * gpus_per_worker, gpus_per_worker) for worker in range(total))
    evaluating = dealt[workers:]
    if evaluation_gpus and gpus_per_worker:
        apart = _pool(num_gpus, learner, gpus_per_worker, evaluation_gpus, where="evaluation.gpus")
        evaluating = tuple(
            _deal(apart, worker * gpus_per_worker, gpus_per_worker) for worker in range(evaluation_workers)
        )
    return Placement(
        learner=learner,
        workers=dealt[:workers],
        evaluation_workers=evaluating,
        servers={name: own[name][0] for name in servers},
        pools={name: own[name] for name in pools},
    )


def _own(num_gpus: int, asked: Asked, taken: set[int]) -> tuple[Gpus, ...]:
    """Return the GPUs of each process that is asked for, and add them to ``taken``."""
    if not asked.each:
        return ((),) * asked.count
    if asked.given:
        if len(set(asked.given)) < len(asked.given) or len(asked.given) % asked.each:
            raise ConfigError(
                f"{asked.where}.gpus: {list(asked.given)} are not the GPUs of processes that take {asked.each} each; "
                "name as many, each once"
            )
        return tuple(_deal(asked.given, number * asked.each, asked.each) for number in range(asked.count))
    needed = asked.each * asked.count
    free = [gpu for gpu in range(num_gpus) if gpu not in taken][:needed]
    if len(free) < needed:
        raise ConfigError(
            f"{asked.where}: it needs {needed} GPU{'s' * (needed > 1)}, and of this machine's {num_gpus} the learner "
            f"and others leave {len(free)}; name GPUs that it shares in {asked.where}.gpus, or use fewer elsewhere"
        )
    taken.update(free)
    return tuple(_deal(tuple(free), number * asked.each, asked.each) for number in range(asked.count))


def check_memory(*, ranks: int, workers: int, evaluation_workers: int, machine_bytes: int) -> None:
    """Raise ConfigError if a machine of ``machine_bytes`` could not hold the processes even without a model."""
    asked = {"learner.ranks": ranks, "rollout.workers": workers, "evaluation.workers": evaluation_workers}
    most = machine_bytes // SMALLEST_PROCESS_BYTES
    if sum(asked.values()) > most:
        key = max(asked, key=lambda name: asked[name])
        raise ConfigError(
            f"{key}: {asked[key]:,} processes, and this machine's {machine_bytes / 2**30:,.0f} GiB of memory have no "
            f"room for more than {most:,} even without a model; use fewer, or more machines"
        )


def _learner(num_gpus: int, ranks: int, given: Sequence[int]) -> Gpus:
    if not given:
        if ranks > num_gpus:
            raise ConfigError(
                f"learner.ranks: {ranks} ranks need {ranks} GPUs, this machine has {num_gpus}; NCCL lets no two ranks "
                "share one"
            )
        return tuple(range(ranks))
    if len(given) != ranks and ranks:
        raise ConfigError(f"learner.gpus: names {len(given)} GPUs for {ranks} ranks; name one for each rank")
    if len(set(given)) < len(given):
        raise ConfigError(f"learner.gpus: names a GPU twice: {list(given)}; NCCL lets no two ranks share one")
    return tuple(given[:ranks])


def _pool(
    num_gpus: int,
    learner: Gpus,
    needed: int,
    given: Sequence[int],
    *,
    where: str = "rollout.gpus",
    placed: Collection[int] = (),
) -> Gpus:
    """Return the GPUs that workers share: at least enough for one worker.  placed: GPUs of servers and pools"""
    if given:
        if len(set(given)) < len(given):
            raise ConfigError(f"{where}: names a GPU twice: {list(given)}; workers share GPUs automatically")
        if len(given) < needed:
            raise ConfigError(f"{where}: a worker needs {needed} GPUs, {list(given)} are {len(given)}")
        return tuple(given)
    if num_gpus < needed:
        raise ConfigError(f"engine.options.tensor_parallel: a worker needs {needed} GPUs, this machine has {num_gpus}")
    free = tuple(gpu for gpu in range(num_gpus) if gpu not in learner and gpu not in placed)
    if len(free) >= needed:
        return free
    shared = tuple(gpu for gpu in range(num_gpus) if gpu not in placed)
    if len(shared) < needed:
        raise ConfigError(
            f"rollout.gpus: a worker needs {needed} GPU{'s' * (needed > 1)}, and servers and pools of workers leave "
            f"{len(shared)} of this machine's {num_gpus}; name GPUs that it shares"
        )
    return shared


def _deal(pool: Gpus, start: int, count: int) -> Gpus:
    """Return ``count`` different GPUs from position ``start`` of the pool, wrapping around at its end."""
    return tuple(pool[(start + index) % len(pool)] for index in range(count))


def _check_exist(given: Sequence[int], num_gpus: int, where: str) -> None:
    for gpu in given:
        if not 0 <= gpu < num_gpus:
            seen = f"{num_gpus}, numbered from 0" if num_gpus else "none that torch sees"
            raise ConfigError(f"{where}: there is no GPU {gpu}; this machine has {seen}")


def free(num_gpus: int, *, taken: Collection[int], needed: int, given: Sequence[int] = ()) -> Gpus:
    """Return unshared GPUs for one more process. ``given``: choose only from these.

    Returns () if the machine has no GPU or the process needs none. Raises NoRoom if too few are free.
    """
    if not num_gpus or not needed:
        return ()
    pool = tuple(given) or tuple(range(num_gpus))
    found = tuple(gpu for gpu in pool if gpu not in taken)[:needed]
    if len(found) < needed:
        raise NoRoom(
            f"another worker needs {needed} GPU{'s' * (needed > 1)}, and of {numbers(pool)} "
            f"{f'only {numbers(found)} is' if found else 'none is'} free"
        )
    return found


def visible_devices(gpus: Gpus, *, inherited: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process that gets ``gpus``, named as in its parent's own list."""
    names = None if inherited is None else [name.strip() for name in inherited.split(",")]
    return ",".join(str(gpu) if names is None else names[gpu] for gpu in dict.fromkeys(gpus))


def numbers(gpus: Gpus) -> str:
    """Format GPUs for a person: ``0, 1``."""
    return ", ".join(str(gpu) for gpu in gpus)
