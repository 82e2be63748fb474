"""Composition root: builds bus, engine, backend and weight channel from a run file. The only file that names them.

The tables below list the choices. Every entry may also be "package.module:object".
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from asyncrl.adapters import learner_models
from asyncrl.adapters.bus_file import read_address
from asyncrl.backends.port import Backend, RefreshesReference, ResetsOptimizer
from asyncrl.bus.adapter import BusAdapter
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig, ServerSection, plugins, tables
from asyncrl.config.adapter import Adapter
from asyncrl.config.addresses import without_secrets
from asyncrl.data.model_folder import check_model
from asyncrl.engines.port import Engine, ModelServer, ServedTo
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError
from asyncrl.weights.port import WeightChannel

if TYPE_CHECKING:
    from asyncrl.backends.adapter import BackendAdapter
    from asyncrl.backends.port import StepResult
    from asyncrl.engines.adapter import EngineAdapter
    from asyncrl.policies.algorithms.algorithm import Algorithm
    from asyncrl.policies.batching.filters import GroupFilter
    from asyncrl.weights.adapter import ChannelAdapter
    from asyncrl.weights.kept_models import KeptModels

A = TypeVar("A", bound=Adapter)

ENGINES = {
    "inprocess": "asyncrl.engines.inprocess.engine:InProcessEngine",
    "none": "asyncrl.engines.null:NullEngine",
    "sglang": "asyncrl.engines.sglang.engine:SGLangEngine",
}
BACKENDS = {
    "megatron": "asyncrl.backends.megatron.backend:MegatronBackend",
    "none": "asyncrl.backends.null:NullBackend",
    "reference": "asyncrl.backends.reference:ReferenceBackend",
}
CHANNELS = {
    "files": "asyncrl.weights.files:FilesChannel",
    "nccl": "asyncrl.weights.nccl_channel:NCCLChannel",
    "objects": "asyncrl.weights.objects_channel:ObjectsChannel",
}
SERVERS = {"sglang": "asyncrl.engines.sglang.model_server:SGLangModelServer"}
BUSES = {"memory": "asyncrl.bus.memory.adapter:MemoryBusAdapter", "nats": "asyncrl.bus.nats_server.adapter:NatsAdapter"}
FILTERS = {"dynamic_sampling": "asyncrl.policies.batching.filters:dynamic_sampling"}


# -- adapters ----------------------------------------------------------------------------------------------------------


def engine_class(run: RunConfig) -> type[EngineAdapter]:
    from asyncrl.engines.adapter import EngineAdapter

    return load_adapter(run.engine.kind, where="engine.kind", table=ENGINES, port=EngineAdapter)


def backend_class(run: RunConfig) -> type[BackendAdapter]:
    from asyncrl.backends.adapter import BackendAdapter

    return load_adapter(run.learner.backend, where="learner.backend", table=BACKENDS, port=BackendAdapter)


def channel_class(run: RunConfig) -> type[ChannelAdapter]:
    from asyncrl.weights.adapter import ChannelAdapter

    return load_adapter(channel_name(run), where="weights.channel", table=CHANNELS, port=ChannelAdapter)


def channel_name(run: RunConfig) -> str:
    """Return weights.channel, or what "auto" means here: from memory to memory, where both sides have GPUs of one
    machine, engines can receive so, and whole models are sent in their trained dtype."""
    if run.weights.channel != "auto":
        return run.weights.channel
    learner = run.learner
    is_local = run.launcher.kind == "local" and learner.machines == 1 and (learner.ranks == 1 or not run.run.colocated)
    is_whole = learner.lora.publish == "merged" and not run.weights.quantization
    if not (is_local and is_whole and backend_class(run).num_gpus(run) and engine_class(run).num_gpus(run)):
        return "files"
    import torch

    return "nccl" if torch.cuda.is_available() and _engines_receive(run) else "files"


def _engines_receive(run: RunConfig) -> bool:
    try:
        for one in (run, *map(run.of_pool, run.rollout.pools)):
            engine_class(run).check_weight_updater(one)
    except ConfigError:
        return False
    return True


def set_learner_environment(run: RunConfig) -> None:
    """Set what the weight channel needs in a process of the learner, before it uses a GPU."""
    for name, value in channel_class(run).learner_environment(run).items():
        os.environ.setdefault(name, value)


def bus_class(run: RunConfig) -> type[BusAdapter]:
    return load_adapter(run.bus.kind, where="bus.kind", table=BUSES, port=BusAdapter)


def check_names(run: RunConfig) -> None:
    """Refuse unknown adapter names without importing anything. Raises ConfigError."""
    for name, where, table in (
        (run.engine.kind, "engine.kind", ENGINES),
        (run.learner.backend, "learner.backend", BACKENDS),
        (run.weights.channel, "weights.channel", {"auto": CHANNELS["files"], **CHANNELS}),
        *((name, "algorithm.filters", FILTERS) for name in run.algorithm.filters),
    ):
        plugins.address(name, where=where, table=table)


def load_adapter(name: str, *, where: str, table: Mapping[str, str], port: type[A]) -> type[A]:
    """Load the class that the run file names. Raises ConfigError if it is not an adapter of this port."""
    found = plugins.load(name, where=where, table=table)
    if not (isinstance(found, type) and issubclass(found, port)):
        raise ConfigError(
            f"{where}: {name!r} does not describe itself: derive its class from {port.__module__}.{port.__name__} "
            "(docs/develop/extending.md)"
        )
    return found


def algorithm(run: RunConfig) -> Algorithm:
    """Return the algorithm with the run file's correction and options. Refuses stale data without a correction."""
    from asyncrl.policies.algorithms.spec import AlgorithmSpec, resolve, sets
    from asyncrl.policies.algorithms.table import ALGORITHMS

    section = run.algorithm
    spec = ALGORITHMS.get(section.name)
    if spec is None:
        addresses = {name: "asyncrl.policies.algorithms.table:ALGORITHMS" for name in ALGORITHMS}
        spec = plugins.load(section.name, where="algorithm.name", table=addresses, kind=AlgorithmSpec)
    resolved = resolve(
        spec,
        advantage=section.advantage,
        loss=section.loss,
        aggregation=section.aggregation,
        correction=section.correction,
        denominator=section.denominator,
        whitening=section.whitening,
        entropy_coef=section.entropy_coef,
        kl=learner_models.penalty(run),
        options=section.options,
    )
    learner_models.require_sections(run, resolved)
    limit = run.rollout.max_new_tokens
    if not sets(section.options, "max_response_tokens"):
        resolved = dataclasses.replace(resolved, aggregation=resolved.aggregation.at_most(limit))
    resolved = dataclasses.replace(
        resolved,
        overlong_tokens=section.overlong_tokens,
        overlong_factor=section.overlong_factor,
        overlong_floor=section.overlong_floor,
        max_response_tokens=limit,
        masks_truncated=section.mask_truncated,
        steps_per_batch=run.learner.steps_per_batch,
        learning_rate_rule=run.staleness.learning_rate.removeprefix("ess_"),
    )
    _refuse_old_data(run, resolved)
    return resolved


