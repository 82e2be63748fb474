"""[evaluation] of the run file: which data sets evaluate the model during training, how often, and on which engines.

[evaluation]
every_steps = 20
[[evaluation.datasets]]
name = "aime"
path = "aime.jsonl"
samples = 8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from asyncrl.config.checks import (
    MOST_STOPS,
    MOST_WORKERS,
    NonNegative,
    OrNoLimit,
    OrOff,
    Positive,
    PositiveShare,
    Range,
    require,
)
from asyncrl.config.data import require_template
from asyncrl.config.reward import RewardSection


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDataset:
    """One entry of [[evaluation.datasets]]."""

    name: str
    """Name in metrics: letters, digits, - and _."""
    path: str
    """JSONL or Parquet file with one prompt per row, as data.path."""
    prompt_key: str = "prompt"
    """As data.prompt_key."""
    label_key: str = "label"
    """As data.label_key."""
    metadata_key: str = "metadata"
    """As data.metadata_key."""
    metadata_columns: tuple[str, ...] = ()
    """As data.metadata_columns."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Added to the metadata of every row; takes precedence over the row's own values."""
    tools_key: str = ""
    """As data.tools_key."""
    image_key: str = ""
    """As data.image_key."""
    tag_key: str = ""
    """Column with a tag or a list of tags, or a key in a column's table: "metadata.topic". Every metric is also
    reported for the prompts of each tag."""
    chat_template: bool = False
    """As data.chat_template."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    """As data.chat_template_options."""
    system_prompt: str = ""
    """As data.system_prompt."""
    limit: NonNegative[int] = 0
    """Evaluate only the first prompts, up to this number; 0: all."""
    max_prompt_tokens: NonNegative[int] = 0
    """Maximum prompt length. A longer prompt is refused, not skipped: an evaluation covers every prompt. 0: what
    max_new_tokens leaves of the engine's context."""
    samples: Positive[int] = 1
    """Number of answers per prompt, n."""
    k: tuple[int, ...] = ()
    """Values of k for pass@k and pass^k; empty: 1, 2, 4, ... and n."""
    solved_at: float = 1.0
    """An answer with at least this reward counts as solved in pass@k, pass^k and majority@n."""
    max_new_tokens: NonNegative[int] = 0
    """Maximum length of an answer, in tokens; 0: rollout.max_new_tokens."""
    temperature: NonNegative[float] = 1.0
    """Sampling temperature. 0: always the likeliest token; then one answer per prompt is enough."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative[int] = 0
    """Top-k sampling; 0 is off."""
    max_context_tokens: NonNegative[int] = 0
    """As rollout.max_context_tokens."""
    min_new_tokens: NonNegative[int] = 0
    """As rollout.min_new_tokens."""
    stop: tuple[str, ...] = ()
    """As rollout.stop."""
    stop_token_ids: tuple[int, ...] = ()
    """As rollout.stop_token_ids."""
    repetition_penalty: Annotated[float, Range(low=0, high=2, is_open=True)] = 1.0
    """Penalty for repeated tokens; 1 is off. Only here, because evaluation answers are not trained."""
    presence_penalty: Annotated[float, Range(low=-2, high=2)] = 0.0
    """Penalty for tokens that are already present; 0 is off."""
    frequency_penalty: Annotated[float, Range(low=-2, high=2)] = 0.0
    """Penalty for tokens by how often they occurred; 0 is off."""
    metrics: str = ""
    """"package.module:function" of your own that takes all answers (Answered of policies/evaluation/results.py) and
    returns further metrics, {"NAME": number}; empty: none."""
    function: str = ""
    """Rollout function of this data set, as rollout.function; empty: that one."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of ``function``, as rollout.options."""
    reward: RewardSection | None = None
    """Reward of this data set, a table like [reward]; absent: [reward] of the run."""

    def __post_init__(self) -> None:
        plain = self.name.replace("-", "").replace("_", "")
        require(plain.isascii() and plain.isalnum(), f"name must be letters, digits, - and _, got {self.name!r}")
        require(
            not self.max_new_tokens or self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must be <= max_new_tokens ({self.max_new_tokens}), got {self.min_new_tokens}",
        )
        require(
            all(0 <= token < 2**31 for token in self.stop_token_ids),
            f"stop_token_ids must be token ids, >= 0, got {list(self.stop_token_ids)}",
        )
        require(all(self.stop), "stop holds an empty text, which every answer contains")
        require(len(self.stop) <= MOST_STOPS, f"stop may hold {MOST_STOPS} texts, got {len(self.stop)}")
        for k in self.k:
            require(k >= 1, f"k = {k}: pass@k counts from k = 1")
            require(
                k <= self.samples,
                f"k = {k}: pass@k needs k answers to a prompt, and samples = {self.samples}; raise samples or lower k",
            )
            require(self.k.count(k) == 1, f"k = {k} is there twice")
        require_template(self, "chat_template_options", "tools_key", "system_prompt")
        require(
            self.temperature > 0 or self.samples == 1,
            f"temperature = 0 gives the same answer every time: samples = {self.samples} would tell nothing more; "
            "use samples = 1 or a temperature",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSection:
    """When and where the data sets are evaluated. Without ``datasets`` nothing is evaluated."""

    every_steps: OrOff[int] = 0
    """Steps between evaluations; 0: only ``at_start`` and ``at_end``."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step; the run ends when the evaluation is done."""
    place: Literal["shared", "dedicated", "folder"] = "shared"
    """Engines that answer. shared: some of the rollout workers, at most ``share`` of them. dedicated: separate workers,
    as many as ``workers``. folder: none; the run only keeps its models for `asyncrl evaluate RUN_DIR`."""
    share: float = 0.25
    """shared: maximum share of the rollout workers that may keep an older version for an evaluation. If it amounts to
    less than one worker, one worker is used, and `asyncrl check` warns."""
    workers: int = 1
    """dedicated: number of workers that `asyncrl run` starts only for evaluations."""
    gpus: tuple[int, ...] = ()
    """dedicated: GPUs for these workers; empty: the GPUs after those of the rollout workers."""
    timeout_seconds: OrNoLimit[float] = 3600.0
    """An evaluation that takes longer is reported as incomplete; 0: no limit."""
    enough: PositiveShare = 1.0
    """Share of all prompts whose answers end an evaluation. Below 1 it is reported as incomplete, and its means leave
    the slowest prompts out, which are usually those with the longest answers. `asyncrl evaluate` takes them all."""
    datasets: tuple[EvaluationDataset, ...] = ()
    """The data sets: one table [[evaluation.datasets]] each."""

    def __post_init__(self) -> None:
        names = [dataset.name for dataset in self.datasets]
        for name in names:
            require(names.count(name) == 1, f"datasets: two are called {name!r}; metrics need a name for each")
            twins = [other for other in names if other.lower() == name.lower()]
            require(
                len(twins) == 1,
                f"datasets: {' and '.join(map(repr, twins))} differ in case alone, which some disks and dashboards "
                "do not tell apart; rename one",
            )

    def check(self, *, best: str, workers: int) -> None:
        """Check the settings that depend on other sections. Raises ConfigError.

        best     checkpoint.best
        workers  rollout.workers
        """
        dataset, _, metric = best.partition("/")
        require(
            not best or (bool(metric) and any(one.name == dataset for one in self.datasets)),
            f"checkpoint: best = {best!r}: write DATASET/METRIC; evaluation.datasets are "
            f"{', '.join(one.name for one in self.datasets) or 'none'}",
        )
        require(
            not best or self.enough == 1,
            f"checkpoint: best compares complete evaluations, and evaluation.enough = {self.enough:g} leaves prompts "
            "out; use enough = 1",
        )
        if not self.datasets:
            require(not self.every_steps, "evaluation: every_steps without [[evaluation.datasets]]; name one")
            return
        require(
            self.place == "folder" or self.every_steps > 0 or self.at_start or self.at_end,
            "evaluation: every_steps, at_start and at_end are all off, so nothing is evaluated; set one of them, or "
            'place = "folder"',
        )
        require(
            self.place != "shared" or self.share > 0,
            f"evaluation: share = {self.share:g} leaves no engine to evaluate on; use more than 0 and at most 1, or "
            'place = "dedicated" or "folder"',
        )
        require(
            self.place != "shared" or self.share <= 1,
            f"evaluation: share = {self.share:g} is more than all rollout workers; use at most 1",
        )
        require(
            self.place != "dedicated" or self.workers > 0,
            f'evaluation: place = "dedicated" with workers = {self.workers} leaves no engine to evaluate on; use 1 or '
            "more",
        )
        require(
            self.workers <= MOST_WORKERS,
            f"evaluation: workers must be at most {MOST_WORKERS} (a nats-server takes no more connections), got "
            f"{self.workers}",
        )
        require(
            not best or self.place != "folder",
            'checkpoint: best needs results during the run, which place = "folder" leaves to others; use another place',
        )

    @property
    def is_on(self) -> bool:
        """Whether the run itself evaluates."""
        return bool(self.datasets) and self.place != "folder"

    def is_due(self, *, before: int, now: int) -> bool:
        """Whether to evaluate version ``now``, if the previously stored version is ``before`` (-1: none)."""
        if not self.datasets:
            return False
        if now == 0:
            return self.at_start and before < 0
        return bool(self.every_steps) and now // self.every_steps > max(before, 0) // self.every_steps

    def dataset(self, name: str) -> EvaluationDataset | None:
        return next((dataset for dataset in self.datasets if dataset.name == name), None)
