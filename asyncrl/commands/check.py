"""What a run file means, and whether it can work: said before anything starts.

Raises ConfigError, one line that says what to change. Loads no weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import app, auxiliary, plugins, rollout_functions
from asyncrl.config import RunConfig
from asyncrl.config.addresses import without_secrets
from asyncrl.data.model_folder import ModelFolder, check_model_at
from asyncrl.engines.sglang_server import check_dtype
from asyncrl.errors import ConfigError
from asyncrl.placement import Placement, place

if TYPE_CHECKING:
    from asyncrl.policies.algorithms import Algorithm
    from asyncrl.policies.catalogue import Advantage, Aggregation, Loss
    from asyncrl.policies.correction_chains import Step


log = logging.getLogger("asyncrl.commands.check")


def check(run: RunConfig) -> None:
    """Refuse, with a ConfigError that says what to change, what cannot work. Starts nothing."""
    check_worker(run)
    if not Path(run.data.path).is_file():
        raise ConfigError(f"data.path: {run.data.path} does not exist; it must be a .jsonl or .parquet file")
    algorithm = app.algorithm(run)
    _check_given(run, algorithm)
    if algorithm.advantage.has_group_baseline and run.rollout.group_size < 2:
        raise ConfigError(
            f"rollout: group_size 1 gives the advantage {algorithm.advantage.name} no baseline: it compares the "
            'samples of one prompt; use 2 or more, or algorithm.advantage = "reinforce"'
        )
    if "dynamic_sampling" in run.algorithm.filters and run.rollout.group_size < 2:
        raise ConfigError(
            'algorithm.filters: "dynamic_sampling" passes over groups of equal rewards, which one of one always is; '
            "remove it or use rollout.group_size = 2 or more"
        )
    auxiliary.check_folders(run, algorithm)
    places = app.launcher_class(run).places
    if run.learner.device == "cuda" and not places:
        app.require_gpu("learner")
    for section, gpus in (("learner", run.learner.gpus), ("rollout", run.rollout.gpus)):
        if gpus and places:
            raise ConfigError(
                f'{section}.gpus: numbers are of one machine, and launcher.kind = "{run.launcher.kind}" finds machines '
                "and GPUs itself; remove the key (launcher.options says how)"
            )
    app.options(app.backend_class(run), run.learner.options, "learner.options")
    if run.learner.ranks > 1 and run.learner.backend == "reference":
        raise ConfigError('learner.ranks: the reference backend is one process; use backend = "megatron" or ranks = 1')
    app.options(app.launcher_class(run), run.launcher.options, "launcher.options")
    _check_filters(run)


def check_worker(run: RunConfig) -> None:
    """The part of ``check`` that a rollout worker's machine must stand: it has neither the data nor a learner's GPU."""
    _check_bus(run)
    _check_sampling(run)
    _check_context(run, check_model_at("model.path", Path(run.model.path)))
    if run.engine.device == "cuda" and not app.launcher_class(run).places:
        app.require_gpu("engine")
    app.options(app.engine_class(run), run.engine.options, "engine.options")
    plugins.load(run.weights.channel, where="weights.channel", table=app.CHANNELS)
    app.load_reward(run)
    rollout_functions.load_rollout(run.rollout, table=app.ROLLOUTS)


def _check_filters(run: RunConfig) -> None:
    """Each is asked about a group made up here. What only real groups have, such as the parts of a reward, it may
    miss; a TypeError or an AttributeError a real group would raise too."""
    from asyncrl.actors.group_filters import ask, sample_group

    for name, function in app.filters(run).items():
        try:
            ask(function, sample_group())
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"algorithm.filters: {name} raised {type(error).__name__}: {error}; a filter is a function of one "
                "TrajectoryGroup that gives True to keep it"
            ) from error
        except Exception as error:  # the learner will say so, if a real group raises it too
            log.warning("algorithm.filters: %s raised %s: %s on a made-up group", name, type(error).__name__, error)


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


def _check_context(run: RunConfig, model: ModelFolder) -> None:
    new, context = run.rollout.max_new_tokens, model.context_tokens
    if new >= context and run.rollout.function != "given":
        raise ConfigError(
            f"rollout.max_new_tokens: {new:,} new tokens leave no room for a prompt in the model's context of "
            f"{context:,} (max_position_embeddings in {model.path / 'config.json'}); use fewer"
        )


def _check_sampling(run: RunConfig) -> None:
    rollout = run.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise ConfigError(
            f"rollout: top_p={rollout.top_p} top_k={rollout.top_k} sample from a truncated distribution whose logprobs "
            "the trainer cannot recompute; use top_p = 1.0 and top_k = 0 and shape it by temperature"
        )


def _check_given(run: RunConfig, algorithm: Algorithm) -> None:
    """Answers from the data train what looks at nothing but them: no policy sampled them."""
    rollout, key = run.rollout, run.data.response_key
    if rollout.function != "given":
        if run.engine.kind == "none":
            raise ConfigError(
                f'engine.kind: "none" generates nothing, and rollout.function = "{rollout.function}" needs answers; '
                'use "sglang" or "inprocess", or rollout.function = "given"'
            )
        if key and rollout.function == "single_turn":
            raise ConfigError(
                f'data.response_key: "{key}" is imitated by rollout.function = "given", and "single_turn" generates '
                "answers of its own; set that, or remove the key"
            )
        return
    if not key:
        raise ConfigError(
            'rollout.function: "given" takes the answers from the data; set data.response_key to their column'
        )
    if rollout.group_size > 1:
        raise ConfigError(
            f'rollout.group_size: a row has one answer, and "given" would train it {rollout.group_size} times; use 1'
        )
    if not algorithm.loss.is_supervised:
        raise ConfigError(
            f'rollout.function: "given" takes answers that no policy sampled, and loss {algorithm.loss.name} needs '
            'their behavior logprobs; use algorithm.name = "sft"'
        )
    kl = algorithm.kl
    for compares, name, instead in (
        (algorithm.correction_name != "none", "algorithm.correction", '"none"'),
        (kl is not None and kl.estimate == "unbiased", 'reference.kl = "unbiased"', '"k2"'),
        (run.staleness.adaptive, "staleness.adaptive", "false"),
        (bool(run.staleness.learning_rate), "staleness.learning_rate", '""'),
    ):
        if compares:
            raise ConfigError(
                f'{name} compares the policy with what sampled the answers, and rollout.function = "given" takes '
                f"answers that no policy sampled; use {instead}"
            )


def placement(run: RunConfig) -> Placement:
    """The GPUs of this machine, dealt to the processes that `asyncrl run` starts on it. Raises ConfigError.

    Not part of ``check``: a process that was given its GPUs sees no others.
    """
    placed = place(
        num_gpus(),
        ranks=run.learner.ranks if run.learner.device != "cpu" else 0,
        workers=run.rollout.workers,
        gpus_per_worker=gpus_per_worker(run),
        learner_gpus=run.learner.gpus,
        rollout_gpus=run.rollout.gpus,
    )
    if run.engine.kind == "sglang" and any(placed.workers):
        options = app.options(app.engine_class(run), run.engine.options, "engine.options")
        if not options.url:
            check_dtype(run.model.dtype, device="cuda", server_arguments=options.server_arguments)
    return placed


def num_gpus() -> int:
    """GPUs that torch sees in this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus_per_worker(run: RunConfig) -> int:
    """GPUs that one rollout worker takes where there are any; 0: its engine computes on the CPU."""
    has_gpu = run.engine.device != "cpu" and run.engine.kind != "none"
    return int(run.engine.options.get("tensor_parallel", 1)) if has_gpu else 0