def _refuse_old_data(run: RunConfig, resolved: Algorithm) -> None:
    """Raise ConfigError if the algorithm would train what older weights sampled as if it were fresh."""
    from asyncrl.policies.corrections.chains import weight_left_behind

    if run.learner.steps_per_batch > 1 and not resolved.loss.is_of_many_steps:
        raise ConfigError(
            f"learner.steps_per_batch: from the second step on, {run.learner.steps_per_batch} steps on a batch train "
            f"what the weights before sampled, and loss {resolved.loss.name} has no ratio to them; use 1, or a loss "
            'with a ratio, such as "ppo_clip"'
        )
    if resolved.trusts_behavior and run.max_staleness > 0 and not run.algorithm.allow_uncorrected:
        raise ConfigError(
            f'algorithm: correction = "{resolved.correction_name}" trains data up to {run.max_staleness} versions old '
            "as if it were fresh, which collapses: a token that the policy has become ten times less likely to sample "
            f"counts {weight_left_behind(resolved.correction):g}, and may count 0.5; use correction = "
            '"tis_token" or a mask that rejects it, or allow_uncorrected = true if you mean it'
        )


def filters(run: RunConfig) -> dict[str, GroupFilter]:
    """Return the filters by their names in the run file."""
    return {name: plugins.load(name, where="algorithm.filters", table=FILTERS) for name in run.algorithm.filters}


