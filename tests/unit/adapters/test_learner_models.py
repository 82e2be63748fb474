"""A run's models besides the policy follow from its algorithm; a mismatch gives a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.actors.learner.training_step import learning_rates
from asyncrl.adapters import learner_models, registry
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import summarize
from asyncrl.policies.algorithms.critic import Critic
from asyncrl.policies.algorithms.table import ALGORITHMS

RUN_FILE = """
[run]
name = "x"
[model]
path = "{folder}/policy"
[data]
path = "{folder}/prompts.jsonl"
[reward]
kind = "exact"
[engine]
kind = "inprocess"
[learner]
backend = "reference"
learning_rate = 1e-4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models: "policy" and "same" share a tokenizer, "other" has a different one."""
    path = tmp_path_factory.mktemp("models")
    for name, characters in (("policy", "0123"), ("same", "0123"), ("other", "0132")):
        make_tiny_model(path / name, characters=characters)
    (path / "prompts.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    return path


def run(folder: Path, *overrides: str) -> config.RunConfig:
    file = folder / "run.toml"
    file.write_text(RUN_FILE.format(folder=folder))
    return config.load(file, [item.format(folder=folder) for item in overrides])


USES: dict[str, tuple[list[str], set[str]]] = {
    "most": ([], set()),
    "ppo": (["algorithm.name=ppo"], {"critic"}),
    "gae in another row": (["algorithm.name=dapo", "algorithm.advantage=gae", "critic.warmup_steps=5"], {"critic"}),
    "opd": (["algorithm.name=opd", "teacher.path={folder}/same"], {"teacher"}),
    "opd's loss form": (
        ["algorithm.name=opd", "algorithm.loss=opd", "algorithm.correction=none", "teacher.path={folder}/same"],
        {"teacher"},
    ),
    "a teacher beside rewards": (
        ["algorithm.name=opd", "algorithm.advantage=grpo", "teacher.path={folder}/same"],
        {"teacher"},
    ),
    "KL": (["reference.kl_coef=0.01"], {"reference"}),
    "KL in the reward": (
        ["algorithm.name=reinforce_pp", "reference.kl_coef=0.01", "reference.kl_in=reward"],
        {"reference"},
    ),
    "no KL": (["reference.path={folder}/same"], set()),
    "all": (
        ["algorithm.name=ppo", "algorithm.loss=opd_reward", "reference.kl_coef=0.01", "teacher.path={folder}/same"],
        {"critic", "reference", "teacher"},
    ),
}


@pytest.mark.parametrize("case", USES)
def test_algorithm_decides_which_models_a_run_has(case: str, folder: Path) -> None:
    overrides, models = USES[case]
    made = run(folder, *overrides)
    check(made)
    assert registry.algorithm(made).models == models


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (USES["no KL"][0], ["is not loaded, as reference.kl_coef is 0"]),
        (["reference.path={folder}/same", "reference.kl_coef=0.01"], []),
        (["algorithm.name=sft"], ["imitates the model's own answers"]),
        (["algorithm.name=sft", "rollout.function=given"], []),
        (["algorithm.name=sft", 'algorithm.filters=["dynamic_sampling"]'], []),
        (["algorithm.name=distill", "servers.big.url=http://h/v1", "teacher.server=big", "teacher.top_logprobs=8"], []),
    ],
)
def test_what_the_algorithm_makes_no_use_of_is_said(overrides: list[str], said: list[str], folder: Path) -> None:
    made = run(folder, *overrides)
    found = learner_models.oddities(made, registry.algorithm(made))
    assert len(found) == len(said)
    assert all(part in line for part, line in zip(said, found, strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_takes_a_penalty_to_a_reference(name: str, folder: Path) -> None:
    served = ["servers.big.url=http://h/v1", "teacher.server=big", "teacher.top_logprobs=8"]
    teacher = ["teacher.path={folder}/same"] if name == "opd" else served if name == "distill" else []
    made = registry.algorithm(run(folder, f"algorithm.name={name}", "reference.kl_coef=0.01", *teacher))
    assert made.kl is not None
    assert (made.kl.estimate, made.kl.place) == ("unbiased", "loss")


REFUSED: dict[str, tuple[list[str], str]] = {
    "no teacher": (["algorithm.name=opd"], r"teacher: opd learns from a teacher; add \[teacher\] with path"),
    "a teacher for nothing": (["teacher.path={folder}/same"], r"teacher: grpo learns from no teacher; remove \[teac"),
    "a critic for nothing": (["critic.clip=0.2"], r"critic: grpo learns no values; remove \[critic\], or use"),
    "fields of a teacher on a server": (
        ["algorithm.name=opd", "servers.big.url=http://h/v1", "teacher.server=big", "teacher.megatron.a=1"],
        "teacher.* megatron is for a teacher that the learner loads; remove it",
    ),
    "fields of a reference that is not loaded": (
        ["reference.megatron.a=1"],
        "megatron is for a reference that kl_coef = 0 does not load; set kl_coef, or remove it",
    ),
    "a teacher without a path": (["teacher.pth=x"], "unknown key 'pth'; did you mean 'path'"),
    "score centering without likeliest tokens": (
        ["algorithm.loss=score_centered", "algorithm.correction=none"],
        "loss score_centered compares the likeliest tokens; set rollout.top_logprobs, such as 128",
    ),
    "score centering of a ratio that is corrected": (
        ["algorithm.loss=score_centered", "rollout.top_logprobs=8"],
        "correction tis_token would count that ratio twice",
    ),
    "likeliest tokens for nothing": (["rollout.top_logprobs=8"], "rollout.top_logprobs: loss ppo_clip reads no like"),
    "distillation from a teacher in the learner": (
        ["algorithm.name=distill", "teacher.path={folder}/same"],
        "loss distill compares the likeliest tokens; set teacher.top_logprobs, such as 32, with .teacher. server",
    ),
    "likeliest tokens of a teacher in the learner": (
        ["algorithm.name=distill", "teacher.path={folder}/same", "teacher.top_logprobs=8"],
        "top_logprobs are of a teacher on a server",
    ),
    "likeliest tokens of a cut distribution": (
        ["rollout.top_logprobs=8", "rollout.top_p=0.9"],
        "top_logprobs are over all tokens, and top_p or top_k leave some out",
    ),
    "warm-up only": (
        ["algorithm.name=ppo", "critic.warmup_steps=9", "run.steps=9"],
        "warmup_steps 9 of 9 run.steps would leave the policy as it is",
    ),
    "a critic's rate that would rise": (
        ["algorithm.name=ppo", "critic.schedule=cosine", "critic.min_learning_rate=1"],
        "critic: min_learning_rate 1 is more than the critic's learning rate",
    ),
    "no folder": (["algorithm.name=ppo", "critic.path={folder}/none"], "critic.path: .*no such model folder"),
    "another tokenizer": (
        ["algorithm.name=opd", "teacher.path={folder}/other"],
        r"teacher.path: the tokenizer in .*other is not that of model.path: token '2' is number 7 there and number 6",
    ),
    "a reference's tokenizer": (
        ["reference.kl_coef=1", "reference.path={folder}/other"],
        "reference.path: the tokenizer",
    ),
    "KL in the reward of an answer": (
        ["reference.kl_coef=1", "reference.kl_in=reward"],
        'kl_in = "reward" gives every token a reward of its own, and advantage grpo takes one per answer',
    ),
    "k1 in the loss": (["reference.kl_coef=1", "reference.kl=k1"], 'kl = "k1" in the loss pulls nowhere'),
    "unbiased in the reward": (
        ["algorithm.name=ppo", "reference.kl_coef=1", "reference.kl=unbiased", "reference.kl_in=reward"],
        'kl = "unbiased" is for the gradient of a loss',
    ),
    "negative": (["reference.kl_coef=-1"], "kl_coef must be >= 0"),
    "advantages nobody looks at": (
        ["algorithm.name=ppo", "algorithm.loss=sft"],
        "loss sft does not look at advantages",
    ),
    "nothing to learn": (["algorithm.advantage=none"], "leaves loss ppo_clip nothing to learn from"),
    "a filter that nothing passes": (
        ["algorithm.name=ppo", "rollout.group_size=1", 'algorithm.filters=["dynamic_sampling"]'],
        "which one of one always is",
    ),
    "the ratio twice": (
        ["algorithm.name=opd", "algorithm.loss=opd", "teacher.path={folder}/same"],
        "correction tis_token would count that ratio twice",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_models_that_do_not_fit_with_the_reason(case: str, folder: Path) -> None:
    overrides, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason) as caught:
        check(run(folder, *overrides))
    assert "\n" not in str(caught.value)


def test_critic_works_with_groups_of_one(folder: Path) -> None:
    made = run(folder, "algorithm.name=ppo", "rollout.group_size=1")
    assert "ppo" in str(summarize(made))  # summarize checks first


def test_a_model_may_have_fields_of_megatron_of_its_own(folder: Path) -> None:
    overrides = ["algorithm.name=ppo", "reference.kl_coef=0.1", "critic.megatron.init_method_std=0.5"]
    made = run(folder, *overrides)
    built = learner_models.models(made, registry.algorithm(made), optimizer=OptimizerSettings())
    assert {name: dict(model.megatron) for name, model in built.items()} == {
        "critic": {"init_method_std": 0.5},
        "reference": {},
    }
    with pytest.raises(ConfigError, match='^critic.megatron: backend = "reference" is not Megatron'):
        check(made)


def test_critic_starts_from_the_policy(folder: Path) -> None:
    made = run(folder, "algorithm.name=ppo", "critic.loss=huber", "critic.warmup_steps=3")
    optimizer = OptimizerSettings()
    (critic,) = learner_models.models(made, registry.algorithm(made), optimizer=optimizer).values()
    assert (critic.path, critic.head, critic.optimizer) == (folder / "policy", "values", optimizer)
    assert critic.objective == Critic(kind="huber", clip=0.5, huber_delta=10.0)
    rates = [learning_rates(made, step) for step in range(4)]
    assert [policy is None for policy, _ in rates] == [True, True, True, False]
    assert {critic for _, critic in rates} == {1e-4}
    faster = run(folder, "algorithm.name=ppo", "critic.learning_rate=1e-3")
    assert learning_rates(faster, 0)[1] == 1e-3


def test_a_critic_may_have_its_own_optimizer_and_schedule(folder: Path) -> None:
    own = {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-5, "max_grad_norm": 0.5}
    overrides = [f"critic.{key}={list(value) if isinstance(value, tuple) else value}" for key, value in own.items()]
    rates = ["critic.learning_rate=1e-3", "critic.schedule=linear", "critic.rate_warmup_steps=2", "run.steps=6"]
    made = run(folder, "algorithm.name=ppo", "critic.min_learning_rate=2e-4", *rates, *overrides)
    optimizer = OptimizerSettings(weight_decay=0.1)
    (critic,) = learner_models.models(made, registry.algorithm(made), optimizer=optimizer).values()
    assert critic.optimizer == OptimizerSettings(**own)  # type: ignore[arg-type]
    found = [learning_rates(made, step) for step in range(6)]
    assert [rate for _, rate in found] == pytest.approx([5e-4, 1e-3, 1e-3, 8e-4, 6e-4, 4e-4])
    assert {rate for rate, _ in found} == {1e-4}, "the policy's"
