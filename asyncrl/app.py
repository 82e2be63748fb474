"""Composition root: a run file to bus, engine, backend and actors. The only file that names adapters.

The tables below are the documentation of what can be chosen; every entry may also be "package.module:object".
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncrl import auxiliary, plugins
from asyncrl.config import RunConfig, tables
from asyncrl.config.addresses import servers, without_secrets
from asyncrl.errors import ConfigError, NoSuchRun
from asyncrl.protocols import Backend, Bus, Engine, WeightChannel

if TYPE_CHECKING:
    from asyncrl.data.prompts import PromptDataset
    from asyncrl.launchers.port import Launcher
    from asyncrl.policies.algorithms import Algorithm
    from asyncrl.policies.filters import GroupFilter

ENGINES = {
    "inprocess": "asyncrl.engines.inprocess:InProcessEngine",
    "none": "asyncrl.engines.none:NoEngine",
    "sglang": "asyncrl.engines.sglang:SGLangEngine",
}
BACKENDS = {
    "megatron": "asyncrl.backends.megatron:MegatronBackend",
    "reference": "asyncrl.backends.reference:ReferenceBackend",
}
CHANNELS = {
    "files": "asyncrl.weights.files:FilesChannel",
    "nccl": "asyncrl.weights.nccl:NCCLChannel",
    "objects": "asyncrl.weights.objects:ObjectsChannel",
}
LAUNCHERS = {"local": "asyncrl.launchers.local:LocalLauncher", "ray": "asyncrl.launchers.ray:RayLauncher"}
FILTERS = {"dynamic_sampling": "asyncrl.policies.filters:dynamic_sampling"}
ROLLOUTS = {name: f"asyncrl.actors.rollouts:{name}" for name in ("single_turn", "given")}

BUS_FILE = "bus.json"
"""Where `asyncrl run` leaves the address of the server it started, for whoever joins from this machine."""

# -- adapters ----------------------------------------------------------------------------------------------------------


def options(adapter: Any, table: Any, where: str) -> Any:
    """``table`` as the adapter's Options: the dataclass of that name beside it."""
    kind = getattr(sys.modules.get(adapter.__module__ or ""), "Options", None)
    if kind is None:
        if table:
            raise ConfigError(f"{where}: {adapter.__name__} takes no options")
        return None
    return tables.build(kind, table, where)


def engine_class(run: RunConfig) -> Any:
    return plugins.load(run.engine.kind, where="engine.kind", table=ENGINES)


def backend_class(run: RunConfig) -> Any:
    return plugins.load(run.learner.backend, where="learner.backend", table=BACKENDS)


def algorithm(run: RunConfig) -> Algorithm:
    """The row, with the run file's correction and options. Refuses stale data without a correction."""
    from asyncrl.policies.algorithms import Row, resolve
    from asyncrl.policies.correction_chains import weight_left_behind
    from asyncrl.policies.rows import ALGORITHMS

    section = run.algorithm
    row = ALGORITHMS.get(section.name)
    if row is None:
        addresses = {name: "asyncrl.policies.rows:ALGORITHMS" for name in ALGORITHMS}
        row = plugins.load(section.name, where="algorithm.name", table=addresses, kind=Row)
    resolved = resolve(
        row,
        advantage=section.advantage,
        loss=section.loss,
        aggregation=section.aggregation,
        correction=section.correction,
        denominator=section.denominator,
        entropy_coef=section.entropy_coef,
        kl=auxiliary.penalty(run),
        options=section.options,
    )
    auxiliary.require_sections(run, resolved)
    limit = run.rollout.max_new_tokens
    resolved = dataclasses.replace(
        resolved,
        overlong_tokens=section.overlong_tokens,
        max_response_tokens=limit,
        masks_truncated=section.mask_truncated,
        aggregation=resolved.aggregation.at_most(limit, unless=section.options),
        learning_rate_rule=run.staleness.learning_rate.removeprefix("ess_"),
    )
    if resolved.trusts_behavior and run.max_staleness > 0 and not section.allow_uncorrected:
        raise ConfigError(
            f'algorithm: correction = "{resolved.correction_name}" trains data up to {run.max_staleness} versions old '
            "as if it were fresh, which collapses: a token that the policy has become ten times less likely to sample "
            f"counts {weight_left_behind(resolved.correction):g}, and may count 0.5; use correction = "
            '"tis_token" or a mask that rejects it, or allow_uncorrected = true if you mean it'
        )
    return resolved


def filters(run: RunConfig) -> dict[str, GroupFilter]:
    """By their names in the run file."""
    return {name: plugins.load(name, where="algorithm.filters", table=FILTERS) for name in run.algorithm.filters}


def load_reward(run: RunConfig) -> Any:
    from asyncrl.rewards.load import load_reward

    return load_reward(run.reward)


def open_rows(run: RunConfig) -> PromptDataset:
    """The prompts. Raises ConfigError for the first row that cannot be one."""
    from asyncrl.data.prompts import PromptDataset
    from asyncrl.data.tokenizer import load_tokenizer

    return PromptDataset.open(run.data, tokenizer=load_tokenizer(Path(run.model.path)), seed=run.run.seed)


