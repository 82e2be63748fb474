"""How many GPUs the processes of a run need, and which GPUs of this machine each process gets."""

from __future__ import annotations

from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.launch import colocated
from asyncrl.launch.launchers.placement import Asked, Placement, numbers, place


def placement(run: RunConfig, *, places: bool = False) -> Placement:
    """Assign this machine's GPUs to the processes that `asyncrl run` starts on it.

    Raises ConfigError, also if an engine finds no room beside the learner, or a server none beside both.

    places  the launcher finds machines and GPUs itself, so none of this machine's is assigned

    Not part of ``check``, because a process that has been given its GPUs sees no others.
    """
    ranks, there = gpus_of_learner(run), 0 if places else num_gpus()
    own = run.rollout.gpus
    if run.run.colocated and not own and there:
        own = run.learner.gpus or tuple(range(ranks))
    placed = place(
        there,
        ranks=ranks,
        workers=run.rollout.workers,
        gpus_per_worker=gpus_per_worker(run),
        learner_gpus=run.learner.gpus,
        rollout_gpus=own,
        evaluation_workers=run.num_evaluation_workers,
        evaluation_gpus=run.evaluation.gpus,
        servers={
            name: Asked(where=f"servers.{name}", each=each, given=run.servers[name].gpus)
            for name, each in registry.gpus_of_servers(run).items()
        },
        pools={
            name: Asked(
                where=f"rollout.pools.{name}",
                each=gpus_per_worker(run.of_pool(name)),
                count=pool.workers,
                given=pool.gpus,
            )
            for name, pool in run.rollout.pools.items()
        },
    )
    limited = placed.beside_learner if colocated.is_at_once(run) else {}
    for name, engines in placed.engines.items():
        its = run.of_pool(run.pool_workers.get(name, ""))
        if (engines > 1 or name in limited) and registry.engine_class(its).gpu_bytes(its):
            if name not in limited:
                shared = numbers(placed.processes[name])
                raise ConfigError(
                    f"rollout.gpus: the engine of {name} would share GPU {shared} with another, and each "
                    "takes all of it; use more GPUs (the learner's may be among them) or fewer workers, or "
                    "set the engines' shares (mem-fraction-static in SGLang's server_arguments)"
                )
            _require_no_server(placed, name)
            colocated.engine_share(its, num_engines=engines)
    return placed


def _require_no_server(placed: Placement, engine: str) -> None:
    """Raise ConfigError if a server is on a GPU where the engine would take all that the learner leaves."""
    for server, gpus in placed.servers.items():
        if both := set(gpus) & set(placed.processes[engine]):
            raise ConfigError(
                f"servers.{server}.gpus: on GPU {numbers(tuple(sorted(both)))} the engine of {engine} takes all that "
                "the learner leaves; use other GPUs, or set the engine's share in engine.options (mem-fraction-static "
                "in SGLang's server_arguments)"
            )


def num_gpus() -> int:
    """Number of GPUs that torch sees on this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus_of_learner(run: RunConfig) -> int:
    """Number of GPUs that the learner needs; 0 if it trains on the CPU."""
    return registry.backend_class(run).num_gpus(run)


def gpus_per_worker(run: RunConfig) -> int:
    """Number of GPUs that one rollout worker needs; 0 if its engine runs on the CPU."""
    return registry.engine_class(run).num_gpus(run)