def load_reward(run: RunConfig) -> Any:
    from asyncrl.rewards.load import load_rewards

    return load_rewards(run.reward, are_by_row=bool(run.data.reward_key))


def load_evaluation_rewards(run: RunConfig) -> dict[str, Any]:
    """Return the reward of each data set of [evaluation] by name: its own, or the run's."""
    from asyncrl.rewards.load import load_reward

    of_run, found = load_reward(run.reward), {}
    for dataset in run.evaluation.datasets:
        try:
            found[dataset.name] = of_run if dataset.reward is None else load_reward(dataset.reward)
        except ConfigError as error:
            raise ConfigError(f"evaluation.datasets: {dataset.name}: {error}") from None
    return found


def check_reward_machine(run: RunConfig) -> None:
    """Raise ConfigError if this machine lacks something that the run's rewards need, such as a sandbox."""
    for reward in (load_reward(run), *load_evaluation_rewards(run).values()):
        reward.check_machine()


def server_class(name: str, section: ServerSection) -> tuple[Any, Any]:
    """Return the class that serves [servers.NAME], and its options. Raises ConfigError."""
    found = plugins.load(section.kind, where=f"servers.{name}.kind", table=SERVERS)
    missing = [part for part in ("start", "answers", "wait", "close") if not hasattr(found, part)]
    if missing and section.is_ours:
        raise ConfigError(f"servers.{name}.kind: {section.kind!r} is no server: it has no {', '.join(missing)}")
    options_type, where = getattr(found, "options_type", None), f"servers.{name}.options"
    if options_type is not None:
        return found, tables.build(options_type, section.options, where)
    if section.options:
        raise ConfigError(f"{where}: {section.kind!r} takes no options")
    return found, None


def gpus_of_servers(run: RunConfig) -> dict[str, int]:
    """Return the number of GPUs of each server that the run starts, by name. Raises ConfigError."""
    made = {name: (section, *server_class(name, section)) for name, section in run.started_servers.items()}
    return {
        name: its.num_gpus(section, options) if hasattr(its, "num_gpus") else len(section.gpus)
        for name, (section, its, options) in made.items()
    }


def gpus_of_pool_workers(run: RunConfig) -> dict[str, int]:
    """Return the number of GPUs of each worker of rollout.pools, by its name; 1 for one without any."""
    return {name: engine_class(run).num_gpus(run.of_pool(pool)) or 1 for name, pool in run.pool_workers.items()}


def model_server(run: RunConfig, name: str, *, host: str) -> ModelServer:
    """Return the server of [servers.NAME], without starting it.  host: address of this machine for the workers"""
    found, options = server_class(name, run.servers[name])
    folder = run.run_directory
    to = ServedTo(
        host=host,
        log_path=folder / "logs" / f"{name}.server.log",
        directory=folder / "servers",
        dtype=run.model.dtype,
        has_metrics=bool(run.metrics.prometheus),
    )
    make = functools.partial(found, to=to)
    return plugins.make(make, name, run.servers[name], options, where=f"servers.{name}.kind", name=name)  # type: ignore[no-any-return]


def channel(run: RunConfig, *, bus: Bus) -> WeightChannel:
    return channel_class(run).build(run, bus=bus)


