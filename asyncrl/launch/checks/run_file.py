"""Checks a run file before anything starts.

Every problem is a ConfigError: one line that says what to change. No weights are loaded.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.adapters import learner_models, registry
from asyncrl.config import RunConfig, plugins
from asyncrl.config.addresses import host_and_port
from asyncrl.config.toml_text import toml_text
from asyncrl.data.model_folder import ModelFolder, check_model_at, find_tokenizer, require_supported
from asyncrl.data.row_files import require_data
from asyncrl.data.sources import make_source
from asyncrl.environments import load as rollout_functions
from asyncrl.errors import ConfigError
from asyncrl.images.processor import ImageProcessor, Placeholders
from asyncrl.launch import colocated
from asyncrl.launch.checks import exact
from asyncrl.launch.launchers.adapter import launcher_class
from asyncrl.policies.evaluation.pinned_workers import num_pinned
from asyncrl.policies.evaluation.results import metric_names
from asyncrl.policies.groups.selection import own_order
from asyncrl.rewards.load import SERVED_KINDS
from asyncrl.weights.after_write import load_after_write

if TYPE_CHECKING:
    from asyncrl.policies.algorithms.algorithm import Algorithm

log = logging.getLogger("asyncrl.check")


def check(run: RunConfig, *, is_here: bool = True) -> None:
    """Check everything that `asyncrl run` needs here, without starting anything.

    is_here  whether the run will be on this machine, and not on another with GPUs

    Raises ConfigError that says what to change.
    """
    registry.check_names(run)
    launcher = launcher_class(run)
    if is_here:
        registry.bus_class(run).check_machine(run)
        launcher.check_machine(run)
    _check_settings(run)
    warn_of_share(run)
    if not is_here:
        for one in (*([run] if run.rollout.workers else []), *map(run.of_pool, run.rollout.pools)):
            if one.engine.device != "cpu":
                registry.engine_class(one).check_device(one, "cuda")
        return
    if launcher.places:  # each process checks its own machine
        return
    from asyncrl.metrics.sinks import check_logins  # imports torch

    _check_prometheus(run)
    check_logins(run)
    registry.backend_class(run).check_machine(run)
    for name, section in run.started_servers.items():
        its, options = registry.server_class(name, section)
        if hasattr(its, "check_machine"):
            its.check_machine(run, name, section, options)
    for pool in run.rollout.pools:
        registry.engine_class(run).check_machine(run.of_pool(pool))
    if run.num_workers:
        if run.rollout.workers:
            registry.engine_class(run).check_machine(run)
        rollout_functions.check_machine(run.rollout)
        registry.check_reward_machine(run)


def _check_prometheus(run: RunConfig) -> None:
    """Check that the host is an address of this machine. The learner finds out whether the port is free."""
    if not run.metrics.prometheus:
        return
    host, _ = host_and_port(run.metrics.prometheus)
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as listener:
                listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"metrics.prometheus: cannot listen at {host} ({error.strerror or error}); it must be an address of this "
            "machine: 127.0.0.1, or 0.0.0.0 for all of them"
        ) from None


def check_learner(run: RunConfig) -> None:
    """Same as ``check``, for a machine that runs only the learner."""
    _check_settings(run)
    _check_prometheus(run)
    registry.backend_class(run).check_machine(run)


def check_server(run: RunConfig, name: str) -> None:
    """Same as ``check``, for a machine that runs only the server of a frozen model."""
    section = run.servers[name]
    _check_server(run, name)
    its, options = registry.server_class(name, section)
    if hasattr(its, "check_machine"):
        its.check_machine(run, name, section, options)


def _check_server(run: RunConfig, name: str) -> None:
    section = run.servers[name]
    if not section.is_ours:
        return
    check_model_at(f"servers.{name}.path", Path(section.path))
    its, options = registry.server_class(name, section)
    if hasattr(its, "check"):
        its.check(run, name, section, options)


def _check_servers(run: RunConfig) -> None:
    """Check the servers of frozen models, and that every reward and agent that names one finds it."""
    for name in run.servers:
        _check_server(run, name)
    learner_models.check_teachers(run)
    sections = [("reward", run.reward), *((f"reward.parts.{n}", one) for n, one in run.reward.part_sections.items())]
    sections += [
        (f"evaluation.datasets: {one.name}: reward", one.reward) for one in run.evaluation.datasets if one.reward
    ]
    for where, section in sections:
        if section.kind in SERVED_KINDS and (name := section.options.get("server", "")):
            _require_server(run, name, where=f"{where}.options.server")
    agents = {"rollout.options.servers": run.rollout}
    for of_evaluation, key in ((False, "data.files"), (True, "evaluation.datasets")):
        own = rollout_functions.own_sections(run, of_evaluation=of_evaluation)
        agents |= {f"{key}: {name}: options.servers": section for name, section in own.items()}
    for where, rollout in agents.items():
        for name in rollout.options.get("servers", ()) if rollout.function == "agent" else ():
            _require_server(run, name, where=where)


def _require_server(run: RunConfig, name: str, *, where: str) -> None:
    if name not in run.servers:
        known = f"; there is {', '.join(run.servers)}" if run.servers else ""
        raise ConfigError(f"{where}: there is no [servers.{name}]{known}")


def check_worker(run: RunConfig) -> None:
    """Same as ``check``, for a machine that runs only a rollout worker: no data, no learner."""
    _check_worker_before_torch(run)
    _check_engine_and_channel(_as_single_worker(run))
    _check_context(run, registry.context_tokens(run))
    registry.engine_class(run).check_machine(run)
    registry.check_reward_machine(run)
    rollout_functions.check_machine(run.rollout)


def check_engine_node(run: RunConfig) -> None:
    """Same as ``check``, for a machine that runs only a part of an engine: neither rewards nor data."""
    registry.check_names(run)
    check_model_at("model.path", Path(run.model.path))
    _check_engine_and_channel(_as_single_worker(run))
    registry.engine_class(run).check_machine(run)


def check_before_torch(run: RunConfig) -> None:
    """Check what is possible without torch, whose import takes many seconds on a busy machine."""
    _check_data(run)
    for key, folder in run.model_paths.items():
        _check_model(run, key, folder)
    _check_evaluation_paths(run)
    _check_directory("run.directory", run.run_directory)
    if run.learner.experts_directory:
        _check_directory("learner.experts_directory", Path(run.learner.experts_directory))
    if run.weights.directory:
        _check_directory("weights.directory", run.weights_directory)
        if run.weights_directory.resolve() == run.run_directory.resolve():
            raise ConfigError(
                f"weights.directory: {run.weights_directory} is the run's own folder; name another, or leave it empty "
                "for weights/ in it"
            )
    _check_worker_before_torch(run)
    launcher = launcher_class(run)
    _check_servers(run)
    of_servers = ((f"servers.{name}", one.gpus) for name, one in run.servers.items())
    of_pools = ((f"rollout.pools.{name}", one.gpus) for name, one in run.rollout.pools.items())
    own = ((name, getattr(run, name).gpus) for name in ("learner", "rollout", "evaluation"))
    for section, gpus in (*own, *of_servers, *of_pools):
        if gpus and launcher.places:
            raise ConfigError(
                f'{section}.gpus: numbers are of one machine, and launcher.kind = "{run.launcher.kind}" finds machines '
                "and GPUs itself; remove the key (launcher.options says how)"
            )
    if "dynamic_sampling" in run.algorithm.filters and run.rollout.group_size < 2:
        raise ConfigError(
            'algorithm.filters: "dynamic_sampling" passes over groups of equal rewards, which one of one always is; '
            "remove it or use rollout.group_size = 2 or more"
        )


def _check_settings(run: RunConfig) -> None:
    check_before_torch(run)
    algorithm = registry.algorithm(run)  # imports torch only
    registry.backend_class(run).check_algorithm(run, algorithm)
    registry.check_backend_can(run)
    _check_engine_and_channel(run)  # may import transformers
    _check_context(run, registry.context_tokens(run))
    _check_given(run, algorithm)
    _check_reward(run, algorithm)
    if algorithm.advantage.has_group_baseline and run.rollout.group_size < 2:
        raise ConfigError(
            f"rollout: group_size 1 gives the advantage {algorithm.advantage.name} no baseline: it compares the "
            'samples of one prompt; use 2 or more, or algorithm.advantage = "reinforce"'
        )
    _check_images(run)
    colocated.check(run)
    exact.check(run)
    if (replay := registry.routing_replay(run)).is_on:
        _check_log(run, run.largest_group_bytes + replay.num_bytes)
    elif run.learner.experts_directory:
        raise ConfigError(f"learner.experts_directory: no experts are replayed: {replay.reason}; remove it")
    learner_models.check_folders(run, algorithm)
    registry.backend_class(run).check(run)
    registry.shared_prefixes(run)
    launcher_class(run).check(run)
    _check_filters(run)
    own_order(run.staleness.order)
    from asyncrl.metrics.sinks import check_sinks  # imports torch; other problems are reported before
    from asyncrl.policies.batching.hooks import Hooks

    check_sinks(run)
    Hooks(run.algorithm.hooks)
    load_after_write(run.weights.after_write)


def _check_data(run: RunConfig) -> None:
    """Check what is possible before any row is read."""
    data = run.data
    if data.source:
        make_source(data)
    elif not data.path and not data.files:
        raise ConfigError("data.path: name a .jsonl or .parquet file, several in [[data.files]], or a data.source")
    for key, file in [("data.path", data.path)] if data.path else [("data.files", one.path) for one in data.files]:
        try:
            require_data(file)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    samples = rollout_functions.traits(run.rollout.function).samples
    if data.conversation_key and samples:
        raise ConfigError('data.conversation_key: is for rollout.function = "given"; name the prompts with prompt_key')
    if data.sampling_key and not samples:
        raise ConfigError(f'data.sampling_key: rollout.function = "{run.rollout.function}" samples nothing; remove it')


def _check_images(run: RunConfig) -> None:
    """Check that model and engine read the images that the data shows."""
    named = {"data.image_key": run.data.image_key}
    named |= {f"evaluation.datasets: {one.name}: image_key": one.image_key for one in run.evaluation.datasets}
    key = next((key for key, value in named.items() if value), "")
    folder = Path(run.model.path)
    if Placeholders.of(folder) is None:
        if key:
            raise ConfigError(
                f"{key}: the model at {folder} reads text alone; remove the key, or take a model that reads images"
            )
        return
    ImageProcessor(folder)
    engine = registry.engine_class(run)
    if key and rollout_functions.traits(run.rollout.function).samples and not engine.reads_images:
        raise ConfigError(f'{key}: engine.kind = "{run.engine.kind}" reads no images; use "inprocess" or "sglang"')


def _check_directory(key: str, directory: Path) -> None:
    """Check that the folder for the run's files at ``key`` exists or can be created."""
    if directory.parts[0].startswith("~"):
        raise ConfigError(f"{key}: {directory.parts[0]} is not expanded in a run file; write the whole path")
    there = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    if not there.is_dir():
        raise ConfigError(f"{key}: {there} is a file; the run's files go to {directory}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: cannot write to {there}, where {directory} is to be; name another")


