"""The prompts of a run and of its evaluation: checked without a tokenizer first, then opened with it.

Every row is parsed once. A bad row is reported before torch and transformers are imported, which takes many seconds on
a busy machine. Tests: tests/unit/launch/checks/test_data_rows.py, tests/unit/cli/test_cli.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.config import EvaluationDataset, RewardSection, RolloutSection, RunConfig, plugins
from asyncrl.config.secret_values import hide_secrets
from asyncrl.data import row_files
from asyncrl.data.model_folder import check_model_at
from asyncrl.data.prompts import PromptDataset, PromptRow, open_checked
from asyncrl.data.row_check import SAMPLING, RowLimits, RowReward, message_bytes, value_at
from asyncrl.data.row_images import RowImages
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError
from asyncrl.images.processor import ImageProcessor, Placeholders
from asyncrl.images.store import ImageStore
from asyncrl.logs import print_line
from asyncrl.messages import SamplingParams
from asyncrl.policies.evaluation.questions import EvaluationSet, Question
from asyncrl.policies.evaluation.results import Measured, OwnMetrics, metric_names
from asyncrl.rewards.load import label_check, needs_label, rewards_of_rows

if TYPE_CHECKING:
    from asyncrl.data.sources import Positions

log = logging.getLogger("asyncrl.data")
_LOOKED_AT: Final = 32
"""Prompts that a run looks at before its first step; `asyncrl check` looks at more."""


def index_rows(run: RunConfig) -> Positions:
    """Check every row of the data without tokenising it.

    Raises ConfigError for the first row that cannot be a prompt.
    """
    return open_checked(run.data, seed=run.run.seed, limits=_limits(run))


def num_usable(run: RunConfig, num_rows: int, *, num_too_long: int) -> int:
    """Return how many prompts of an epoch are not known to be too long."""
    is_mixture = any(
        any(file.by_epoch) for file in run.data.files
    )  # a row comes several times in an epoch, or not at all
    return num_rows if is_mixture else num_rows - num_too_long


def require_batch(run: RunConfig, num_rows: int, *, num_too_long: int = 0) -> None:
    """Raise ConfigError if the data ends before the first step."""
    usable = num_usable(run, num_rows, num_too_long=num_too_long)
    if run.data.epochs and usable * run.data.epochs < run.learner.groups_per_batch:
        dropped = f" (of {num_rows}, without those that are too long)" if usable < num_rows else ""
        raise ConfigError(
            f"data.epochs: {usable} rows{dropped} x {run.data.epochs} are no batch of learner.groups_per_batch = "
            f"{run.learner.groups_per_batch}, so nothing would be trained; lower it, or raise data.epochs (0 repeats)"
        )


def open_rows(run: RunConfig, rows: Positions | None = None, *, images: ImageStore | None = None) -> PromptDataset:
    """Open the prompts. ``rows``: result of ``index_rows``; None: read them here. Raises ConfigError.

    images  keeps the images of rows; None: in memory
    """
    limits = _limits(run)
    rows = index_rows(run) if rows is None else rows
    tokenizer = load_tokenizer(Path(run.model.path), trusts_code=run.model.trust_remote_code)
    if rollout_functions.traits(run.rollout.function).samples:
        most = _room_for_prompt(registry.context_tokens(run), run.rollout)
        limits = dataclasses.replace(limits, prompt_tokens=most)
    return PromptDataset.open(
        run.data,
        tokenizer=tokenizer,
        seed=run.run.seed,
        limits=limits,
        rows=rows,
        images=row_images(run, key=run.data.image_key, path=run.data.where, store=images),
    )


def row_images(run: RunConfig, *, key: str, path: str, store: ImageStore | None) -> RowImages | None:
    """Return what reads the images of rows of ``path``; None if the model reads none. Raises ConfigError."""
    if Placeholders.of(Path(run.model.path)) is None:
        return None
    folder = Path(run.images.directory) if run.images.directory else Path(path).parent
    return RowImages(
        processor=ImageProcessor(Path(run.model.path)),
        store=store or ImageStore(),
        section=run.images,
        key=key,
        folder=folder,
    )


def _room_for_prompt(context_tokens: int, section: RolloutSection | EvaluationDataset, max_new_tokens: int = 0) -> int:
    """Return how many tokens a prompt may have: all but those of the longest answer, which max_context_tokens ends."""
    if section.max_context_tokens:
        return min(context_tokens, section.max_context_tokens) - 1
    return context_tokens - (max_new_tokens or section.max_new_tokens)


def say_first_prompts(rows: PromptDataset, sets: Iterable[EvaluationSet], *, of_reward: Iterable[str] = ()) -> None:
    """Print the first prompt as the model sees it, and warn of what is odd about the first prompts and the reward."""
    for line in of_reward:
        log.warning("%s", line)
    try:
        looked = rows.look(_LOOKED_AT if rows.num_rows else 4)  # a user's source may be slow
    except ConfigError:  # of a row that the run may never reach; if it does, the error ends the run
        return
    for title, text in looked.shown:
        print_line(f"{title:14s}  {text}")
    for line in (*looked.oddities, *(line for its in sets for line in its.oddities)):
        log.warning("%s", line)


def open_evaluation_sets(run: RunConfig, *, images: ImageStore | None = None) -> list[EvaluationSet]:
    """Tokenise the data sets of [evaluation]. Raises ConfigError for the first row that cannot be a prompt.

    images  keeps the images of rows; None: in memory
    """
    model = check_model_at("model.path", Path(run.model.path))
    tokenizer = load_tokenizer(Path(run.model.path), trusts_code=run.model.trust_remote_code)
    sets = []
    for dataset in run.evaluation.datasets:
        reward = dataset.reward or run.reward
        opened = open_set(
            dataset,
            tokenizer=tokenizer,
            max_new_tokens=run.rollout.max_new_tokens,
            context_tokens=registry.context_tokens(run),
            vocabulary=model.vocab_size,
            limits=dataclasses.replace(_limits_of_set(run, reward), end_tokens=model.end_tokens),
            images=row_images(run, key=dataset.image_key, path=dataset.path, store=images),
        )
        parts = {name: dataclasses.asdict(part) for name, part in sorted(reward.parts.items())}
        more = [*([hide_secrets(parts)] if parts else []), *([] if reward.keep_special_tokens else ["plain"])]
        judge = repr((reward.kind, sorted(hide_secrets(reward.options).items()), *more))
        sets.append(dataclasses.replace(opened, judge=judge))
    require_metric(run.checkpoint.best, sets)
    require_space(
        sets,
        log_bytes=run.bus.max_log_bytes,
        num_recorded=run.metrics.samples_per_evaluation,
        turn_tokens=0 if rollout_functions.gives_one(run, of_evaluation=True) else model.context_tokens,
    )
    return sets


def check_evaluation_rows(run: RunConfig) -> None:
    """Check every row of the data sets of [evaluation] without tokenising it. Raises ConfigError."""
    for dataset in run.evaluation.datasets:
        check_rows(dataset, limits=_limits_of_set(run, dataset.reward or run.reward))


def _limits_of_set(run: RunConfig, reward: RewardSection) -> RowLimits:
    return row_limits(
        row_bytes=run.bus.max_message_bytes // 2,
        labelled_for=reward.kind if needs_label(reward) else "",
        check_label=label_check(reward),
        keeps_messages=_keeps_messages(run),
        reads_images=Placeholders.of(Path(run.model.path)) is not None,
    )


def _limits(run: RunConfig) -> RowLimits:
    model = check_model_at("model.path", Path(run.model.path))
    rewards = {}
    if run.data.reward_key:
        rewards = {
            name: RowReward(needs_label=needs_label(one), check_label=label_check(one))
            for name, one in rewards_of_rows(run.reward).items()
        }
    return RowLimits(
        prompt_tokens=model.context_tokens,
        row_bytes=run.bus.max_message_bytes - run.largest_prompt_bytes,
        labelled_for=run.reward.kind if needs_label(run.reward) else "",
        check_label=label_check(run.reward),
        rewards=rewards,
        sampling={name: _as_toml(getattr(run.rollout, name)) for name in (*SAMPLING, "ignore_eos", "top_logprobs")},
        vocabulary=model.vocab_size,
        end_tokens=model.end_tokens,
        keeps_messages=_keeps_messages(run),
        reads_images=Placeholders.of(Path(run.model.path)) is not None,
        teacher=run.teacher.server if run.teacher else "",
        teacher_key=run.teacher.key if run.teacher else "",
        teachers=frozenset(run.servers),
    )


def _keeps_messages(run: RunConfig) -> bool:
    """Whether the rollout function may use messages; functions that return one trajectory use only tokens."""
    return not rollout_functions.gives_one(run, of_evaluation=True)


def _as_toml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# -- data sets of an evaluation ----------------------------------------------------------------------------------------

_ANY: Final = 2**31
ANSWER_BYTES: Final = 512
"""Size of an answer in the log: a vote of 64 characters and some numbers. Each prompt takes the same again."""
TOKEN_BYTES: Final = 9
"""Size of each token of an answer that is recorded whole: the token, its logprob, and whether the policy sampled it."""
PROMPT_TOKEN_BYTES: Final = 4
"""Size of each token of a prompt that is recorded with its answers."""


def row_limits(*, row_bytes: int, labelled_for: str, keeps_messages: bool = False, **more: Any) -> RowLimits:
    """Return RowLimits without a limit on the prompt length; ``open_set`` refuses prompts that are too long."""
    return RowLimits(
        prompt_tokens=_ANY,
        row_bytes=row_bytes,
        labelled_for=labelled_for,
        keys="",
        keeps_messages=keeps_messages,
        **more,
    )


def check_rows(dataset: EvaluationDataset, *, limits: RowLimits) -> None:
    """Check every row and its tags without a tokenizer.

    Raises ConfigError for the first row that cannot be a prompt.
    """
    try:
        num_rows = open_checked(_section(dataset), seed=0, limits=limits).num_rows
        _tags(dataset, min(num_rows, dataset.limit or num_rows))
    except ConfigError as error:
        raise ConfigError(f"evaluation.datasets: {dataset.name}: {error}") from None


def open_set(
    dataset: EvaluationDataset,
    *,
    tokenizer: Any,
    max_new_tokens: int,
    context_tokens: int,
    vocabulary: int,
    limits: RowLimits,
    images: RowImages | None = None,
) -> EvaluationSet:
    """Read and tokenise a data set. Raises ConfigError for the first row that cannot be a prompt.

    max_new_tokens  limit for an answer if the data set has none
    context_tokens  tokens that a prompt and its answer may have together in the engine
    vocabulary      vocabulary size of the model
    limits          limits of its rows, from ``row_limits``
    images          reads the images of rows; None: the model reads none
    """
    max_new_tokens = dataset.max_new_tokens or max_new_tokens
    most = _room_for_prompt(context_tokens, dataset, max_new_tokens)
    where = f"evaluation.datasets: {dataset.name}"
    if most < 1:
        raise ConfigError(
            f"{where}: {max_new_tokens:,} new tokens leave no room for a prompt in the engine's context of "
            f"{context_tokens:,} tokens; use fewer"
        )
    if dataset.min_new_tokens > max_new_tokens:
        raise ConfigError(
            f"{where}: min_new_tokens = {dataset.min_new_tokens:,} is over rollout.max_new_tokens "
            f"({max_new_tokens:,}), which holds where the data set has no max_new_tokens; give it one"
        )
    if unknown := [token for token in dataset.stop_token_ids if token >= vocabulary]:
        raise ConfigError(f"{where}: stop_token_ids: {unknown[0]} is not a token of the model's {vocabulary:,}")
    message_bytes(dataset.metadata, f"{where}: metadata")
    try:
        ends = {"stop": dataset.stop, "stop_token_ids": dataset.stop_token_ids}
        limits = dataclasses.replace(limits, sampling=ends)
        prompts = PromptDataset.open(_section(dataset), tokenizer=tokenizer, seed=0, limits=limits, images=images)
        count = min(prompts.num_rows, dataset.limit or prompts.num_rows)
        rows = [_whole(prompts.at(index), index, dataset, most) for index in range(count)]
        tags = _tags(dataset, count)
        looked = prompts.look(min(count, _LOOKED_AT))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return EvaluationSet(
        name=dataset.name,
        questions=[
            Question(
                prompt=row.prompt,
                tokens=row.tokens,
                label=row.label,
                metadata=row.metadata | dict(dataset.metadata),
                tags=its,
                messages=row.messages,
                images=row.images,
            )
            for row, its in zip(rows, tags, strict=True)
        ],
        sampling=_sampling(dataset, max_new_tokens=max_new_tokens),
        measured=Measured(
            num_prompts=count,
            num_samples=dataset.samples,
            k=dataset.k,
            solved_at=dataset.solved_at,
            has_labels=all(row.label is not None for row in rows),
            tags=Counter(tag for one in tags for tag in one),
            own=_own_metrics(dataset, where) if dataset.metrics else None,
        ),
        oddities=tuple(f"{where}: {line}" for line in looked.oddities),
    )


def _own_metrics(dataset: EvaluationDataset, where: str) -> OwnMetrics:
    found: OwnMetrics = plugins.load(dataset.metrics, where=f"{where}: metrics")
    plugins.check_call(found, ("answered",), wanted=f"{where}: metrics: {dataset.metrics!r} must take (answered)")
    return found


def _section(dataset: EvaluationDataset) -> config.DataSection:
    return config.DataSection(
        path=dataset.path,
        prompt_key=dataset.prompt_key,
        image_key=dataset.image_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        metadata_columns=dataset.metadata_columns,
        tools_key=dataset.tools_key,
        chat_template=dataset.chat_template,
        chat_template_options=dataset.chat_template_options,
        system_prompt=dataset.system_prompt,
        shuffle=False,
        epochs=1,
        max_prompt_tokens=_ANY,  # ``open_set`` refuses longer prompts
    )


def _whole(row: PromptRow | None, index: int, dataset: EvaluationDataset, most: int) -> PromptRow:
    """Check the length of a prompt.  most: tokens that the model's context has for a prompt"""
    assert row is not None, "one epoch has every row"
    if row.problem:
        raise ConfigError(f"{row.problem}; an evaluation leaves no prompt out")
    own = dataset.max_prompt_tokens
    if len(row.tokens) > min(most, own or most):
        limit = (
            f"max_prompt_tokens = {own:,}" if 0 < own <= most else f"the {most:,} that an answer leaves of the context"
        )
        raise ConfigError(
            f"prompt {index + 1} has {len(row.tokens):,} tokens, more than {limit}, and an evaluation leaves none out; "
            "shorten it, or allow " + ("more" if 0 < own <= most else "fewer new tokens")
        )
    return row


