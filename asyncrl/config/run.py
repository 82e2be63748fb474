"""The run file: one TOML file per run, one frozen dataclass per section, one field per key.

Values that follow from other keys are properties. Options of adapters ([engine.options], ...) are dataclasses in the
modules of the adapters. The docstrings of the fields become docs/reference/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from asyncrl.config.bus import BusSection
from asyncrl.config.checks import (
    MOST_KEPT,
    MOST_STOPS,
    MOST_WORKERS,
    NonNegative,
    NumKept,
    OrNoLimit,
    OrOff,
    Positive,
    PositiveShare,
    Range,
    require,
)
from asyncrl.config.data import DataSection
from asyncrl.config.evaluation import EvaluationSection
from asyncrl.config.images import ImagesSection
from asyncrl.config.learner import LearnerSection
from asyncrl.config.metrics import MetricsSection
from asyncrl.config.models import CriticSection, ReferenceSection, TeacherSection
from asyncrl.config.reward import RewardSection
from asyncrl.config.servers import ServerSection, check_names
from asyncrl.config.staleness import StalenessSection
from asyncrl.config.staleness_bound import bound_for

_LONGEST_NAME: Final = 128
_FLOAT32: Final = " (logits divided by it are float32)"
_MEAN_KEPT: Final = 64
"""Tokens that top_p leaves on average, at most. One token may have up to MOST_KEPT."""

Mode = Literal["sync", "one_step_off", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    name: str = "run"
    """Name of the run on the bus and in W&B: letters, digits, - and _. Runs that share a bus need different names."""
    directory: str = "runs"
    """Parent of the run's folder. DIRECTORY/NAME holds logs, metrics, weights, checkpoints and the bus's store."""
    seed: NonNegative[int] = 0
    """Seed of the data order and of sampling."""
    steps: Positive[int] = 100
    """Number of batches to train. Step n trains one batch and makes policy version n."""
    mode: Mode = "async"
    """sync: generate, train, load weights, repeat. one_step_off: generate the next batch while training. async: no
    barrier."""
    colocated: bool = False
    """The learner and the engines take turns on the same GPUs of one machine. Whichever is idle moves its memory to the
    host. Only for sync and one_step_off; requires torch-memory-saver in addition to SGLang."""
    offload: Literal["both", "learner", "engines"] = "both"
    """With colocated: which side moves its memory to the host while the other has its turn. The other side keeps its
    memory on the GPUs, which saves its moves where both fit."""
    exact: bool = False
    """The learner's logprobs of the policy equal the engines' to the bit (docs/guides/scaling.md). For dense models on
    the reference backend, with in-process engines on a CPU, or for Qwen3 with SGLang on a GPU."""
    restarts: NonNegative[int] = 3
    """How often `asyncrl run` restarts a process before it ends the run. The count resets after the process was up for
    ten minutes."""
    stall_seconds: Annotated[float, Range(low=1)] = 60.0
    """`asyncrl run` restarts a process that sends no heartbeat for this many seconds. It also restarts a process that
    is stuck for this long and for ten times its usual wait."""

    def __post_init__(self) -> None:
        plain = self.name.replace("-", "").replace("_", "")
        require(plain.isascii() and plain.isalnum(), f"name must be letters, digits, - and _, got {self.name!r}")
        require(
            len(self.name) <= _LONGEST_NAME, f"name must have at most {_LONGEST_NAME} characters, got {len(self.name)}"
        )
        require(
            self.colocated or self.offload == "both",
            f'offload = "{self.offload}" is for sides that take turns on the GPUs: set colocated = true, or remove it',
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    path: str
    """Hugging Face folder (config.json, *.safetensors, tokenizer.json). `asyncrl import-model` creates one from a GGUF
    file or from a quantized folder."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights in the learner and in the engines."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder, in workers, engines and the learner: tokenizers such as Kimi's
    (tiktoken.model) need it."""
    family: str = ""
    """For an architecture that asyncrl does not know: "package.module:FAMILY", which says how Megatron builds it and
    how its weights are named (asyncrl/backends/families/family.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSection:
    """Rollout workers whose engines are of another size or have other settings than those of [engine]."""

    workers: Annotated[int, Range(low=1, high=MOST_WORKERS)] = 1
    """Number of these workers, in addition to rollout.workers. `asyncrl scale` leaves them as they are."""
    gpus: tuple[int, ...] = ()
    """GPUs for these workers, assigned round-robin; empty: GPUs that nothing else of the run has."""
    device: Literal["", "auto", "cpu", "cuda"] = ""
    """Empty: engine.device."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the engine that replace those of [engine.options]; tables such as server_arguments are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    workers: Annotated[int, Range(low=0, high=MOST_WORKERS, why=" (a nats-server takes no more connections)")] = 1
    """Number of rollout workers that `asyncrl run` starts. More workers can join at any time."""
    most_workers: int = 0
    """Upper limit for automatic scaling; 0: same as ``workers``. The run adds workers while engines are busy and the
    learner waits, and removes them (down to ``workers``) while the learner is busy and engines wait."""
    gpus: tuple[int, ...] = ()
    """GPUs for these workers, assigned round-robin; empty: the GPUs after the learner's."""
    beside_learner: Literal["sample", "pause"] = "sample"
    """What an engine on the learner's GPUs does during a training step. sample: it goes on, and each has half of the
    GPU's time. pause: it stops between two tokens, and keeps its sequences."""
    pools: Mapping[str, PoolSection] = field(default_factory=dict)
    """More workers, whose engines are of another size or have other settings, by name."""
    group_size: Positive[int] = 8
    """Number of samples per prompt."""
    max_new_tokens: Positive[int] = 256
    """Maximum length of an answer, in tokens."""
    temperature: Annotated[float, Range(low=1e-3, high=1e3, why=_FLOAT32)] = 1.0
    """Sampling temperature: the logits are divided by it. The behavior logprobs include it. A row may have its own
    (data.sampling_key), and the trainer divides that row's logits by it."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1 is off. The trainer normalises over the tokens that were left, at most 1,024
    (rollout/support_mean). SGLang from 0.5.23 on."""
    top_k: int = 0
    """Top-k sampling, 2 to 1,024; 0 is off. Replayed as top_p is."""
    top_logprobs: NumKept = 0
    """Number of likeliest tokens whose behavior logprobs each sampled token carries, at most 1,024, for losses that
    compare distributions (score_centered); 8 bytes each: 1 KB a token for 128. 0: none."""
    max_context_tokens: NonNegative[int] = 0
    """Most tokens of prompt and answer together, over all turns: an answer ends there with finish_reason "length".
    0: the engine's context, which a longer prompt or answer must fit."""
    ignore_eos: bool = False
    """Always sample max_new_tokens tokens, even after <eos>; for benchmarks."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer. All sampled tokens are trained, so the answer includes the stop text, up to the end of
    the token that completes it. The reward's sample.completion includes it too."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, in addition to the model's end tokens. The answer includes them."""
    min_new_tokens: NonNegative[int] = 0
    """The first min_new_tokens tokens of an answer are never an end token or one of stop_token_ids, which shows as
    mismatch there. A text of ``stop`` can still end a shorter answer."""
    max_running: Positive[int] = 128
    """A worker takes another prompt group while it has fewer samples in progress; that group may exceed the number."""
    max_attempts: Positive[int] = 3
    """A group that has failed this many times is marked as failed: it is counted and reported, but never trained."""
    partial_save_seconds: float = 3.0
    """Seconds between saves of partial rollouts to the bus; 0 disables them. If a worker dies, another worker resumes
    from the saved tokens, except on a group's last attempt."""
    function: str = "single_turn"
    """Makes a trajectory from a prompt: a name, or "package.module:function" of your own function or class (several
    turns, tools)."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of a rollout class; its Options dataclass lists them."""
    timeout_seconds: OrNoLimit[float] = 0.0
    """Time limit of the rollout function for one sample, not counting the time it waits for the engine. If a sample
    takes longer, its group fails. 0: no limit."""
    min_group: int = 0
    """Train a group without the samples whose rollout function failed or took too long, if at least this many remain.
    The missing samples are counted (staleness/failed_samples). 0: one failed sample fails the group."""
    extra_samples: NonNegative[int] = 0
    """Samples to start per group in addition to group_size. The first group_size to finish form the group; the others,
    the longest, are cancelled, so lengths are biased (rollout/extra_samples counts them)."""
    group_seconds: OrNoLimit[float] = 0.0
    """Deadline of a group, in seconds after it was started. After it, the group is delivered as soon as ``min_group``
    samples are finished; the others are cancelled and counted (staleness/cancelled). 0: no deadline."""
    reissue_seconds: float = 60.0
    """If no group was answered for this many seconds while every worker waits for prompts, all outstanding prompts are
    issued again, and again after each further interval; the first answer counts. 0: never."""
    max_parts: OrNoLimit[int] = 0
    """Maximum number of trajectories per rollout; a rollout function that returns more fails the group. 0: no limit."""
    routing_replay: Literal["auto", "on", "off"] = "auto"
    """For mixtures of experts: the learner routes each token to the experts that the engine chose (layers x experts
    per token bytes for each token). auto: on if engine, backend and algorithm.correction can use it and a group fits
    into one message. on: also for groups stored in pieces."""
    load: Literal["", "in_flight", "drain", "on_demand"] = ""
    """When a worker loads new weights. in_flight (default for async): immediately, between two tokens. drain: after its
    running samples. on_demand (default for sync and one_step_off): when a prompt asks for them. Empty: the default for
    run.mode."""

    def __post_init__(self) -> None:
        require(
            self.partial_save_seconds == 0 or self.partial_save_seconds >= 0.01,
            f"partial_save_seconds must be >= 0.01, or 0 (off), got {self.partial_save_seconds:g}",
        )
        require(
            self.min_group == 0 or 2 <= self.min_group <= self.group_size,
            f"min_group must be 0 (a sample that fails fails its group), or from 2 (one answer has nothing to compare "
            f"with) to group_size ({self.group_size}), got {self.min_group}",
        )
        require(
            not self.group_seconds or self.min_group > 0,
            "group_seconds delivers a group with its finished samples: min_group must say how many at least",
        )
        require(
            self.reissue_seconds == 0 or self.reissue_seconds >= 1,
            f"reissue_seconds must be >= 1, or 0 (never), got {self.reissue_seconds:g}",
        )
        require(
            self.most_workers == 0 or self.workers <= self.most_workers <= MOST_WORKERS,
            f"most_workers must be 0 (as many as workers) or in {self.workers}..{MOST_WORKERS}, got "
            f"{self.most_workers}",
        )
        require(
            self.top_k == 0 or 2 <= self.top_k <= MOST_KEPT,
            f"top_k must be 0 (off) or 2 to {MOST_KEPT:,} (1 leaves nothing to choose, and each token that is left "
            f"travels with the answer), got {self.top_k}",
        )
        require(
            not self.top_logprobs or (self.top_p == 1 and self.top_k == 0),
            "top_logprobs are over all tokens, and top_p or top_k leave some out; use top_p = 1 and top_k = 0",
        )
        require(all(self.stop), "stop holds an empty text, which every answer contains")
        require(len(self.stop) <= MOST_STOPS, f"stop may hold {MOST_STOPS} texts, got {len(self.stop)}")
        require(
            self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be <= max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}",
        )
        require(
            not (self.ignore_eos and (self.stop or self.stop_token_ids or self.min_new_tokens)),
            "ignore_eos samples max_new_tokens tokens: it excludes stop, stop_token_ids and min_new_tokens",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    kind: str = "sglang"
    """Inference engine that samples from the model: a name, or "package.module:Class"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    name: str = "grpo"
    """Algorithm: a row of policies/algorithms/table.py, or "package.module:SPEC"."""
    advantage: str = ""
    """Advantage estimator: a row of policies/advantages/table.py, or "package.module:Class"; empty: the algorithm's
    own."""
    loss: str = ""
    """Loss: a row of policies/losses/table.py, or "package.module:Class"; empty: the algorithm's own."""
    aggregation: str = ""
    """Aggregation: a row of policies/losses/aggregation.py, or "package.module:Class"; empty: the algorithm's own."""
    correction: str = ""
    """Off-policy correction: rows of policies/corrections/table.py, such as "tis_token", "tis_token + geo_mask" or
    "none"; empty: the algorithm's own."""
    whitening: Literal["", "unbiased", "biased"] = ""
    """Whiten the advantages of any estimator over the trained tokens of the whole batch: mean 0, deviation 1. unbiased
    is slime's --normalize-advantages. Empty: as the estimator makes them; some whiten themselves."""
    denominator: Literal["before", "after"] = "before"
    """How tokens that the correction rejects count in the mean. before: the mean is over the tokens before rejection.
    after: only over the tokens that remain."""
    filters: tuple[str, ...] = ()
    """Filters for groups that are not worth training: names, or "package.module:function" that takes a
    TrajectoryGroup and returns True to keep it, and False or a short reason to reject it. Filtered groups are
    replaced by newly generated ones."""
    hooks: tuple[str, ...] = ()
    """Your own classes, "package.module:Class", that see and change what is trained and logged: group(group) every
    group that arrives, also those that filters reject; batch(batch, groups) the sequences of a step; row(step, metrics)
    the metrics of a step. Each may return what it changed."""
    filter_cap: NonNegative[int] = 0
    """Maximum number of groups that may be filtered between two steps; see filter_cap_action. 0: the run ends only when
    1,000 consecutive groups (or 20 windows, if that is more) were filtered."""
    filter_cap_action: Literal["end", "keep"] = "end"
    """What happens at the cap. end: end the run with the reason. keep: train the groups that the filters reject until
    the step has its groups (staleness/kept_at_cap counts them)."""
    overlong_tokens: NonNegative[int] = 0
    """DAPO's soft overlong punishment: over the last overlong_tokens tokens before max_new_tokens, the reward falls by
    overlong_factor."""
    overlong_factor: NonNegative[float] = 1.0
    """Size of the penalty at max_new_tokens."""
    overlong_floor: bool = True
    """The penalty grows no further beyond max_new_tokens, as in the paper. false: it keeps growing for multi-turn
    answers (verl, AReaL)."""
    mask_truncated: bool = False
    """DAPO's overlong filtering: a truncated answer is not trained, but it counts in its group's baseline."""
    entropy_coef: NonNegative[float] = 0.0
    """Coefficient of the entropy bonus (in nats) in the objective."""
    allow_uncorrected: bool = False
    """Allow training on stale data without a correction. Such training collapses; for experiments only."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the algorithm's components, such as clip_low and cap. Write "loss.clip_low" if two have
    a key of the same name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _flatten(self.options))
        require(bool(self.filters) or not self.filter_cap, "filter_cap is for filters, and there are none")


def _flatten(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dotted names flattened: TOML without quotes, and --set, parse such names as nested tables."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        made |= (
            {f"{name}.{key}": one for key, one in _flatten(value).items()} if isinstance(value, dict) else {name: value}
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSection:
    channel: str = "auto"
    """Transport of weights from the learner to the workers: a name, or "package.module:Class". auto: nccl if the
    launcher "local" places whole models on GPUs and all engines can receive, files otherwise."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the channel."""
    directory: str = ""
    """Shared folder for weight versions, such as /dev/shm/... on one host; empty: weights/ in the run's folder."""
    keep: Annotated[int, Range(low=2, why=" (one to load while the next is written)")] = 4
    """Number of stored versions to keep. A worker that falls behind skips to a newer version. The channel nccl stores
    only those that somebody reads: evaluated ones, those of checkpoints, the last one."""
    models_every: OrOff[int] = 0
    """Keep every N-th version permanently, as a Hugging Face model in models/INCARNATION-VERSION of the run's folder; 0
    keeps none."""
    quantization: Literal["", "fp8", "fp8_ue8m0", "int4", "int4_group32"] = ""
    """Format in which engines receive the weight matrices of the layers; experimental. fp8: one scale per block of
    128 x 128. fp8_ue8m0: the same with powers of two as scales. int4: routed experts alone, one scale per 128
    numbers of a row (compressed-tensors, W4A16). int4_group32: one per 32, as Kimi-K2-Thinking. Empty: as in
    training."""
    after_write: str = ""
    """"package.module:function" that is called as function(version) in the learner, beside its steps, when a version
    is stored and before engines are told of it: version.uri is its folder (with "objects" its key),
    version.policy_version its number, which may come again after a resume. What it raises ends the learner."""
    every_steps: Positive[int] = 1
    """Steps between published versions, at most the staleness bound + 1 unless nothing is sampled: tokens get up to
    every_steps - 1 versions older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    every_steps: NonNegative[int] = 50
    """Steps between checkpoints; 0: only one at the end."""
    keep: Positive[int] = 2
    """Number of checkpoints to keep. With 1, there is no older checkpoint to resume from if it is damaged."""
    optimizer: bool = True
    """Keep AdamW's moments in checkpoints. false saves 8 bytes a parameter, and a resumed run starts them from 0: it is
    not exact."""
    keep_log: bool = False
    """Keep trained trajectories in the log, for `asyncrl replay`. Otherwise each checkpoint trims what the previous
    checkpoint covers."""
    best: str = ""
    """DATASET/METRIC of an evaluation, such as "aime/mean@8". The model with the best value so far is kept in best/ of
    the run's folder. Empty keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSection:
    """How and where the processes of the run are started."""

    kind: str = "local"
    """Starts the processes of the run: a name, or "package.module:Class"."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All settings of a run. Each field is a section of the run file."""

    model: ModelSection
    data: DataSection
    images: ImagesSection = field(default_factory=ImagesSection)
    run: RunSection = field(default_factory=RunSection)
    bus: BusSection = field(default_factory=BusSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    engine: EngineSection = field(default_factory=EngineSection)
    servers: Mapping[str, ServerSection] = field(default_factory=dict)
    reward: RewardSection = field(default_factory=RewardSection)
    learner: LearnerSection = field(default_factory=LearnerSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    critic: CriticSection | None = None
    reference: ReferenceSection | None = None
    teacher: TeacherSection | None = None
    staleness: StalenessSection = field(default_factory=StalenessSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    launcher: LauncherSection = field(default_factory=LauncherSection)

    def __post_init__(self) -> None:
        self.staleness.check(mode=self.run.mode)
        check_names(self.servers, pools={name: one.workers for name, one in self.rollout.pools.items()})
        self.evaluation.check(best=self.checkpoint.best, workers=self.rollout.workers)
        late = [step for step in self.learner.profile_steps if step > self.run.steps]
        require(not late, f"learner: profile_steps: step {late[:1]} is behind the last, run.steps = {self.run.steps}")
        overlong, longest = self.algorithm.overlong_tokens, self.rollout.max_new_tokens
        require(
            overlong <= longest,
            f"algorithm: overlong_tokens {overlong} is more than rollout.max_new_tokens {longest}: every answer would "
            "be punished",
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
    def model_paths(self) -> dict[str, Path]:
        """Key of the run file -> folder of a model that the learner loads."""
        paths = {"model.path": self.model.path}
        paths |= {"critic.path": self.critic.path} if self.critic else {}
        paths |= {"reference.path": self.reference.path} if self.reference and self.reference.kl_coef else {}
        paths |= {"teacher.path": self.teacher.path} if self.teacher else {}
        return {key: Path(path) for key, path in paths.items() if path}

    @property
    def own_megatron(self) -> dict[str, Mapping[str, Any]]:
        """Key of the run file, such as "critic.path" -> the model's fields of TransformerConfig, if it has its own."""
        models = {"critic": self.critic, "reference": self.reference, "teacher": self.teacher}
        return {f"{name}.path": model.megatron for name, model in models.items() if model and model.megatron}

    def of_pool(self, name: str) -> RunConfig:
        """Return the run as the workers of rollout.pools.NAME see it: with their engine; "" is every other worker."""
        if not name:
            return self
        pool, options = self.rollout.pools[name], dict(self.engine.options)
        for key, value in pool.options.items():
            before = options.get(key)
            both = isinstance(value, Mapping) and isinstance(before, Mapping)
            options[key] = dict(before or {}) | dict(value) if both else value
        engine = replace(self.engine, device=pool.device or self.engine.device, options=options)
        return replace(self, engine=engine)

    @property
    def pool_workers(self) -> dict[str, str]:
        """Name of each worker of a pool -> the pool."""
        pools = self.rollout.pools.items()
        return {f"{name}-{number}": name for name, pool in pools for number in range(pool.workers)}

    @property
    def num_workers(self) -> int:
        """Number of rollout workers that `asyncrl run` starts, those of pools included."""
        return self.rollout.workers + len(self.pool_workers)

    @property
    def started_servers(self) -> dict[str, ServerSection]:
        """Servers that the run starts, by name."""
        return {name: section for name, section in self.servers.items() if section.is_ours}

    @property
    def has_served_teacher(self) -> bool:
        """Whether workers ask a server for the teacher's logprobs of each answer."""
        return self.teacher is not None and self.teacher.is_served

    @property
    def num_evaluation_workers(self) -> int:
        """Number of dedicated evaluation workers that `asyncrl run` starts."""
        dedicated = self.evaluation.is_on and self.evaluation.place == "dedicated"
        return self.evaluation.workers if dedicated else 0

    @property
    def max_staleness(self) -> int:
        """The bound that the mode implies: 0 for sync, 1 for one_step_off, that of [staleness] for async."""
        return {"sync": 0, "one_step_off": 1, "async": self.staleness_bound}[self.run.mode]

    @property
    def staleness_bound(self) -> int:
        """staleness.max_staleness as a number."""
        bound, learner = self.staleness.max_staleness, self.learner
        if bound == "auto":
            adapters = learner.lora.rank > 0
            return bound_for(learner.learning_rate, steps=learner.steps_per_batch, trains_adapters=adapters)
        return bound

    @property
    def why_staleness_bound(self) -> str:
        """What the bound follows, "for learning_rate 1e-06"; "" if the run file or the mode says the bound."""
        if self.run.mode != "async" or self.staleness.max_staleness != "auto":
            return ""
        steps = f" x {self.learner.steps_per_batch} steps" if self.learner.steps_per_batch > 1 else ""
        rate = f"learning_rate {self.learner.learning_rate:g}{steps}"
        return "for adapters" if self.learner.lora.rank > 0 else f"for {rate}"

    @property
    def window(self) -> int:
        """Maximum number of outstanding groups: (max_staleness + 1) x groups_per_batch."""
        return (self.max_staleness + 1) * self.learner.groups_per_batch

    @property
    def load(self) -> str:
        """When a worker loads new weights: rollout.load, or the default for the mode."""
        return self.rollout.load or ("in_flight" if self.run.mode == "async" else "on_demand")

    @property
    def most_trajectory_tokens(self) -> int:
        """Upper bound on the tokens of prompt and answer; of a rollout function whose tools add more text, only with
        rollout.max_context_tokens."""
        return self.rollout.max_context_tokens or self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def largest_prompt_bytes(self) -> int:
        """Upper bound on the size of a prompt group (tokens, text), without its row's label and metadata."""
        return 16 * self.data.max_prompt_tokens + 4096

    @property
    def largest_group_bytes(self) -> int:
        """Upper bound on the size of a trajectory group: 4 B token + 4 B logprob + 1 B mask per token (and 4 B of
        a served teacher), and some overhead. With top_p or top_k also what is left to sample from: an upper bound of
        its mean, at 64 tokens; with top_logprobs 8 B for each token of them."""
        is_cut = self.rollout.top_p < 1 or self.rollout.top_k > 0
        of_support = 4 + 4 * min(self.rollout.top_k or _MEAN_KEPT, _MEAN_KEPT) if is_cut else 0
        of_teacher = 4 + 8 * self.teacher.top_logprobs if self.has_served_teacher and self.teacher else 0
        of_token = 9 + of_teacher + of_support + 8 * self.rollout.top_logprobs
        response = self.rollout.group_size * (of_token * self.rollout.max_new_tokens + 1024)
        return response + 4 * self.data.max_prompt_tokens + 4096
