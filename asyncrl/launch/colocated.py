"""Runs whose learner and engines take turns on the same GPUs: the settings check, and the lock for the turns."""

from __future__ import annotations

from asyncrl.actors.gpu_turn import GpuTurn
from asyncrl.actors.rollout.turn_taking_engine import TurnTakingEngine
from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.engines.port import Engine, SharesGpus
from asyncrl.errors import ConfigError
from asyncrl.launch.launchers.load import launcher_class

LOCK_FILE = "gpus.lock"


def check(run: RunConfig) -> None:
    """Raise ConfigError for settings that do not allow taking turns."""
    if not run.run.colocated:
        return
    if run.run.mode == "async":
        raise ConfigError(
            'run.colocated: mode = "async" trains while it samples, and here they take turns; use mode = "sync" or '
            '"one_step_off", or remove it'
        )
    if run.learner.machines > 1 or launcher_class(run).places:
        raise ConfigError(
            "run.colocated: learner and engines take turns by a file of one machine; use learner.machines = 1 and "
            'launcher.kind = "local", or remove it'
        )
    for key, name, can_leave in (
        ("engine.kind", run.engine.kind, registry.engine_class(run).shares_gpus),
        ("learner.backend", run.learner.backend, registry.backend_class(run).shares_gpus),
    ):
        if not can_leave:
            raise ConfigError(f'run.colocated: {key} = "{name}" cannot release its GPUs; use another, or remove it')
    if registry.channel_class(run).sends_from_memory:
        raise ConfigError(
            f'run.colocated: weights.channel = "{run.weights.channel}" sends from GPU to GPU, and only one side has '
            'them at a time; use "files" or "objects"'
        )


def learners_turn(run: RunConfig) -> GpuTurn | None:
    """Return the learner's lock on the GPUs; None if it does not share them."""
    return GpuTurn(run.run_directory / LOCK_FILE, is_shared=False) if run.run.colocated else None


def engine(run: RunConfig, made: Engine) -> Engine:
    """Wrap ``made`` so that it shares its GPUs."""
    assert isinstance(made, SharesGpus)
    return TurnTakingEngine(made, memory=made, turn=GpuTurn(run.run_directory / LOCK_FILE, is_shared=True))