def _sampling(dataset: EvaluationDataset, *, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
        min_new_tokens=dataset.min_new_tokens,
        stop=dataset.stop,
        stop_token_ids=dataset.stop_token_ids,
        repetition_penalty=dataset.repetition_penalty,
        presence_penalty=dataset.presence_penalty,
        frequency_penalty=dataset.frequency_penalty,
        max_context_tokens=dataset.max_context_tokens,
        is_trained=False,
    )


def _tags(dataset: EvaluationDataset, count: int) -> tuple[tuple[str, ...], ...]:
    if not dataset.tag_key:
        return ((),) * count
    rows = row_files.open_rows(Path(dataset.path), check=lambda row, where: None)
    values = ((value_at(rows.row(index), dataset.tag_key), rows.where(index)) for index in range(count))
    tags = tuple(_row_tags(value, where, dataset) for value, where in values)
    if count and not any(tags):
        keys = ", ".join(sorted(rows.row(0)))
        raise ConfigError(f"tag_key = {dataset.tag_key!r}: no prompt has such a tag; the first row has: {keys}")
    return tags


def _row_tags(value: Any, where: str, dataset: EvaluationDataset) -> tuple[str, ...]:
    tags: Sequence[Any] = [value] if isinstance(value, str) else value or []
    if not isinstance(tags, list | tuple) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError(f"{where}: {dataset.tag_key!r} must be a tag or a list of tags, got {value!r}")
    return tuple(dict.fromkeys(tag.replace("/", "-") for tag in tags))