def channel(run: RunConfig, *, bus: Bus) -> WeightChannel:
    kind = plugins.load(run.weights.channel, where="weights.channel", table=CHANNELS)
    extra: dict[str, Any] = {}
    if run.weights.channel == "nccl":
        extra = {
            "host": run.weights.host or _own_address(run),
            "bucket_bytes": run.weights.bucket_megabytes * 2**20,
        }
    elif run.weights.channel == "objects":
        extra = {
            "objects": bus.objects(),
            "full_every": run.weights.full_every,
            "delta_share": run.weights.delta_share,
        }
    model_path = Path(run.model.path)
    made: WeightChannel = kind(run.weights_directory, keep=run.weights.keep, model_path=model_path, **extra)
    if every := run.weights.models_every:
        from asyncrl.weights.models import WithModels

        return WithModels(made, run.run_directory / "models", every=every, model_path=model_path)
    return made


def _own_address(run: RunConfig) -> str:
    """Of this machine on the way to the bus, where every engine's worker is too."""
    from asyncrl.weights.nccl import own_address

    url, _ = bus_address(run, token="")
    return own_address(urlsplit(servers(url)[0]).hostname or "127.0.0.1")


def backend(run: RunConfig) -> Backend:
    from asyncrl.backends.optimizer_settings import OptimizerSettings

    kind, learner = backend_class(run), run.learner
    processes = {"ranks": learner.ranks, "tensor_parallel": learner.tensor_parallel}
    extra: dict[str, Any] = {name: count for name, count in processes.items() if count > 1}  # one need not know of it
    resolved = algorithm(run)
    optimizer = OptimizerSettings(
        weight_decay=learner.weight_decay,
        betas=(learner.betas[0], learner.betas[1]),
        eps=learner.eps,
        max_grad_norm=learner.max_grad_norm,
    )
    if models := auxiliary.models(run, resolved, optimizer=optimizer):  # nor of these
        extra["auxiliary"] = models
    made: Backend = kind(
        Path(run.model.path),
        algorithm=resolved,
        optimizer=optimizer,
        temperature=run.rollout.temperature,
        device=device(learner.device, "learner"),
        dtype=run.model.dtype,
        threads=learner.threads,
        options=options(kind, learner.options, "learner.options"),
        **extra,
    )
    return made


def engine(run: RunConfig, *, name: str) -> Engine:
    kind = engine_class(run)
    extra = {"log_path": run.run_directory / "logs" / f"{name}.engine.log"} if run.engine.kind == "sglang" else {}
    made: Engine = kind(
        Path(run.model.path),
        device=device(run.engine.device, "engine"),
        dtype=run.model.dtype,
        version=(0, 0),
        options=options(kind, run.engine.options, "engine.options"),
        **extra,
    )
    return made


def launcher_class(run: RunConfig) -> Any:
    return plugins.load(run.launcher.kind, where="launcher.kind", table=LAUNCHERS)


def launcher(run: RunConfig) -> Launcher:
    kind = launcher_class(run)
    made: Launcher = kind(
        run_name=run.run.name,
        log_directory=run.run_directory / "logs",
        options=options(kind, run.launcher.options, "launcher.options"),
    )
    return made


def device(name: str, section: str) -> str:
    """cpu or cuda; auto takes the GPU when there is one."""
    import torch

    if name == "cuda":
        require_gpu(section)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def require_gpu(section: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f'{section}: device = "cuda", but this machine has no GPU that torch sees; use "cpu" or "auto"'
        )


# -- bus ---------------------------------------------------------------------------------------------------------------


async def connect(run: RunConfig, *, token: str, role: str = "learner") -> Bus:
    """The run's bus: bus.url, or the server that `asyncrl run` started in the run's folder.

    role  of bus/access.py; only the learner's makes the run's streams
    """
    url, token = bus_address(run, token=token)
    bus = await _connect(run, url, token=token, role=role)
    if bus.max_message_bytes < run.largest_message_bytes:
        limit = bus.max_message_bytes
        await bus.close()
        raise ConfigError(
            f"bus.url {without_secrets(url)}: the server takes messages of {limit:,} bytes, a trajectory group "
            f"may have {run.largest_message_bytes:,}; raise max_payload there or lower rollout.group_size or "
            "max_new_tokens"
        )
    return bus


async def observe(run: RunConfig, *, token: str, role: str = "observer") -> Bus:
    """The run's bus for somebody who only looks, or an "operator": nothing is made there. Raises ConfigError."""
    url, token = bus_address(run, token=token)
    return await _connect(run, url, token=token, role=role)


def bus_address(run: RunConfig, *, token: str) -> tuple[str, str]:
    """(url, token) of bus.url, or of the server that `asyncrl run` started in the run's folder. Raises NoSuchRun."""
    if run.bus.url or run.bus.address:
        return run.bus.url or run.bus.address, token
    address = run.run_directory / BUS_FILE
    try:
        table = json.loads(address.read_text())
    except FileNotFoundError:
        raise NoSuchRun(
            f"bus.url is empty and no `asyncrl run` is up in {run.run_directory}; start that first, or give the "
            "address of a nats-server with --set bus.url=nats://HOST:PORT"
        ) from None
    return table["url"], table["token"]


async def _connect(run: RunConfig, url: str, *, token: str, role: str) -> Bus:
    from asyncrl.bus.access import Access
    from asyncrl.bus.jetstream import JetStreamBus

    return await JetStreamBus.connect(
        url,
        run=run.run.name,
        access=Access(
            role=role,
            token="" if run.bus.credentials else token,
            credentials=run.bus.credentials,
            tls_ca=run.bus.tls_ca,
            tls_certificate=run.bus.tls_certificate,
            tls_key=run.bus.tls_key,
        ),
        max_prompts=run.window,
        max_log_bytes=run.bus.max_log_bytes,
        ack_seconds=run.bus.ack_seconds,
        storage=run.bus.store,
        replicas=run.bus.replicas,
    )
