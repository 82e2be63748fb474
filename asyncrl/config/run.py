"""The run file: one TOML file per run, one frozen dataclass per section, every key with its default and meaning.

Derived values are properties with their formula, not keys. Options of adapters ([engine.options], [learner.options],
...) are dataclasses beside their adapters. The texts under the keys become docs/reference/configuration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.config.bus import BusSection
from asyncrl.config.checks import MOST_WORKERS, positive, require
from asyncrl.config.curriculum import CurriculumSection
from asyncrl.config.data import DataSection
from asyncrl.config.evaluation import EvaluationSection
from asyncrl.config.launcher import LauncherSection
from asyncrl.config.learner import LearnerSection
from asyncrl.config.metrics import MetricsSection
from asyncrl.config.models import CriticSection, ReferenceSection, TeacherSection
from asyncrl.config.reward import RewardSection
from asyncrl.config.staleness import StalenessSection

_LONGEST_NAME: Final = 128
_MOST_STOPS: Final = 32
"""SGLang's limit."""

Mode = Literal["sync", "one_step_off", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    name: str = "run"
    """Name of the run on the bus and in W&B: letters, digits, - and _. Two runs on one bus need different names."""
    directory: str = "runs"
    """The run's files are in DIRECTORY/NAME: logs, metrics, weights, checkpoints, the bus's store."""
    seed: int = 0
    """Of the order of the data and of sampling."""
    steps: int = 100
    """Batches to train. Step n trains one and makes policy version n."""
    mode: Mode = "async"
    """sync: generate, train, load, repeat. one_step_off: generate the next batch while training. async: no barrier."""
    colocated: bool = False
    """Learner and engines take turns on the same GPUs of one machine, and each moves its memory to the host meanwhile.
    For sync and one_step_off; needs torch-memory-saver beside SGLang."""
    restarts: int = 3
    """Restarts of each process by `asyncrl run` before it ends the run. The count starts again when a process has
    worked for ten minutes."""
    stall_seconds: float = 60.0
    """`asyncrl run` restarts a process that sends no heartbeat for this long, or that is stuck for this long and for
    ten times its usual wait."""

    def __post_init__(self) -> None:
        plain = self.name.replace("-", "").replace("_", "")
        require(plain.isascii() and plain.isalnum(), f"name must be letters, digits, - and _, got {self.name!r}")
        require(
            len(self.name) <= _LONGEST_NAME, f"name must have at most {_LONGEST_NAME} characters, got {len(self.name)}"
        )
        positive(self, "steps")
        require(self.stall_seconds >= 1, f"stall_seconds must be >= 1, got {self.stall_seconds}")
        require(self.restarts >= 0, f"restarts must be >= 0, got {self.restarts}")
        require(self.seed >= 0, f"seed must be >= 0, got {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    path: str
    """Hugging Face folder (config.json, *.safetensors, tokenizer.json). `asyncrl import-model` makes one from a GGUF
    file or a folder in FP8."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the learner and in engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    workers: int = 1
    """Rollout workers that `asyncrl run` starts. More can join at any time."""
    most_workers: int = 0
    """The run starts more workers itself, up to so many, while engines are busy and the learner waits, and lets them go
    (down to ``workers``) while the learner is busy and engines wait or their answers get too old. 0: as many as
    ``workers``. `asyncrl scale` still counts; a number outside of these stays."""
    gpus: tuple[int, ...] = ()
    """GPUs for these workers, dealt round-robin; empty takes those after the learner's."""
    group_size: int = 8
    """Samples per prompt."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """Divides the logits, in the behavior logprobs too."""
    top_p: float = 1.0
    """Nucleus sampling; 1 is off. Engines refuse it if their logprobs are not those of the truncated distribution."""
    top_k: int = 0
    """Top-k sampling, refused like top_p; 0 is off."""
    ignore_eos: bool = False
    """Sample max_new_tokens tokens even after <eos>; for benchmarks."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer. What the engine sampled is trained: the answer holds the text, to the end of the token
    that completes it, and so does the reward's sample.completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, besides the model's end tokens; they are in the answer, too."""
    min_new_tokens: int = 0
    """An answer's first tokens, as many as this, are no end token and not of stop_token_ids. Their logprobs are of the
    distribution without those, so the trainer's are lower by -ln(1 - p(end)). A text of ``stop`` ends shorter answers,
    too."""
    max_running: int = 128
    """Samples in progress per worker. A worker takes another prompt group while it has fewer."""
    max_attempts: int = 3
    """A group that failed this many times is marked as failed: counted, reported, never trained."""
    partial_save_seconds: float = 3.0
    """Seconds between saves of partial rollouts to the bus, from which another worker resumes them if this one dies
    (except on their last attempt); 0 disables."""
    function: str = "single_turn"
    """Makes a trajectory of a prompt: a name, or "package.module:function" of a function or class of your own (several
    turns, tools)."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of a rollout class, as in its Options dataclass."""
    timeout_seconds: float = 0.0
    """Limit of a rollout function for one sample, without the time that it waits for the engine. A group with a sample
    that takes longer fails; 0 is no limit."""
    min_group: int = 0
    """Fewest samples of a group that is trained without those whose rollout function failed or took too long; they are
    counted (staleness/failed_samples). 0: a sample that fails fails its group."""
    extra_samples: int = 0
    """Samples that are begun of each group besides group_size. The first group_size that finish make the group, the
    others are cancelled: the longest, so lengths are biased (rollout/extra_samples counts them)."""
    group_seconds: float = 0.0
    """Deadline of a group: so long after it was begun it goes with the samples that are finished, ``min_group`` or
    more, and the others are cancelled and counted (staleness/cancelled). 0 is none."""
    reissue_seconds: float = 60.0
    """Once no group was answered for this long and every worker waits for prompts, those that are outstanding are
    issued again, and again each time as long passes; the first answer counts. While others are at work, those that have
    taken four times the median of the last 64 are; without load = "in_flight", four times as long as nine of ten. 0:
    never."""
    max_parts: int = 0
    """Trajectories that a rollout function may give for one rollout; a group with more in one fails. 0 is no limit."""
    routing_replay: Literal["auto", "on", "off"] = "auto"
    """Mixtures of experts: the learner sends each token to the experts that the engine sent it to, which travel with
    the answers (layers x experts per token bytes a token). auto: where the model has experts, the engine tells of them,
    the backend replays them, algorithm.correction is not "none", and a group fits into a message; on: also one that is
    stored in pieces."""
    load: Literal["", "in_flight", "drain", "on_demand"] = ""
    """When a worker loads new weights. in_flight (default of async): at once, between two tokens. drain: after its
    running samples. on_demand (default of sync and one_step_off): when a prompt asks for them. Empty: the default of
    run.mode."""

    def __post_init__(self) -> None:
        positive(self, "group_size", "max_new_tokens", "max_running", "max_attempts")
        require(
            1e-3 <= self.temperature <= 1e3,
            f"temperature must be in 0.001..1000 (logits divided by it are float32), got {self.temperature:g}",
        )
        require(
            self.partial_save_seconds == 0 or self.partial_save_seconds >= 0.01,
            f"partial_save_seconds must be >= 0.01, or 0 (off), got {self.partial_save_seconds:g}",
        )
        require(
            self.min_group == 0 or 2 <= self.min_group <= self.group_size,
            f"min_group must be 0 (a sample that fails fails its group), or from 2 (one answer has nothing to compare "
            f"with) to group_size ({self.group_size}), got {self.min_group}",
        )
        require(self.extra_samples >= 0, f"extra_samples must be >= 0, got {self.extra_samples}")
        require(self.group_seconds >= 0, f"group_seconds must be >= 0 (0 is no deadline), got {self.group_seconds}")
        require(
            not self.group_seconds or self.min_group > 0,
            "group_seconds lets a group go with the samples that are finished: min_group must say how many at least",
        )
        require(self.timeout_seconds >= 0, f"timeout_seconds must be >= 0 (0 is no limit), got {self.timeout_seconds}")
        require(
            self.reissue_seconds == 0 or self.reissue_seconds >= 1,
            f"reissue_seconds must be >= 1, or 0 (never), got {self.reissue_seconds:g}",
        )
        require(self.max_parts >= 0, f"max_parts must be >= 0 (0 is no limit), got {self.max_parts}")
        require(
            0 <= self.workers <= MOST_WORKERS,
            f"workers must be in 0..{MOST_WORKERS} (a nats-server takes no more connections), got {self.workers}",
        )
        require(
            self.most_workers == 0 or self.workers <= self.most_workers <= MOST_WORKERS,
            f"most_workers must be 0 (as many as workers) or in {self.workers}..{MOST_WORKERS}, got "
            f"{self.most_workers}",
        )
        require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= 0, f"top_k must be >= 0 (0 is off), got {self.top_k}")
        require(all(self.stop), "stop holds an empty text, which every answer contains")
        require(len(self.stop) <= _MOST_STOPS, f"stop may hold {_MOST_STOPS} texts, got {len(self.stop)}")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be >= 0 and <= max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}",
        )
        require(
            not (self.ignore_eos and (self.stop or self.stop_token_ids or self.min_new_tokens)),
            "ignore_eos samples max_new_tokens tokens: it goes with no stop, stop_token_ids or min_new_tokens",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSection:
    kind: str = "sglang"
    """Samples from the model: a name, or "package.module:Class"."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    name: str = "grpo"
    """A row of policies/algorithms/table.py, or "package.module:SPEC"."""
    advantage: str = ""
    """A row of policies/advantages/table.py, or "package.module:Class"; empty takes the algorithm's own."""
    loss: str = ""
    """A row of policies/losses/table.py, or "package.module:Class"; empty takes the algorithm's own."""
    aggregation: str = ""
    """A row of policies/losses/aggregation.py, or "package.module:Class"; empty takes the algorithm's own."""
    correction: str = ""
    """Off-policy correction, rows of policies/corrections/table.py: "tis_token", "tis_token + geo_mask", "none"."""
    denominator: Literal["before", "after"] = "before"
    """Whether tokens that the correction rejects count in the mean: before or after rejection."""
    filters: tuple[str, ...] = ()
    """Groups not worth training are released and others generated in their place: names, or
    "package.module:function" of a TrajectoryGroup, True to keep."""
    filter_cap: int = 0
    """Groups that the filters pass over between two steps, at most; what more of them means, filter_cap_action says. 0:
    only 1,000 groups in a row, or 20 windows if that is more, end the run."""
    filter_cap_action: Literal["end", "keep"] = "end"
    """At the cap: end the run with the reason, or train what the filters would pass over until the step has its groups
    (staleness/kept_at_cap counts them)."""
    overlong_tokens: int = 0
    """DAPO's soft punishment: over this many tokens before max_new_tokens the reward falls by overlong_factor."""
    overlong_factor: float = 1.0
    """How far the reward has fallen at max_new_tokens."""
    overlong_floor: bool = True
    """Stop falling at max_new_tokens (the paper); false lets answers of several turns fall further (verl, AReaL)."""
    mask_truncated: bool = False
    """DAPO's overlong filtering: an answer that was cut off trains nothing; in its group's baseline it counts."""
    entropy_coef: float = 0.0
    """Entropy in nats, times this, is added to the objective."""
    allow_uncorrected: bool = False
    """Train stale data as if it were fresh. It collapses; for experiments only."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of its parts, such as clip_low and cap; "loss.clip_low" where two parts have one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", _joined(self.options))
        for name in ("entropy_coef", "overlong_tokens", "overlong_factor", "filter_cap"):
            require(getattr(self, name) >= 0, f"{name} must be >= 0, got {getattr(self, name)}")
        require(bool(self.filters) or not self.filter_cap, "filter_cap is for filters, and there are none")


def _joined(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a dot in their name, which TOML without quotes and --set read as tables."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        made |= (
            {f"{name}.{key}": one for key, one in _joined(value).items()} if isinstance(value, dict) else {name: value}
        )
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSection:
    channel: str = "files"
    """Carries weights from the learner to the workers: a name, or "package.module:Class"."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the channel."""
    directory: str = ""
    """Shared folder for weight versions, such as /dev/shm/... on one host; empty is weights/ in the run's folder."""
    keep: int = 4
    """Versions kept. A slower worker skips to a newer one."""
    models_every: int = 0
    """Keep every N-th version permanently, as a Hugging Face model in models/INCARNATION-VERSION of the run's folder; 0
    keeps none."""
    quantization: Literal["", "fp8"] = ""
    """fp8: engines get the matrices of layers in 8 bits, in blocks of 128 x 128 with a scale each; experimental. Empty:
    as they are trained."""
    every_steps: int = 1
    """Steps between published versions. More than 1 only with rollout.function = "given"."""

    def __post_init__(self) -> None:
        positive(self, "every_steps")
        require(self.models_every >= 0, f"models_every must be >= 0 (0 keeps none), got {self.models_every}")
        require(self.keep >= 2, f"keep must be >= 2 (one to load while the next is written), got {self.keep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    every_steps: int = 50
    """Steps between checkpoints; 0 writes one at the end only."""
    keep: int = 2
    """Checkpoints kept; with 1 there is none to go on from when that one is damaged."""
    keep_log: bool = False
    """Keep trained trajectories in the log, for `asyncrl replay`; else a checkpoint trims what the one before has."""
    best: str = ""
    """DATASET/METRIC of an evaluation, such as "aime/mean@8": the model that was best by it so far is kept in best/ of
    the run's folder. Empty keeps none."""

    def __post_init__(self) -> None:
        require(self.every_steps >= 0, f"every_steps must be >= 0, got {self.every_steps}")
        positive(self, "keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything one run is. Sections are keys of the run file's tables."""

    model: ModelSection
    data: DataSection
    run: RunSection = field(default_factory=RunSection)
    bus: BusSection = field(default_factory=BusSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    engine: EngineSection = field(default_factory=EngineSection)
    reward: RewardSection = field(default_factory=RewardSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
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
        self.staleness.check(mode=self.run.mode, group_size=self.rollout.group_size)
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
    def num_evaluation_workers(self) -> int:
        """Workers that `asyncrl run` starts for evaluations alone."""
        dedicated = self.evaluation.is_on and self.evaluation.place == "dedicated"
        return self.evaluation.workers if dedicated else 0

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
    def largest_prompt_bytes(self) -> int:
        """Upper bound of a prompt group without its row's label and metadata: its tokens and text."""
        return 16 * self.data.max_prompt_tokens + 4096

    @property
    def largest_group_bytes(self) -> int:
        """Upper bound of one trajectory group: 4 B token + 4 B logprob + 1 B mask, and some overhead."""
        response = self.rollout.group_size * (9 * self.rollout.max_new_tokens + 1024)
        return response + 4 * self.data.max_prompt_tokens + 4096