def require_metric(best: str, sets: Iterable[EvaluationSet]) -> None:
    """Raise ConfigError if rows lack the labels for the metric of ``checkpoint.best``, because no model would be kept.

    best  DATASET/METRIC, a metric that the data set would have with labels; "" for none
    """
    name, _, metric = best.partition("/")
    for its in sets:
        measured = its.measured
        known = metric_names(measured.num_samples, k=measured.k, has_labels=measured.has_labels)
        if its.name == name and metric not in known:
            first = next(number for number, one in enumerate(its.questions, 1) if one.label is None)
            raise ConfigError(
                f"checkpoint.best: {best} needs a label in every row of evaluation.datasets {name}, and prompt {first} "
                f"has none (label_key); label it, or name one of {', '.join(known)}"
            )


def require_space(
    sets: Iterable[EvaluationSet], *, log_bytes: int, num_recorded: int = 0, turn_tokens: int = 0
) -> None:
    """Raise ConfigError if the answers do not fit into their log, which is trimmed when the next evaluation begins.

    log_bytes     bus.max_log_bytes, which also limits that log
    num_recorded  prompts of each data set whose answers are recorded whole
    turn_tokens   maximum tokens of an answer with all its turns, including tool output; 0: it has one turn
    """
    counted, whole = 0, 0
    for its in sets:
        samples, prompts = its.measured.num_samples, its.measured.num_prompts
        counted += ANSWER_BYTES * (1 + samples) * prompts
        longest = max((len(one.tokens) for one in its.questions), default=0)
        of_prompt = TOKEN_BYTES * max(its.sampling.max_new_tokens, turn_tokens) * samples + PROMPT_TOKEN_BYTES * longest
        whole += of_prompt * min(prompts, num_recorded)
    if counted + whole > log_bytes:
        lower = "limit or samples" if counted > log_bytes else "metrics.samples_per_evaluation"
        raise ConfigError(
            f"evaluation.datasets: their answers may take {counted + whole:,} bytes, over bus.max_log_bytes "
            f"({log_bytes:,}): a full log would stop the evaluation; raise it, or lower {lower}"
        )
