"""The models that a run's learner holds in addition to the policy, as its algorithm requires.

Tests: tests/unit/adapters/test_learner_models.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import RunConfig
from asyncrl.config.models import CriticSection, ReferenceSection
from asyncrl.data.model_folder import check_model_at
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.backends.models import AuxiliaryModel
    from asyncrl.backends.optimizer_settings import OptimizerSettings
    from asyncrl.policies.algorithms.algorithm import Algorithm
    from asyncrl.policies.losses.kl import Penalty


def penalty(run: RunConfig) -> Penalty | None:
    """Return the penalty of [reference]; None if its kl_coef is 0."""
    from asyncrl.policies.losses.kl import Penalty

    section = run.reference or ReferenceSection()
    if not section.kl_coef:
        return None
    estimate = section.kl or ("unbiased" if section.kl_in == "loss" else "k1")
    return Penalty(coef=section.kl_coef, estimate=estimate, place=section.kl_in)


def require_sections(run: RunConfig, algorithm: Algorithm) -> None:
    """Check that the run file names exactly the models that the algorithm uses. Raises ConfigError."""
    if "teacher" in algorithm.models and run.teacher is None:
        raise ConfigError(
            f"teacher: {algorithm.name} learns from a teacher; add [teacher] with path = a model folder of the same "
            "tokenizer"
        )
    if "critic" not in algorithm.models and run.critic is not None:
        raise ConfigError(
            f'critic: {algorithm.name} learns no values; remove [critic], or use algorithm.name = "ppo" or '
            'algorithm.advantage = "gae"'
        )
    if "teacher" not in algorithm.models and run.teacher is not None:
        raise ConfigError(
            f'teacher: {algorithm.name} learns from no teacher; remove [teacher], or use algorithm.name = "opd"'
        )
    _require_likeliest(run, algorithm)
    if run.critic is not None and run.critic.min_learning_rate > (
        run.critic.learning_rate or run.learner.learning_rate
    ):
        raise ConfigError(
            f"critic: min_learning_rate {run.critic.min_learning_rate:g} is more than the critic's learning rate, "
            f"{run.critic.learning_rate or run.learner.learning_rate:g}; lower it"
        )
    if run.critic is not None and run.critic.warmup_steps >= run.run.steps:
        raise ConfigError(
            f"critic: warmup_steps {run.critic.warmup_steps} of {run.run.steps} run.steps would leave the policy as it "
            "is; lower it or raise run.steps"
        )


def _require_likeliest(run: RunConfig, algorithm: Algorithm) -> None:
    """Check that the likeliest tokens are asked for if the loss compares distributions, and only then."""
    loss, wanted = algorithm.loss.name, algorithm.loss.inputs
    of_teacher = run.teacher.top_logprobs if run.teacher else 0
    for needed, key, count, why in (
        ("behavior_likeliest", "rollout.top_logprobs", run.rollout.top_logprobs, "128, as slime has it"),
        ("teacher_likeliest", "teacher.top_logprobs", of_teacher, "32, with [teacher] server"),
    ):
        if needed in wanted and not count:
            raise ConfigError(f"algorithm: loss {loss} compares the likeliest tokens; set {key}, such as {why}")
        if count and needed not in wanted:
            raise ConfigError(
                f"{key}: loss {loss} reads no likeliest tokens, which would only make messages larger; remove it"
            )


def folders(run: RunConfig, algorithm: Algorithm) -> dict[str, Path]:
    """Return the Hugging Face folder of each model that the algorithm uses, apart from a teacher on a server."""
    given = {
        "critic": run.critic.path if run.critic else "",
        "reference": run.reference.path if run.reference else "",
        "teacher": run.teacher.path if run.teacher else "",
    }
    loaded = algorithm.models - ({"teacher"} if run.has_served_teacher else set())
    return {name: Path(given[name] or run.model.path) for name in sorted(loaded)}


def oddities(run: RunConfig, algorithm: Algorithm) -> list[str]:
    """One line for each thing about models and algorithm that is hardly ever meant."""
    found = []
    if run.reference is not None and run.reference.path and "reference" not in algorithm.models:
        found.append(f"reference.path: {run.reference.path} is not loaded, as reference.kl_coef is 0")
    imitates = algorithm.loss.is_supervised and "teacher" not in algorithm.models  # which judges own answers
    if imitates and run.rollout.function == "single_turn" and not run.algorithm.filters:
        found.append(
            f"algorithm: {algorithm.name} imitates the model's own answers, whatever their reward; for answers of the "
            'data set rollout.function = "given"'
        )
    return found


def check_folders(run: RunConfig, algorithm: Algorithm) -> None:
    """Check that the learner can load each model, and that its token ids match the policy's. Raises ConfigError."""
    keys = {f"{name}.path": folder for name, folder in folders(run, algorithm).items()}
    if run.teacher is not None and (served := run.servers.get(run.teacher.server)) and served.path:
        keys[f"servers.{run.teacher.server}.path"] = Path(served.path)
    for key, folder in keys.items():
        if folder == Path(run.model.path):
            continue
        check_model_at(key, folder)
        difference = _vocabulary_difference(Path(run.model.path), folder, trusts_code=run.model.trust_remote_code)
        if difference is not None:
            raise ConfigError(
                f"{key}: the tokenizer in {folder} is not that of model.path: {difference}; its scores would be "
                "of other words. Use a model of the same family"
            )