def kept_models(run: RunConfig) -> KeptModels | None:
    """Return what keeps versions for good; None if none is to be kept."""
    from asyncrl.weights.kept_models import KeptModels

    kept_for_others = run.evaluation.every_steps if run.evaluation.place == "folder" else 0
    if not (every := run.weights.models_every or kept_for_others):
        return None
    model, quantization = Path(run.model.path), run.weights.quantization
    return KeptModels(run.run_directory / "models", every=every, model_path=model, quantization=quantization)


def backend(run: RunConfig) -> Backend:
    from asyncrl.backends.adapter import optimizer_settings

    resolved = algorithm(run)
    auxiliary = learner_models.models(run, resolved, optimizer=optimizer_settings(run))
    return backend_class(run).build(run, algorithm=resolved, auxiliary=auxiliary)


def serve_rank(run: RunConfig) -> None:
    """Serve as a rank other than the learner until the learner ends.

    Raises ConfigError if the learner refuses this rank.
    """
    from asyncrl.backends.adapter import BackendAdapter

    made = backend(run)
    assert isinstance(made, BackendAdapter)
    made.serve()


def profiler(run: RunConfig) -> Callable[[int, Callable[[], StepResult]], StepResult] | None:
    """Return a wrapper for each step of the learner; None if no step is profiled."""
    if not run.learner.profile_steps:
        return None
    from asyncrl.backends.profiler import StepProfiler

    return StepProfiler(run.learner.profile_steps, run.run_directory)


def engine(run: RunConfig, *, name: str) -> Engine:
    replay: Literal["on", "off"] = "on" if routing_replay(run).is_on else "off"
    resolved = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, routing_replay=replay))
    return engine_class(run).build(resolved, name=name)


