"""Composition root: a run file to bus, engine, backend and actors. The only file that names adapters.

The tables below are the documentation of what can be chosen; every entry may also be "package.module:object".
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import checkpoint, config, plugins
from asyncrl.checkpoint import LearnerState, PromptState
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages import Sampling
from asyncrl.protocols import Backend, Bus, Engine, WeightChannel

if TYPE_CHECKING:
    from asyncrl.data.prompts import PromptDataset
    from asyncrl.metrics.sinks import Sink
    from asyncrl.policies.algorithms import Algorithm

ENGINES = {
    "inprocess": "asyncrl.engines.inprocess:InProcessEngine",
    "sglang": "asyncrl.engines.sglang:SGLangEngine",
}
BACKENDS = {
    "megatron": "asyncrl.backends.megatron:MegatronBackend",
    "reference": "asyncrl.backends.reference:ReferenceBackend",
}
CHANNELS = {"files": "asyncrl.weights.files:FilesChannel"}
ROLLOUTS = {"single_turn": "asyncrl.actors.rollout_worker:single_turn"}

BUS_FILE = "bus.json"
"""Where `asyncrl run` leaves the address of the server it started, for whoever joins from this machine."""


# -- what a run file means, and whether it can work --------------------------------------------------------------------


def check(run: RunConfig) -> None:
    """Refuse, with a ConfigError that says what to change, what cannot work. Starts nothing, loads no weights."""
    from asyncrl.data.model_folder import check_model

    _check_bus(run)
    _check_sampling(run)
    check_model(Path(run.model.path))
    if not Path(run.data.path).is_file():
        raise ConfigError(f"data.path: {run.data.path} does not exist; it must be a .jsonl or .parquet file")
    algorithm(run)
    for section, device in (("engine", run.engine.device), ("learner", run.learner.device)):
        if device == "cuda":
            _require_gpu(section)
    options(engine_class(run), run.engine.options, "engine.options")
    options(backend_class(run), run.learner.options, "learner.options")
    if run.learner.ranks > 1 and run.learner.backend == "reference":
        raise ConfigError('learner.ranks: the reference backend is one process; use backend = "megatron" or ranks = 1')
    plugins.load(run.weights.channel, where="weights.channel", table=CHANNELS)
    load_reward(run)
    plugins.load(run.rollout.function, where="rollout.function", table=ROLLOUTS)


def _check_bus(run: RunConfig) -> None:
    largest, limit = run.largest_message_bytes, run.bus.max_message_bytes
    if largest > limit:
        raise ConfigError(
            f"bus: a trajectory group of {run.rollout.group_size} x {run.rollout.max_new_tokens} tokens may take "
            f"{largest:,} bytes, over bus.max_message_bytes ({limit:,}); raise it (and max_payload of a server of your "
            "own) or lower rollout.group_size or rollout.max_new_tokens"
        )
    between = run.run.steps if run.checkpoint.keep_log else run.checkpoint.every_steps or run.run.steps
    groups = run.window + min(between, run.run.steps) * run.learner.groups_per_batch
    if groups * largest > run.bus.max_log_bytes:
        raise ConfigError(
            f"bus: up to {groups:,} groups of {largest:,} bytes lie in the log before a checkpoint trims it, "
            f"{groups * largest:,} in all, over bus.max_log_bytes ({run.bus.max_log_bytes:,}): a full log would stop "
            "the run; raise it or lower checkpoint.every_steps"
        )


def _check_sampling(run: RunConfig) -> None:
    rollout = run.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise ConfigError(
            f"rollout: top_p={rollout.top_p} top_k={rollout.top_k} sample from a truncated distribution whose logprobs "
            "the trainer cannot recompute; use top_p = 1.0 and top_k = 0 and shape it by temperature"
        )
    if rollout.group_size < 2 and run.algorithm.name == "grpo":
        raise ConfigError("rollout: group_size 1 gives grpo no baseline: every advantage is 0; use 2 or more")


def _require_gpu(section: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f'{section}: device = "cuda", but this machine has no GPU that torch sees; use "cpu" or "auto"'
        )


def describe(run: RunConfig) -> str:
    """The resolved run file and what follows from it, for a person. Checks first, every row of the data too."""
    check(run)
    rows = open_rows(run)
    lines = []
    for section in dataclasses.fields(run):
        lines.append(f"[{section.name}]")
        table = getattr(run, section.name)
        for key in dataclasses.fields(table):
            value = getattr(table, key.name)
            shown = "***" if key.name == "token" and value else _toml(value)
            lines.append(f"{key.name} = {shown}")
        lines.append("")
    lines += [
        "# what follows",
        f"staleness bound   {run.max_staleness} versions ({run.run.mode})",
        f"window            {run.window} groups = (max_staleness {run.max_staleness} + 1) x "
        f"groups_per_batch {run.learner.groups_per_batch}",
        f"data              {rows.num_rows:,} prompts, {run.run.steps * run.learner.groups_per_batch:,} trained",
        f"samples per step  {run.learner.groups_per_batch * run.rollout.group_size}",
        f"largest message   {run.largest_message_bytes:,} bytes of {run.bus.max_message_bytes:,}",
        f"weights           loaded {run.load.replace('_', ' ')}, kept in {run.weights_directory}",
        f"files             {run.run_directory}",
    ]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


# -- adapters ----------------------------------------------------------------------------------------------------------


def options(adapter: Any, table: Any, where: str) -> Any:
    """``table`` as the adapter's Options: the dataclass of that name beside it."""
    kind = getattr(sys.modules[adapter.__module__], "Options", None)
    if kind is None:
        if table:
            raise ConfigError(f"{where}: {adapter.__name__} takes no options")
        return None
    return config.build(kind, table, where)


