"""One run, one TOML file: frozen dataclasses with the meaning and default of every key, and errors that name the key.

Derived values are properties with their formula, not keys. Adapter options ([engine.options], [learner.options],
[reward.options]) are dataclasses beside their adapters; app.py checks them with ``tables.build``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.checks import positive, require
from asyncrl.config.launcher import LauncherSection
from asyncrl.config.learner import Learner
from asyncrl.config.models import Critic, Reference, Teacher
from asyncrl.config.staleness import Staleness
from asyncrl.config.tables import build
from asyncrl.errors import ConfigError

Mode = Literal["sync", "one_step_off", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str = "run"
    """Names the run on the bus and in W&B: letters, digits, - and _. Two runs on one bus need two names."""
    directory: str = "runs"
    """The run's files go to DIRECTORY/NAME: logs, metrics, weights, checkpoints, the bus's store."""
    seed: int = 0
    steps: int = 100
    """Optimizer steps; step n makes policy version n."""
    mode: Mode = "async"
    """sync: generate, train, load, repeat. one_step_off: generate the next batch while training. async: no barrier."""
    restarts: int = 3
    """Times `asyncrl run` starts a process again before it ends the run; one that has worked and
    lived for ten minutes has them all again."""
    stall_seconds: float = 60.0
    """`asyncrl run` starts a process again that is silent for so long, or stuck for ten times what is usual too."""

    def __post_init__(self) -> None:
        plain = self.name.replace("-", "").replace("_", "")
        require(plain.isascii() and plain.isalnum(), f"name must be letters, digits, - and _, got {self.name!r}")
        positive(self, "steps", "stall_seconds")
        require(self.restarts >= 0, f"restarts must be >= 0, got {self.restarts}")
        require(self.seed >= 0, f"seed must be >= 0, got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    url: str = ""
    """nats://HOST:PORT of a running server; empty starts one for this run. Of a cluster, several with commas between
    (nats://A:4222,nats://B:4222,nats://C:4222): whoever loses its server goes on with another."""
    replicas: int = 1
    """Servers of the cluster at url that keep a copy of what is on the bus: 3 survive the loss of any one."""
    address: str = ""
    """Of the server started for this run, for processes that cannot read it in the run's folder; `asyncrl run` tells
    them (ASYNCRL_BUS_URL)."""
    token: str = ""
    """The server's token. ASYNCRL_BUS_TOKEN in the environment is better: it is not in a file."""
    credentials: str = ""
    """File with USER:PASSWORD, an NKEY seed, or a .creds file; {role} in it is learner, rollout-worker or observer.
    `bin/nats-config` writes such files."""
    tls_ca: str = ""
    """PEM file of who signed the server's certificate; with it, or with tls:// in the url, the bus speaks TLS."""
    tls_certificate: str = ""
    """Our own certificate, for a server that asks for one; {role} as above."""
    tls_key: str = ""
    port: int = 0
    """Port of the server started for this run; 0 takes a free one."""
    store: Literal["file", "memory"] = "file"
    max_message_bytes: int = 8 * 2**20
    """max_payload of the server started for this run."""
    max_log_bytes: int = 2 * 2**30
    """Size of the trajectory log; workers wait when it is full. Trimmed behind each checkpoint."""
    ack_seconds: float = 30.0
    """A prompt whose worker was not heard of for so long goes to another one."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, f"port must be in 0..65535, got {self.port}")
        positive(self, "max_message_bytes", "max_log_bytes", "ack_seconds")
        require(
            not self.url or self.url.startswith(("nats://", "tls://")),
            f"url must start with nats:// or tls://, got {self.url.partition(':')[0]}:...",
        )
        require(self.replicas in (1, 3, 5), f"replicas must be 1, 3 or 5, got {self.replicas}")
        require(bool(self.url) or self.replicas == 1, "replicas are for a cluster of servers at url")
        require(
            bool(self.url) or not (self.credentials or self.tls_ca), "credentials and tls_ca are for a server at url"
        )
        require(not (self.token and self.credentials), "token and credentials are two ways to say who we are: set one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    path: str
    """Hugging Face folder (config.json, *.safetensors, tokenizer.json); `asyncrl import-model` makes one from GGUF."""
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    path: str
    """JSONL or Parquet file, one prompt a row."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    label_key: str = "label"
    """Column with what the reward compares to; may be absent."""
    metadata_key: str = "metadata"
    """Column with a table handed to the reward; may be absent."""
    response_key: str = ""
    """Column with an answer to imitate, text, for rollout.function = "given"; empty: none."""
    chat_template: bool = False
    """Wrap a text prompt as one user message in the tokenizer's chat template."""
    shuffle: bool = True
    """A new order every epoch, by run.seed."""
    epochs: int = 0
    """Passes over the data; 0 repeats until run.steps is reached."""
    max_prompt_tokens: int = 1024
    """Longer prompts are dropped and counted."""

    def __post_init__(self) -> None:
        positive(self, "max_prompt_tokens")
        require(self.epochs >= 0, f"epochs must be >= 0, got {self.epochs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    workers: int = 1
    """Rollout workers that `asyncrl run` starts; more may join at any time."""
    gpus: tuple[int, ...] = ()
    """GPUs that `asyncrl run` deals to its workers, in order and over again; empty takes those behind the learner's."""
    group_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    max_running: int = 128
    """Samples one worker has in progress; a prompt group is taken while it has fewer."""
    max_attempts: int = 3
    """A group that failed so often is buried: counted, reported, never trained."""
    salvage_seconds: float = 3.0
    """So often a worker puts what it has of unfinished answers on the bus, for who takes them over when it dies (not
    on their last attempt); 0 never does."""
    function: str = "single_turn"
    """single_turn, given (the answer in data.response_key, for supervised fine-tuning), or "package.module:function" of
    another RolloutFn (multi-turn, tools), or of a class of them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of a class: the Options beside it (docs/customize.md)."""
    load: Literal["", "in_flight", "drain", "on_demand"] = ""
    """When a worker takes new weights. in_flight (async): at once, between two tokens. drain: once what runs is done.
    on_demand (sync, one_step_off): when a prompt asks for them. Empty: what run.mode says."""

    def __post_init__(self) -> None:
        positive(self, "group_size", "max_new_tokens", "temperature", "max_running", "max_attempts")
        require(self.salvage_seconds >= 0, f"salvage_seconds must be >= 0 (0 is off), got {self.salvage_seconds}")
        require(self.workers >= 0, f"workers must be >= 0, got {self.workers}")
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= 0, f"top_k must be >= 0 (0 is off), got {self.top_k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    kind: str = "sglang"
    """sglang, inprocess, none (no model: for rollout.function = "given"), or "package.module:Class"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    """See the Options class beside the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    kind: str = "math"
    """math, exact, regex, remote, none (what the rollout function set, else 0), or "package.module:function"."""
    timeout_seconds: float = 30.0
    """For one group; a group whose reward takes longer is buried."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """See the Options class beside the reward."""

    def __post_init__(self) -> None:
        positive(self, "timeout_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    name: str = "grpo"
    """A row of policies/rows.py, or "package.module:ROW"."""
    advantage: str = ""
    """Of policies/catalogue.py, as loss and aggregation; empty takes the algorithm's own."""
    loss: str = ""
    aggregation: str = ""
    correction: str = ""
    """Off-policy correction, rows of policies/correction_chains.py: "tis_token", "tis_token + geo_mask", "none"."""
    denominator: Literal["before", "after"] = "before"
    """Whether tokens that the correction rejects count in the mean: before or after rejection."""
    filters: tuple[str, ...] = ()
    """Groups not worth training are released and others generated in their place: "dynamic_sampling" (all rewards
    equal), or "package.module:function" of a TrajectoryGroup, True to keep."""
    overlong_tokens: int = 0
    """DAPO's soft punishment: over the last so many tokens before max_new_tokens the reward falls by up to 1."""
    mask_truncated: bool = False
    """DAPO's overlong filtering: an answer that was cut off trains nothing; in its group's baseline it counts."""
    entropy_coef: float = 0.0
    """Entropy in nats, times this, is added to the objective."""
    allow_uncorrected: bool = False
    """Train stale data as if it were fresh. It collapses; for experiments only."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of its parts, such as clip_low and cap; "loss.clip_low" where two parts have one."""

    def __post_init__(self) -> None:
        for name in ("entropy_coef", "overlong_tokens"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    channel: str = "files"
    """files: a folder that learner and workers see. nccl: the folder, and straight from the learner's GPU into each
    engine's (gloo between CPUs). objects: the bus's object store, for workers far away. Or "package.module:Class"."""
    directory: str = ""
    """Shared folder for weight versions, /dev/shm/... on one host; empty is weights/ in the run's folder."""
    host: str = ""
    """The learner's address as engines see it, for nccl; empty is its own on the way to the bus."""
    bucket_megabytes: int = 2048
    """nccl: what an engine takes at once (MiB, at most 2048), in memory beside its weights; more of them pause it
    longer."""
    keep: int = 4
    """Versions kept; a worker slower than that takes the next one."""
    models_every: int = 0
    """Every so many-th version stays for good, a Hugging Face model in models/EPOCH-VERSION of the run's folder (it is
    announced to workers when that is written, too); 0: none does."""
    every_steps: int = 1
    """Steps between two versions that are published; over 1 where nobody samples (rollout.function = "given"). Each
    step is a version all the same."""
    full_every: int = 16
    """objects: a version is stored as what changed since the one before, and each so many-th as a whole too."""
    delta_share: float = 0.5
    """objects: what changed is not stored when it takes more than this share of the whole; 0 stores wholes only."""

    def __post_init__(self) -> None:
        positive(self, "every_steps", "full_every")
        require(self.models_every >= 0, f"models_every must be >= 0 (0 keeps none), got {self.models_every}")
        require(1 <= self.bucket_megabytes <= 2048, f"bucket_megabytes must be 1 to 2048, got {self.bucket_megabytes}")
        require(0 <= self.delta_share <= 1, f"delta_share must be in [0, 1], got {self.delta_share}")
        require(self.keep >= 2, f"keep must be >= 2 (one to load while the next is written), got {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    every_steps: int = 50
    """0 writes one at the end only."""
    keep: int = 2
    keep_log: bool = False
    """Keep trained trajectories in the log (for replay) instead of trimming them behind each checkpoint."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, f"every_steps must be >= 0, got {self.every_steps}")
        positive(self, "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    wandb: bool = False
    wandb_project: str = "asyncrl"
    console: bool = True
    mismatch_alarm: float = 0.05
    """Warn when mean |trainer - behavior logprob| of fresh samples is above this, in nats per token; 0 never does.
    An engine and a trainer that round to bfloat16 in their own ways are 0.005 to 0.02 apart."""
    drop_alarm: float = 0.05
    """Warn when more than this share of ten steps' answers was too old to train; 0 never does. They are mostly
    the longer ones."""

    def __post_init__(self) -> None:
        require(self.mismatch_alarm >= 0, f"mismatch_alarm must be >= 0 (0 is off), got {self.mismatch_alarm}")
        require(0 <= self.drop_alarm <= 1, f"drop_alarm must be a share, 0 to 1 (0 is off), got {self.drop_alarm}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything one run is. Sections are keys of the run file's tables."""

    model: Model
    data: Data
    run: Run = field(default_factory=Run)
    bus: Bus = field(default_factory=Bus)
    rollout: Rollout = field(default_factory=Rollout)
    engine: Engine = field(default_factory=Engine)
    reward: RewardSection = field(default_factory=RewardSection)
    learner: Learner = field(default_factory=Learner)
    algorithm: Algorithm = field(default_factory=Algorithm)
    critic: Critic | None = None
    reference: Reference | None = None
    teacher: Teacher | None = None
    staleness: Staleness = field(default_factory=Staleness)
    weights: Weights = field(default_factory=Weights)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    launcher: LauncherSection = field(default_factory=LauncherSection)

    def __post_init__(self) -> None:
        self.staleness.check(mode=self.run.mode, group_size=self.rollout.group_size)
        overlong, longest = self.algorithm.overlong_tokens, self.rollout.max_new_tokens
        require(
            overlong <= longest,
            f"algorithm: overlong_tokens {overlong} is more than rollout.max_new_tokens {longest}: every answer would "
            "be punished",
        )
        every = self.weights.every_steps
        require(
            every == 1 or self.rollout.function == "given",
            f'weights: every_steps {every} needs rollout.function = "given": each prompt is sampled with the version '
            "it was published at or a newer one, so engines need them all; what publishing takes holds up no step",
        )

    @property
    def run_directory(self) -> Path:
        return Path(self.run.directory) / self.run.name

    @property
    def weights_directory(self) -> Path:
        return (
            Path(self.weights.directory) / self.run.name if self.weights.directory else self.run_directory / "weights"
        )

    @property
    def max_staleness(self) -> int:
        """The bound that the mode implies: 0 for sync, 1 for one_step_off, the run file's for async."""
        return {"sync": 0, "one_step_off": 1, "async": self.staleness.max_staleness}[self.run.mode]

    @property
    def window(self) -> int:
        """Groups that may be outstanding: (max_staleness + 1) x groups_per_batch."""
        return (self.max_staleness + 1) * self.learner.groups_per_batch

    @property
    def load(self) -> str:
        """When a worker takes new weights: rollout.load, or what the mode implies."""
        return self.rollout.load or ("in_flight" if self.run.mode == "async" else "on_demand")

    @property
    def largest_message_bytes(self) -> int:
        """Upper bound of one trajectory group: 4 B token + 4 B logprob + 1 B mask, and some overhead."""
        response = self.rollout.group_size * (9 * self.rollout.max_new_tokens + 1024)
        return response + 4 * self.data.max_prompt_tokens + 4096


def only_overrides(overrides: Iterable[str], *, where: str = "--set") -> RunConfig:
    """For who needs the bus and the run's name alone: without a run file, and with neither model nor data.

    ``where``: what the user wrote them after.
    """
    table: dict[str, Any] = {"model": {"path": ""}, "data": {"path": ""}}
    for item in overrides:
        override(table, item)
    return build(RunConfig, table, where)


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The run file at ``path`` with ``section.key=value`` overrides applied. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; `asyncrl run examples/demo.toml` is one to start from") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the run file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    for item in overrides:
        override(table, item)
    return build(RunConfig, table, str(path))


def override(table: dict[str, Any], item: str) -> None:
    """Set one ``section.key=value`` in a run file's table. Raises ConfigError."""
    dotted, equals, text = item.partition("=")
    if not equals or "." not in dotted:
        raise ConfigError(f"--set {item}: write section.key=value, such as run.steps=10")
    *parents, key = dotted.split(".")
    node = table
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {item}: {parent} is a value, not a section")
    try:
        node[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        node[key] = text  # a bare word is a string: --set engine.kind=sglang