def _check_model(run: RunConfig, key: str, folder: Path) -> None:
    """Check a model's folder. A family or a backend of the user's own may know architectures that asyncrl does not."""
    if not run.model.family and ":" not in run.learner.backend:
        require_supported(key, folder, backend=run.learner.backend)
    check_model_at(key, folder)
    try:
        find_tokenizer(folder, trusts_code=run.model.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _check_worker_before_torch(run: RunConfig) -> None:
    """User code that is loaded here may import torch."""
    registry.check_names(run)
    registry.bus_class(run).check(run)
    _check_bus(run)
    model = check_model_at("model.path", Path(run.model.path))
    _check_sampling(run, model)
    _check_context(run, model.context_tokens)
    registry.load_reward(run)
    registry.load_evaluation_rewards(run)
    _check_evaluation(run)
    _check_rollout_functions(run)


def _check_rollout_functions(run: RunConfig) -> None:
    """Load the rollout function of the run, and those of data sets."""
    of_data = rollout_functions.own_sections(run, of_evaluation=False)
    of_sets = rollout_functions.own_sections(run, of_evaluation=True)
    for where, sections in (("", {"": run.rollout}), ("data.files: ", of_data), ("evaluation.datasets: ", of_sets)):
        for name, section in sections.items():
            try:
                rollout_functions.load_rollout(section)
            except ConfigError as error:
                raise ConfigError(f"{where}{name}: {error}" if where else str(error)) from error
            traits = rollout_functions.traits(section.function)
            if where and not traits.samples:
                raise ConfigError(
                    f'{where}{name}: function = "{section.function}" generates nothing; it is for a whole run, as '
                    "rollout.function"
                )
            if not traits.makes_groups:
                continue
            for key in ("extra_samples", "group_seconds", "min_group", "timeout_seconds"):
                if getattr(section, key):
                    raise ConfigError(
                        f'rollout.{key}: "{section.function}" makes all samples of a group in one call, so none can be '
                        "left out or timed; remove the key"
                    )


def _as_single_worker(run: RunConfig) -> RunConfig:
    """Return the run as one worker sees it that starts no others: the options of the engine are its own."""
    rollout = dataclasses.replace(run.rollout, workers=0, most_workers=0)
    return dataclasses.replace(run, rollout=rollout, evaluation=dataclasses.replace(run.evaluation, workers=1))


def _check_engine_and_channel(run: RunConfig) -> None:
    engine, channel = registry.engine_class(run), registry.channel_class(run)
    engine.check(run)
    if engine.machines(run) > 1 and run.rollout.most_workers > run.rollout.workers:
        raise ConfigError(
            "engine.options.machines: engines of several machines start with the run, and rollout.most_workers cannot "
            "add any; set rollout.workers"
        )
    for pool in run.rollout.pools:
        try:
            engine.check(run.of_pool(pool))
            if channel.sends_from_memory:
                engine.check_weight_updater(run.of_pool(pool))
        except ConfigError as error:
            raise ConfigError(f"rollout.pools.{pool}: {error}") from None
    most_steps = 1 if run.run.colocated else run.max_staleness + 1
    if run.weights.every_steps > most_steps and rollout_functions.traits(run.rollout.function).samples:
        raise ConfigError(
            f"weights: every_steps {run.weights.every_steps}: the last step before a new version trains tokens that "
            f"are {run.weights.every_steps - 1} versions old, and this run trains none older than {most_steps - 1} "
            f"(staleness.max_staleness, run.mode, run.colocated); use at most {most_steps}"
        )
    if not engine.generates and rollout_functions.traits(run.rollout.function).samples:
        raise ConfigError(
            f'engine.kind: "{run.engine.kind}" generates nothing, but rollout.function = "{run.rollout.function}" '
            'needs answers; use "sglang" or "inprocess", or rollout.function = "given"'
        )
    channel.check(run)
    if channel.sends_from_memory:
        engine.check_weight_updater(run)
    for key, what, is_on in (
        ("learner.lora.publish", "adapters", run.learner.lora.publish == "adapter"),
        ("weights.quantization", run.weights.quantization, bool(run.weights.quantization)),
    ):
        for where, name, adapter in (
            ("engine.kind", run.engine.kind, engine),
            ("weights.channel", registry.channel_name(run), channel),
        ):
            if is_on and what not in adapter.takes:
                raise ConfigError(f'{key}: {where} = "{name}" takes no {what}; remove it')
    if run.weights.quantization and run.learner.lora.publish == "adapter":
        raise ConfigError('weights.quantization: is not supported with adapters; use learner.lora.publish = "merged"')


def _check_reward(run: RunConfig, algorithm: Algorithm) -> None:
    gives_none = rollout_functions.traits(run.rollout.function).gives_one
    if run.reward.takes_given and gives_none and algorithm.reads_rewards:
        raise ConfigError(
            f'reward.{"parts" if run.reward.parts else "kind"}: "none" takes what the rollout function sets, and '
            f'"{run.rollout.function}" sets none, so {algorithm.name} would learn nothing; choose another '
            "reward.kind, or a rollout.function of your own"
        )
    if run.reward.takes_given and not run.data.reward_key and rollout_functions.sets_no_reward(run.rollout):
        raise ConfigError(
            f'reward.{"parts" if run.reward.parts else "kind"}: "none" takes the harness\'s reward, and with '
            'rollout.options.harness_options.reward = "grader" it gives none, so every sample would fail; choose '
            'another reward.kind, or "stdout" or "file"'
        )


def _check_filters(run: RunConfig) -> None:
    """Call each filter with a made-up group.

    The group may lack what only real groups have, such as parts of a reward, so only TypeError and AttributeError are
    refused, which real groups would raise too.
    """
    from asyncrl.actors.learner.group_filters import ask, sample_group

    for name, function in registry.filters(run).items():
        try:
            ask(function, sample_group())
        except (TypeError, AttributeError) as error:
            raise ConfigError(
                f"algorithm.filters: {name} raised {plugins.describe_raised(error)}; a filter is a function of one "
                "TrajectoryGroup that returns True to keep it"
            ) from error
        except Exception as error:  # the learner reports it if a real group raises it too
            log.warning("algorithm.filters: %s raised %s on a made-up group", name, plugins.describe_raised(error))


def check_evaluation(run: RunConfig) -> None:
    """Same as ``check``, for evaluating saved models only."""
    _check_evaluation_paths(run)
    _check_model(run, "model.path", Path(run.model.path))
    registry.load_evaluation_rewards(run)
    _check_rollout_functions(run)
    _check_evaluation(run)
    _check_engine_and_channel(_as_single_worker(run))
    registry.engine_class(run).check_machine(run)
    registry.check_reward_machine(run)


def _check_bus(run: RunConfig) -> None:
    if run.bus.max_message_bytes <= run.largest_prompt_bytes:
        raise ConfigError(
            f"bus.max_message_bytes: a prompt may take {run.largest_prompt_bytes:,} bytes without its label, and "
            f"{run.bus.max_message_bytes:,} leave no room for it; raise it or lower data.max_prompt_tokens"
        )
    largest, limit = run.largest_group_bytes, run.bus.max_group_bytes
    if largest > limit:
        raise ConfigError(
            f"bus: a trajectory group of {run.rollout.group_size} x {run.rollout.max_new_tokens} tokens may take "
            f"{largest:,} bytes, over bus.max_group_bytes ({limit:,}); raise it or lower rollout.group_size or "
            "rollout.max_new_tokens"
        )
    _check_log(run, largest)


def _check_log(run: RunConfig, largest: int) -> None:
    """largest: size of a group in bytes"""
    between = run.run.steps if run.checkpoint.keep_log else 2 * run.checkpoint.every_steps or run.run.steps
    groups = run.window + min(between, run.run.steps) * run.learner.groups_per_batch
    if groups * largest > run.bus.max_log_bytes:
        is_kept = run.checkpoint.keep_log
        until = "at the end, as checkpoint.keep_log keeps all" if is_kept else "before the second checkpoint trims it"
        raise ConfigError(
            f"bus: up to {groups:,} groups of {largest:,} bytes lie in the log {until}, "
            f"{groups * largest:,} in all, over bus.max_log_bytes ({run.bus.max_log_bytes:,}): a full log would stop "
            f"the run; raise it or lower {'run.steps' if is_kept else 'checkpoint.every_steps'}"
        )


def _check_context(run: RunConfig, context: int) -> None:
    """context: tokens that a prompt and its answer may have together"""
    new, most = run.rollout.max_new_tokens, run.rollout.max_context_tokens
    if most > context:
        raise ConfigError(
            f"rollout.max_context_tokens: {most:,} tokens are more than the {context:,} that engine.kind = "
            f'"{run.engine.kind}" takes; use fewer'
        )
    if not most and new >= context and rollout_functions.traits(run.rollout.function).samples:
        raise ConfigError(
            f"rollout.max_new_tokens: {new:,} new tokens leave no room for a prompt in the {context:,} tokens that "
            f'engine.kind = "{run.engine.kind}" takes (at most max_position_embeddings in '
            f"{Path(run.model.path) / 'config.json'}); use fewer"
        )


def _check_sampling(run: RunConfig, model: ModelFolder) -> None:
    rollout = run.rollout
    if unknown := [token for token in rollout.stop_token_ids if not 0 <= token < model.vocab_size]:
        raise ConfigError(f"rollout.stop_token_ids: {unknown[0]} is not a token of the model's {model.vocab_size:,}")
    has_nucleus = rollout.top_p < 1 or rollout.top_k > 0
    for keys, are_set in (
        ("stop, stop_token_ids and min_new_tokens", rollout.stop or rollout.stop_token_ids or rollout.min_new_tokens),
        ("extra_samples and group_seconds", rollout.extra_samples or rollout.group_seconds),
        ("top_p and top_k", has_nucleus),
        ("top_logprobs", rollout.top_logprobs),
    ):
        if are_set and not rollout_functions.traits(rollout.function).samples:
            raise ConfigError(
                f'rollout.{keys} are for what is generated, and rollout.function = "{rollout.function}" generates '
                "nothing; remove them"
            )
    if has_nucleus and run.has_served_teacher:
        raise ConfigError(
            "rollout.top_p and top_k: a teacher on a server gives logprobs over all tokens, and the policy's are over "
            "those that are left; remove them, or load the teacher in the learner (teacher.path)"
        )
    if 0 < rollout.max_context_tokens <= run.data.max_prompt_tokens:
        raise ConfigError(
            f"rollout.max_context_tokens = {rollout.max_context_tokens} leaves a prompt of data.max_prompt_tokens = "
            f"{run.data.max_prompt_tokens} no token to answer with; raise it, or lower data.max_prompt_tokens"
        )


def _check_given(run: RunConfig, algorithm: Algorithm) -> None:
    """Check that answers from the data are used only by algorithms that need no sampling policy."""
    rollout, key = run.rollout, run.data.response_key or run.data.conversation_key
    name, traits = rollout.function, rollout_functions.traits(run.rollout.function)
    if traits.samples:
        if key and traits.gives_one:
            raise ConfigError(
                f'data.response_key: "{key}" is imitated by rollout.function = "given", and "{name}" generates '
                "answers of its own; set that, or remove the key"
            )
        return
    if not key:
        raise ConfigError(
            f'rollout.function: "{name}" takes the answers from the data; set data.response_key to their column, or '
            "data.conversation_key"
        )
    if rollout.group_size > 1:
        raise ConfigError(
            f'rollout.group_size: a row has one answer, and "{name}" would train it {rollout.group_size} times; use 1'
        )
    if not algorithm.loss.is_supervised:
        raise ConfigError(
            f'rollout.function: "{name}" takes answers that no policy sampled, and loss {algorithm.loss.name} needs '
            'their behavior logprobs; use algorithm.name = "sft"'
        )
    kl = algorithm.kl
    for compares, key, instead in (
        (algorithm.correction_name != "none", "algorithm.correction", '"none"'),
        (kl is not None and kl.estimate == "unbiased", 'reference.kl = "unbiased"', '"k2"'),
        (bool(run.staleness.learning_rate), "staleness.learning_rate", '""'),
    ):
        if compares:
            raise ConfigError(
                f'{key} compares the policy with what sampled the answers, and rollout.function = "{name}" takes '
                f"answers that no policy sampled; use {instead}"
            )


def _check_evaluation(run: RunConfig) -> None:
    """Check what every process can see. The files of the data sets are checked by the learner."""
    section, best = run.evaluation, run.checkpoint.best
    if section.is_on and not rollout_functions.traits(run.rollout.function).samples:
        raise ConfigError(
            f'evaluation.place: rollout.function = "{run.rollout.function}" has no engine that could answer; use place '
            '= "folder" and `asyncrl evaluate`'
        )
    if not best:
        return
    name, _, metric = best.partition("/")
    dataset = section.dataset(name)
    assert dataset is not None, "EvaluationSection.check saw to it"
    # the rows are checked in data.require_metric
    known = metric_names(dataset.samples, k=dataset.k, has_labels=True)
    if metric not in known:
        raise ConfigError(f"checkpoint.best: {name} has no metric {metric!r}; it has {', '.join(known)}")


def _check_evaluation_paths(run: RunConfig) -> None:
    for dataset in run.evaluation.datasets:
        if not dataset.path:  # machines that join have no paths, because they open no data
            raise ConfigError(f"evaluation.datasets: {dataset.name}: path is empty; name a file")
        try:
            require_data(dataset.path)
        except ConfigError as error:
            raise ConfigError(f"evaluation.datasets: {dataset.name}: path {error}") from None


def warn_of_share(run: RunConfig) -> None:
    """Warn if one worker, the fewest that an evaluation can pin, is more than the run file allows.

    Only for `asyncrl run` and its check: if the workers are started separately, their number is not yet known.
    """
    section, workers = run.evaluation, run.rollout.workers
    if not section.is_on or section.place != "shared" or not workers:
        return
    pinned = num_pinned(section.share, workers)
    if pinned <= section.share * workers:
        return
    log.warning(
        "evaluation.share: %s of %d rollout worker%s is less than one, and an evaluation holds back one, %.0f %% of "
        'them; use rollout.workers = %d or more, share = %s, or place = "dedicated"',
        toml_text(section.share),
        workers,
        "" if workers == 1 else "s",
        100 * pinned / workers,
        math.ceil(1 / section.share),
        toml_text(math.ceil(1e4 / workers) / 1e4),
    )