def engine_class(run: RunConfig) -> Any:
    return plugins.load(run.engine.kind, where="engine.kind", table=ENGINES)


def backend_class(run: RunConfig) -> Any:
    return plugins.load(run.learner.backend, where="learner.backend", table=BACKENDS)


def algorithm(run: RunConfig) -> Algorithm:
    """The row, with the run file's correction and options. Refuses stale data without a correction."""
    from asyncrl.policies.algorithms import ALGORITHMS, resolve

    row = ALGORITHMS.get(run.algorithm.name)
    if row is None:
        addresses = {name: "asyncrl.policies.algorithms:ALGORITHMS" for name in ALGORITHMS}
        row = plugins.load(run.algorithm.name, where="algorithm.name", table=addresses)
    resolved = resolve(row, correction=run.algorithm.correction, options=run.algorithm.options)
    if resolved.correction == "none" and run.max_staleness > 0 and not run.algorithm.allow_uncorrected:
        raise ConfigError(
            f'algorithm: correction = "none" trains data up to {run.max_staleness} versions old as if it were fresh, '
            'which collapses; use correction = "tis_token", or allow_uncorrected = true if you mean it'
        )
    return resolved


def load_reward(run: RunConfig) -> Any:
    from asyncrl.rewards.load import load_reward

    return load_reward(run.reward)


def open_rows(run: RunConfig) -> PromptDataset:
    """The prompts. Raises ConfigError for the first row that cannot be one."""
    from asyncrl.data.prompts import PromptDataset
    from asyncrl.data.tokenizer import load_tokenizer

    return PromptDataset.open(run.data, tokenizer=load_tokenizer(Path(run.model.path)), seed=run.run.seed)


def channel(run: RunConfig) -> WeightChannel:
    kind = plugins.load(run.weights.channel, where="weights.channel", table=CHANNELS)
    made: WeightChannel = kind(run.weights_directory, keep=run.weights.keep, model_path=Path(run.model.path))
    return made