def teachers(run: RunConfig) -> list[str]:
    """Return the names of the servers that may be teachers. With teacher.key, any row may choose any server."""
    if run.teacher is None or not run.teacher.is_served:
        return []
    return list(run.servers) if run.teacher.key else [run.teacher.server]


def check_teachers(run: RunConfig) -> None:
    """Check that served teachers are servers of the run file and score what is sampled. Raises ConfigError."""
    if run.teacher is None or not run.teacher.is_served:
        return
    name = run.teacher.server
    if name not in run.servers and (name or not run.servers):
        known = f"; there is {', '.join(run.servers)}" if run.servers else "; add it"
        raise ConfigError(f"teacher.server: there is no [servers.{name or 'NAME'}]{known}")
    if run.rollout.temperature != 1:
        raise ConfigError(
            f"teacher.server: a server's logprobs are at temperature 1, and rollout.temperature is "
            f"{run.rollout.temperature:g}; use 1, or teacher.path"
        )


def models(run: RunConfig, algorithm: Algorithm, *, optimizer: OptimizerSettings) -> dict[str, AuxiliaryModel]:
    """Return the backend's models in addition to the policy; empty for most algorithms.

    optimizer  of the policy. A critic has its own settings where [critic] sets them, and neither adapters nor frozen
               parameters
    """
    from asyncrl.backends.models import AuxiliaryModel
    from asyncrl.policies.algorithms.critic import Critic as Objective

    made = {}
    for name, folder in folders(run, algorithm).items():
        is_refreshed = name == "reference" and run.reference is not None and run.reference.refresh_steps > 0
        fields = run.own_megatron.get(f"{name}.path", {})
        made[name] = AuxiliaryModel(path=folder, is_refreshed=is_refreshed, megatron=fields)
        if name == "critic":
            section = run.critic or CriticSection()
            objective = Objective(
                kind=section.loss, clip=section.clip, scale=section.scale, huber_delta=section.huber_delta
            )
            whole = dataclasses.replace(optimizer, **_own_settings(section), freeze=(), train_only=(), lora=None)
            made[name] = dataclasses.replace(made[name], head="values", objective=objective, optimizer=whole)
    return made


def _own_settings(critic: CriticSection) -> dict[str, Any]:
    """Return the settings of AdamW that [critic] sets."""
    found: dict[str, Any] = {name: of for name in ("betas", "eps", "max_grad_norm") if (of := getattr(critic, name))}
    return found if critic.weight_decay is None else {**found, "weight_decay": critic.weight_decay}


def _vocabulary_difference(policy: Path, other: Path, *, trusts_code: bool) -> str | None:
    """Return the first difference between two tokenizers; None if every token has the same id."""
    ours, theirs = policy / "tokenizer.json", other / "tokenizer.json"
    if ours.is_file() and theirs.is_file() and ours.read_bytes() == theirs.read_bytes():
        return None
    from asyncrl.data.tokenizer import load_tokenizer

    known, found = (load_tokenizer(path, trusts_code=trusts_code).get_vocab() for path in (policy, other))
    for token in sorted(known | found, key=(found | known).__getitem__):
        there, here = (f"number {of[token]}" if token in of else "unknown" for of in (found, known))
        if there != here:
            return f"token {token!r} is {there} there and {here} here"
    return None