def describe(run: RunConfig) -> str:
    """The resolved run file and what follows from it, for a person. Checks first, every row of the data too."""
    check(run)
    placed = "found by the launcher" if app.launcher_class(run).places else placement(run)
    rows = app.open_rows(run)
    lines = []
    for section in dataclasses.fields(run):
        table = getattr(run, section.name)
        if table is None:
            continue
        lines.append(f"[{section.name}]")
        for key in dataclasses.fields(table):
            value = getattr(table, key.name)
            shown = (
                "***"
                if key.name == "token" and value
                else _toml(without_secrets(value) if key.name == "url" else value)
            )
            lines.append(f"{key.name} = {shown}")
        lines.append("")
    lines += [
        "# what follows",
        *_algorithm(run),
        f"staleness bound   {run.max_staleness} versions ({run.run.mode})"
        + (f", the window's between {run.staleness.smallest} and it" if run.staleness.adaptive else ""),
        f"window            {run.window} groups = (max_staleness {run.max_staleness} + 1) x "
        f"groups_per_batch {run.learner.groups_per_batch}",
        f"data              {rows.num_rows:,} prompts, {run.run.steps * run.learner.groups_per_batch:,} trained",
        f"samples per step  {run.learner.groups_per_batch * run.rollout.group_size}",
        f"largest message   {run.largest_message_bytes:,} bytes of {run.bus.max_message_bytes:,}",
        f"GPUs              {placed}",
        f"weights           loaded {run.load.replace('_', ' ')}, kept in {run.weights_directory}",
        f"files             {run.run_directory}",
    ]
    return "\n".join(lines)


def _algorithm(run: RunConfig) -> list[str]:
    """Its parts with every option as it will be trained, and the models that are loaded, a line each."""
    made = app.algorithm(run)
    models = {"policy": Path(run.model.path)} | auxiliary.folders(run, made)
    return [
        f"algorithm         {made.name}, {made.paper}" if made.paper else f"algorithm         {made.name}",
        f"advantage         {_part(made.advantage)}",
        f"loss              {_part(made.loss)}",
        f"aggregation       {_part(made.aggregation)}",
        f"correction        {' + '.join(_part(step) for step in made.correction)}",
        f"models            {', '.join(f'{name} {folder}' for name, folder in models.items())}",
    ]


def _part(part: Advantage | Loss | Aggregation | Step) -> str:
    options = ", ".join(f"{key} = {_toml(value)}" for key, value in part.options.items())
    return f"{part.name} ({options})" if options else part.name


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return str(value)  # inf and nan as TOML spells them
    return json.dumps(list(value) if isinstance(value, tuple) else value)