def backend(run: RunConfig) -> Backend:
    from asyncrl.backends.optimizer_settings import OptimizerSettings

    kind, learner = backend_class(run), run.learner
    extra = {"ranks": learner.ranks} if learner.ranks > 1 or learner.backend == "megatron" else {}
    made: Backend = kind(
        Path(run.model.path),
        algorithm=algorithm(run),
        optimizer=OptimizerSettings(
            weight_decay=learner.weight_decay,
            betas=(learner.betas[0], learner.betas[1]),
            eps=learner.eps,
            max_grad_norm=learner.max_grad_norm,
        ),
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


def device(name: str, section: str) -> str:
    """cpu or cuda; auto takes the GPU when there is one."""
    import torch

    if name == "cuda":
        _require_gpu(section)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


# -- bus ---------------------------------------------------------------------------------------------------------------


async def connect(run: RunConfig, *, token: str) -> Bus:
    """The run's bus: bus.url, or the server that `asyncrl run` started in the run's folder."""
    from asyncrl.bus.jetstream import JetStreamBus

    url = run.bus.url
    if not url:
        address = run.run_directory / BUS_FILE
        try:
            table = json.loads(address.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"bus.url is empty and no `asyncrl run` is up in {run.run_directory}; start that first, or give the "
                "address of a nats-server with --set bus.url=nats://HOST:PORT"
            ) from None
        url, token = table["url"], table["token"]
    bus = await JetStreamBus.connect(
        url,
        run=run.run.name,
        token=token,
        max_prompts=run.window,
        max_log_bytes=run.bus.max_log_bytes,
        ack_seconds=run.bus.ack_seconds,
        storage=run.bus.store,
    )
    if bus.max_message_bytes < run.largest_message_bytes:
        limit = bus.max_message_bytes
        await bus.close()
        raise ConfigError(
            f"bus.url {url}: the server takes messages of {limit:,} bytes, a trajectory group may have "
            f"{run.largest_message_bytes:,}; raise max_payload there or lower rollout.group_size or max_new_tokens"
        )
    return bus


# -- learner -----------------------------------------------------------------------------------------------------------


def run_learner(run: RunConfig, *, resume: bool, token: str) -> int:
    """The learner's process, to the end of the run. Raises ConfigError while another one has this run."""
    check(run)
    with _only_learner(run.run_directory):
        return _in_event_loop(_learner(run, resume=resume, token=token))


@contextlib.contextmanager
def _only_learner(directory: Path) -> Iterator[None]:
    """Two learners would publish over each other's weights; the lock goes with the process, however it ends."""
    path = directory / "learner.lock"
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{directory}: another learner has this run ({path} is locked); end it first") from None
        yield


async def _learner(run: RunConfig, *, resume: bool, token: str) -> int:
    from asyncrl.actors.base import Heart
    from asyncrl.actors.supervisor import supervise

    bus = await connect(run, token=token)
    try:
        started = time.monotonic()
        learner, prompts = await build_learner(run, bus=bus, resume=resume)
        await supervise(learner, prompts, Heart(learner))
        seconds = time.monotonic() - started
        outcome = "done" if learner.done else "stopped"
        print(
            f"{outcome}: {learner.step} steps in {seconds:.0f} s, {learner.counts}; policy version "
            f"{learner.policy_version}, checkpoint in {run.run_directory / 'checkpoints'}"
        )
        return 0
    finally:
        await bus.close()


async def build_learner(run: RunConfig, *, bus: Bus, resume: bool) -> tuple[Any, Any]:
    """(Learner, PromptSource), ready to be supervised."""
    from asyncrl.actors.learner import Learner, LearnerSettings
    from asyncrl.actors.prompt_source import PromptSource
    from asyncrl.actors.reporter import Reporter
    from asyncrl.policies.admission import Admission
    from asyncrl.policies.buffer import Buffer
    from asyncrl.policies.ledger import Ledger
    from asyncrl.topics import PROGRESS

    progress = (await bus.states(PROGRESS)).get("")
    state, restore_from = _starting_point(run, resume=resume, last_epoch=-1 if progress is None else progress.run_epoch)
    buffer = Buffer(
        max_staleness=run.max_staleness,
        forks=state.forks,
        groups=Ledger.from_json(state.groups),
        consumed=Ledger.from_json(state.consumed),
    )
    rows = await asyncio.to_thread(open_rows, run)
    prompts = PromptSource(
        "prompts",
        bus,
        rows=rows,
        admission=Admission(
            mode=run.run.mode,
            groups_per_batch=run.learner.groups_per_batch,
            max_staleness=run.max_staleness,
            total_groups=run.run.steps * run.learner.groups_per_batch,
        ),
        sampling=Sampling(
            max_new_tokens=run.rollout.max_new_tokens,
            temperature=run.rollout.temperature,
            top_p=run.rollout.top_p,
            top_k=run.rollout.top_k,
            ignore_eos=run.rollout.ignore_eos,
        ),
        group_size=run.rollout.group_size,
        state=state.prompts,
        groups=buffer.groups,
    )
    learner = Learner(
        "learner",
        bus,
        settings=LearnerSettings(
            steps=run.run.steps,
            mode=run.run.mode,
            groups_per_batch=run.learner.groups_per_batch,
            max_staleness=run.max_staleness,
            wait_for_stragglers=run.staleness.eviction == "wait",
            ranks=run.learner.ranks,
            micro_batch_tokens=run.learner.micro_batch_tokens,
            learning_rate=run.learner.learning_rate,
            warmup_steps=run.learner.warmup_steps,
            checkpoint_directory=run.run_directory / "checkpoints",
            checkpoint_every=run.checkpoint.every_steps,
            checkpoint_keep=run.checkpoint.keep,
            keep_log=run.checkpoint.keep_log,
            max_buried_in_a_row=max(32, 2 * run.window),
        ),
        state=state,
        restore_from=restore_from,
        buffer=buffer,
        prompts=prompts,
        backend=backend(run),
        channel=channel(run),
        algorithm=algorithm(run),
        reporter=Reporter(bus, sinks(run, resume=resume)),
    )
    return learner, prompts


def _starting_point(run: RunConfig, *, resume: bool, last_epoch: int) -> tuple[LearnerState, Path | None]:
    """Where the learner starts, and the backend folder to restore. ``last_epoch``: the newest the bus knows, or -1."""
    found = checkpoint.latest(run.run_directory / "checkpoints")
    if not resume:
        if found is not None or last_epoch >= 0:
            raise ConfigError(
                f"run.name: {run.run.name!r} already has a run in {run.run_directory} or on its bus; go on with "
                "--resume, or start another with --set run.name=NAME"
            )
        return _fresh(), None
    state, folder = found if found is not None else (_fresh(), None)
    if run.run.steps < state.step:
        raise ConfigError(f"run.steps is {run.run.steps}, but the checkpoint is at step {state.step} already")
    if state.groups_per_batch not in (0, run.learner.groups_per_batch):
        raise ConfigError(
            f"learner.groups_per_batch: the checkpoint was made with {state.groups_per_batch}; the window "
            f"counts in it. Resume with that, not {run.learner.groups_per_batch}, or start another run"
        )
    run_epoch = max(state.run_epoch, last_epoch) + 1
    forks = state.forks | {run_epoch: state.policy_version}
    return dataclasses.replace(state, run_epoch=run_epoch, forks=forks), folder


def _fresh() -> LearnerState:
    return LearnerState(
        run_epoch=0,
        step=0,
        policy_version=0,
        groups={"watermark": 0, "beyond": []},
        consumed={"watermark": 1, "beyond": []},
        prompts=PromptState(),
    )


def sinks(run: RunConfig, *, resume: bool) -> list[Sink]:
    from asyncrl.metrics.sinks import Console, JsonLines

    made: list[Sink] = [JsonLines(run.run_directory / "metrics.jsonl")]
    if run.metrics.console:
        made.append(Console(run.run.steps))
    if run.metrics.wandb:
        from asyncrl.metrics.wandb import WandB

        settings = json.loads(json.dumps(dataclasses.asdict(run), default=str))
        settings["bus"]["token"] = "***" if settings["bus"]["token"] else ""
        made.append(
            WandB(
                project=run.metrics.wandb_project,
                name=run.run.name,
                directory=run.run_directory,
                config=settings,
                resume=resume,
            )
        )
    return made


# -- rollout worker ----------------------------------------------------------------------------------------------------


def run_worker(run: RunConfig, *, name: str, token: str) -> int:
    """A rollout worker's process, until it is drained or the run is finished."""
    check(run)
    return _in_event_loop(_worker(run, name=name, token=token))


async def _worker(run: RunConfig, *, name: str, token: str) -> int:
    from asyncrl.actors.base import Heart
    from asyncrl.actors.supervisor import supervise

    bus = await connect(run, token=token)
    try:
        worker, follower = await build_worker(run, bus=bus, name=name)
        await supervise(worker, follower, Heart(worker))
        return 0
    finally:
        await bus.close()


async def build_worker(run: RunConfig, *, bus: Bus, name: str) -> tuple[Any, Any]:
    """(RolloutWorker, WeightFollower), ready to be supervised."""
    from asyncrl.actors.rollout_worker import RolloutWorker
    from asyncrl.actors.weight_follower import WeightFollower
    from asyncrl.data.tokenizer import load_tokenizer

    made = engine(run, name=name)
    follower = WeightFollower(f"{name}.weights", bus, engine=made, verify=channel(run).verify, load=run.load)
    worker = RolloutWorker(
        name,
        bus,
        engine=made,
        follower=follower,
        rollout=plugins.load(run.rollout.function, where="rollout.function", table=ROLLOUTS),
        reward=load_reward(run),
        tokenizer=await asyncio.to_thread(load_tokenizer, Path(run.model.path)),
        seed=run.run.seed,
        max_running_groups=run.rollout.max_running_groups,
        max_attempts=run.rollout.max_attempts,
        keep_seconds=run.bus.ack_seconds / 3,
    )
    return worker, follower


def worker_name() -> str:
    """Unique among the machines and processes of a run, and fit for a subject."""
    host = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"


def _in_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one; asyncio's own loop elsewhere."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: int = uvloop.run(main)
    return result