def context_tokens(run: RunConfig) -> int:
    """Return how many tokens a prompt and its answer may have together in the run's engine. Raises ConfigError."""
    return engine_class(run).context_tokens(run, of_model=check_model(Path(run.model.path)).context_tokens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What "auto" means here.  reason: why it is off; empty if it is on"""

    reason: str

    @property
    def is_on(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return "on" if self.is_on else f"off: {self.reason}"


def shared_prefixes(run: RunConfig) -> Choice:
    """Decide on learner.shared_prefixes. Raises ConfigError if it is required but not possible."""
    wanted = run.learner.shared_prefixes
    if wanted == "off":
        return Choice(reason='learner.shared_prefixes = "off"')
    reason = backend_class(run).why_no_shared_prefixes(run)
    if reason and wanted == "on":
        raise ConfigError(f'learner.shared_prefixes: "on" cannot be: {reason}')
    return Choice(reason=reason)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingReplay(Choice):
    """Whether the learner replays the engine's experts (rollout.routing_replay).

    num_bytes  maximum size of a group's experts in a message; 0 if off
    """

    num_bytes: int = 0

    def __str__(self) -> str:
        return f"on, up to {self.num_bytes:,} bytes a group" if self.is_on else f"off: {self.reason}"


def routing_replay(run: RunConfig) -> RoutingReplay:
    """Decide on routing replay. Raises ConfigError if it is required but not possible."""
    wanted = run.rollout.routing_replay
    if wanted == "off":
        return RoutingReplay(reason='rollout.routing_replay = "off"')
    if wanted == "auto" and run.algorithm.correction == "none":
        return RoutingReplay(reason='algorithm.correction = "none" needs no agreement with the engine')
    experts = check_model(Path(run.model.path)).experts
    tokens = run.rollout.group_size * (run.data.max_prompt_tokens + run.rollout.max_new_tokens)
    num_bytes = 0 if experts is None else tokens * experts.bytes_per_token
    needed = run.largest_group_bytes + num_bytes
    limits = ("max_group_bytes", "max_message_bytes") if wanted == "auto" else ("max_group_bytes",)
    too_small = next((name for name in limits if needed > getattr(run.bus, name)), "")
    if experts is None:
        reason = f"the model at {run.model.path} has no experts"
    elif not rollout_functions.traits(run.rollout.function).samples:
        reason = f'rollout.function = "{run.rollout.function}" samples nothing'
    elif unreported := engine_class(run).why_no_experts(run):
        reason = unreported
    elif not backend_class(run).replays_experts:
        reason = f'learner.backend = "{run.learner.backend}" does not replay them; "megatron" does'
    elif too_small:
        mend = "raise it, or lower rollout.group_size or rollout.max_new_tokens"
        if too_small == "max_message_bytes":
            mend = 'rollout.routing_replay = "on" sends it in pieces'
        reason = (
            f"a group with its experts may take {needed:,} bytes ({num_bytes:,} of them the experts), over "
            f"bus.{too_small} ({getattr(run.bus, too_small):,}); {mend}"
        )
    else:
        return RoutingReplay(reason="", num_bytes=num_bytes)
    if wanted == "on":
        raise ConfigError(f'rollout.routing_replay: "on" cannot be: {reason}; or use "off"')
    return RoutingReplay(reason=reason)


def check_backend_can(run: RunConfig) -> None:
    """Raise ConfigError if the optimizer is to be reset, or the reference refreshed, and the backend cannot."""
    refreshes = bool(run.reference and run.reference.refresh_steps)
    for key, is_set, kind, what in (
        ("reference.refresh_steps", refreshes, RefreshesReference, "refresh a reference"),
        ("learner.reset_optimizer", run.learner.reset_optimizer, ResetsOptimizer, "start its optimizer anew"),
    ):
        if is_set and not issubclass(backend_class(run), kind):
            name = run.learner.backend
            raise ConfigError(f'{key}: learner.backend = "{name}" cannot {what}; "megatron" and "reference" can')


# -- bus ---------------------------------------------------------------------------------------------------------------


async def connect(run: RunConfig, *, token: str, role: str = "learner", worker: str = "") -> Bus:
    """Connect to the run's bus: bus.url, or the server that `asyncrl run` started in the run's folder.

    role    role in bus/jetstream/credentials.py; only the learner's creates the run's streams
    worker  name of a rollout worker or of a server of a frozen model
    """
    url, token = bus_address(run, token=token, role=role)
    bus = await bus_class(run).connect(run, url=url, token=token, role=role, worker=worker)
    if (limit := bus.max_message_bytes) < min(run.bus.max_message_bytes, run.largest_prompt_bytes):
        await bus.close()
        raise ConfigError(
            f"bus.url {without_secrets(url)}: the server takes messages of {limit:,} bytes, a prompt may have "
            f"{run.largest_prompt_bytes:,}; raise max_payload there or lower data.max_prompt_tokens"
        )
    return bus


def largest_group_bytes(run: RunConfig) -> int:
    """Upper bound on the size of a trajectory group, including its experts if they are replayed."""
    return run.largest_group_bytes + routing_replay(run).num_bytes


async def own_bus(run: RunConfig) -> Bus:
    """Return the private bus of a run in a single process."""
    return await bus_class(run).connect(run, url="", token="", role="learner")


async def observe(run: RunConfig, *, token: str, role: str = "observer") -> Bus:
    """Connect as an observer or an "operator", without creating anything. Raises ConfigError."""
    url, token = bus_address(run, token=token)
    return await bus_class(run).connect(run, url=url, token=token, role=role)


def bus_address(run: RunConfig, *, token: str, role: str = "learner") -> tuple[str, str]:
    """Return (url, token) of bus.url, or of the server that `asyncrl run` started in the run's folder.

    Raises NoSuchRun.
    """
    if not bus_class(run).is_shared:
        raise ConfigError(
            f'bus.kind: "{run.bus.kind}" is inside the process of `asyncrl run`, which no other process can reach; '
            'a run that others join or look at needs bus.kind = "nats"'
        )
    if run.bus.url:
        return run.bus.url, token
    if run.bus.address:  # it comes with its own token, and no other may be sent there
        return run.bus.address, run.bus.token
    return read_address(run.run_directory, is_worker=role == "rollout-worker")
