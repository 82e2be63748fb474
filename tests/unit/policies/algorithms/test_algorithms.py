"""The table of algorithms: every row trains, however the batch is cut; invalid settings are refused with the reason."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.actors.learner.training_step import train_batch
from asyncrl.adapters import registry
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.likeliest import Likeliest
from asyncrl.policies.advantages.groups import GRPO
from asyncrl.policies.advantages.returns import GAE
from asyncrl.policies.advantages.table import ADVANTAGES
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.critic import Critic
from asyncrl.policies.algorithms.spec import AlgorithmSpec, resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.corrections.masks import GeoMask
from asyncrl.policies.corrections.table import CORRECTIONS
from asyncrl.policies.corrections.weights import TISToken
from asyncrl.policies.losses.aggregation import AGGREGATIONS, TokenMean
from asyncrl.policies.losses.kl import Penalty
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ppo import PPOClip
from asyncrl.policies.losses.table import LOSSES
from tests import ROOT
from tests.harness.algorithms import run
from tests.harness.backends import (
    LEARNING_RATE,
    SETTINGS,
    VOCABULARY,
    distance,
    expected_logprobs,
    hugging_face,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack

PAGE = ROOT / "docs" / "guides" / "algorithms.md"
REFERENCE = ROOT / "docs" / "reference" / "algorithms.md"
VERSION, MAX_STALENESS = 7, 4
REWARDS = ((1.0, 0.0, 0.25, 0.0), (0.0, 1.0, 1.0, 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the policy, of one layer, and in "another" the same model with other weights."""
    made = tiny_model(tmp_path_factory.mktemp("model"), num_layers=1)
    different(made, made / "another")
    return made


def different(folder: Path, to: Path) -> None:
    model = hugging_face(folder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(to)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return hugging_face(folder)


@functools.cache
def group(group_id: int, rewards: tuple[float, ...], *, model: Any, noise: float = 0.5) -> TrajectoryGroup:
    """Make answers of versions 3 to 7 whose behavior logprobs deviate from the model's logprobs by ``noise``."""
    random = np.random.default_rng(group_id)
    prompt = random.integers(4, VOCABULARY, 3).astype(np.int32)
    return TrajectoryGroup(
        group_id=group_id,
        prompt_tokens=prompt,
        trajectories=tuple(
            trajectory(prompt, reward, age=(group_id + index) % 5, random=random, model=model, noise=noise)
            for index, reward in enumerate(rewards)
        ),
    )


def trajectory(
    prompt: np.ndarray, reward: float, *, age: int, random: np.random.Generator, model: Any, noise: float
) -> Trajectory:
    length = int(random.integers(4, 14))
    tokens = random.integers(4, VOCABULARY, length).astype(np.int32)
    trained = expected_logprobs(model, np.concatenate([prompt, tokens]))[len(prompt) :]
    mask = np.arange(length) != 2  # the third token is an observation
    behavior = np.minimum(trained + noise * random.standard_normal(length), -1e-3)
    return Trajectory(
        tokens=tokens,
        response_mask=mask,
        behavior_logprobs=np.where(mask, behavior, 0).astype(np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=VERSION - age),),
        reward=reward,
        finish_reason="stop",
        teacher_likeliest=Likeliest.of([[(-0.5, 5), (-2.0, 7)]] * length),
    )


def batch_of(
    algorithm: Algorithm, model: Any, *, rewards: tuple[tuple[float, ...], ...] = REWARDS, noise: float = 0.5
) -> Batch:
    groups = [group(index, of_group, model=model, noise=noise) for index, of_group in enumerate(rewards)]
    return batch.build(
        groups, algorithm=algorithm, policy_version=VERSION, max_staleness=MAX_STALENESS, resume_points={}
    )


def auxiliary(algorithm: Algorithm, folder: Path) -> dict[str, AuxiliaryModel]:
    """Return the models that the row needs: a critic from the policy's folder, other models from ``another``."""
    made = {name: AuxiliaryModel(path=folder / "another") for name in algorithm.models}
    if "critic" in made:
        made["critic"] = AuxiliaryModel(path=folder, head="values", objective=Critic(), optimizer=SETTINGS)
    return made


def trained(
    algorithm: Algorithm, batch: Batch, folder: Path, *, kind: str = "reference", max_tokens: int = 1000
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the metrics of one step, and the weights after it."""
    models = auxiliary(algorithm, folder)
    with started(kind, folder, algorithm=algorithm, **({"auxiliary": models} if models else {})) as backend:
        shares = [pack(batch.sequences, max_tokens=max_tokens)]
        rates = {"learning_rate": LEARNING_RATE, "critic_learning_rate": LEARNING_RATE}
        result = train_batch(backend, batch, [shares], algorithm=algorithm, step=0, **rates)
        return dict(result.metrics), weights(backend)


# -- every row trains --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "opd"])
def test_rows_train_alike_on_megatron(name: str, folder: Path, model: Any) -> None:
    algorithm = resolve(
        ALGORITHMS[name],
        correction="tis_sequence + self_norm",
        entropy_coef=0.01,
        kl=Penalty(coef=0.1, estimate="unbiased", place="loss"),
    )
    batch = batch_of(algorithm, model)
    expected, expected_weights = trained(algorithm, batch, folder)
    metrics, got = trained(algorithm, batch, folder, kind="megatron-1", max_tokens=40)
    same = [name for name in ("grad_norm", "kl", "teacher_kl", "critic/loss", "critic/grad_norm") if name in expected]
    assert [metrics[name] for name in same] == pytest.approx([expected[name] for name in same], rel=1e-4)
    assert distance(got, expected_weights) < 1e-4


CUTS: dict[str, dict[str, Any]] = {name: {"name": name} for name in ALGORITHMS} | {
    "after": {"name": "grpo", "correction": "icepop", "denominator": "after", "options": {"low": 0.8, "high": 1.25}},
    "after, by answers": {
        "name": "gspo",
        "correction": "icepop",
        "denominator": "after",
        "entropy_coef": 0.1,
        "options": {"icepop.low": 0.8, "icepop.high": 1.25},
    },
    "around behavior": {"name": "sapo", "correction": "none", "options": {"anchor": "behavior"}},
    "self_norm": {"name": "grpo", "correction": "tis_token + self_norm"},
    "self_norm of sequences": {"name": "grpo", "correction": "tis_sequence + self_norm"},
    "masks": {"name": "dr_grpo", "correction": "mis_sequence + opsm + veto", "entropy_coef": 0.1},
    "prompt_mean": {"name": "gpg", "aggregation": "prompt_mean"},
    "KL after rejection": {
        "name": "grpo",
        "correction": "icepop",
        "denominator": "after",
        "kl": Penalty(coef=0.1, estimate="k3", place="loss"),
    },
    "KL in the reward": {"name": "reinforce_pp", "kl": Penalty(coef=0.1, estimate="k1", place="reward")},
}


@pytest.mark.parametrize("case", CUTS)
def test_every_row_trains_on_stale_data_and_gradients_do_not_depend_on_how_the_batch_is_cut(
    case: str, folder: Path, model: Any
) -> None:
    parts = dict(CUTS[case])
    algorithm = resolve(ALGORITHMS[parts.pop("name")], **parts)
    batch = batch_of(algorithm, model)
    whole, whole_weights = trained(algorithm, batch, folder)
    cut, cut_weights = trained(algorithm, batch, folder, max_tokens=20)
    assert len(pack(batch.sequences, max_tokens=20)) > 3
    assert np.isfinite(whole["loss"])
    assert whole["grad_norm"] > 1e-3
    assert whole["learner/skipped_steps"] == 0
    assert cut["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-4, abs=1e-6)
    assert distance(cut_weights, whole_weights) < 5e-5


# -- switches ----------------------------------------------------------------------------------------------------------


def policy_gradient_norm(model: Any, batch: Batch, *, correction: str) -> float:
    """Return |grad| of -sum(w A logprob) / divisor, with explicit weights and divisor."""
    loss, divisor = torch.zeros(()), 0.0
    for sequence in batch.sequences:
        tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
        mask = torch.from_numpy(sequence.response_mask)[1:]
        all_logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], dim=-1)
        logprobs = all_logprobs.gather(-1, tokens[1:, None])[:, 0][mask]
        ratio = (logprobs.detach() - torch.from_numpy(sequence.behavior_logprobs)[1:][mask]).exp()
        if correction == "icepop":  # "after": only kept tokens count
            weight = torch.where((ratio >= 0.8) & (ratio <= 1.25), ratio, 0.0)
            divisor += float((weight > 0).sum())
        else:  # self_norm: the weights have mean 1
            weight = ratio.clamp(max=2.0)
            divisor += float(weight.sum())
        loss = loss - (weight * torch.from_numpy(sequence.advantages)[1:][mask] * logprobs).sum()
    gradients = torch.autograd.grad(loss / divisor, list(model.parameters()), allow_unused=True)
    return float(torch.stack([g.norm() for g in gradients if g is not None]).norm())


@pytest.mark.parametrize(
    ("parts", "correction"),
    [
        ({"correction": "icepop", "options": {"low": 0.8, "high": 1.25}, "denominator": "after"}, "icepop"),
        ({"correction": "tis_token + self_norm"}, "self_norm"),
    ],
)
def test_after_and_self_norm_divide_by_what_their_formulas_say(
    parts: dict[str, Any], correction: str, folder: Path, model: Any
) -> None:
    algorithm = resolve(ALGORITHMS["grpo"], **parts)
    batch = batch_of(algorithm, model)
    metrics, _ = trained(algorithm, batch, folder, max_tokens=20)
    assert metrics["grad_norm"] == pytest.approx(policy_gradient_norm(model, batch, correction=correction), rel=1e-4)
    unscaled = resolve(
        ALGORITHMS["grpo"], correction=parts["correction"].split(" +")[0], options=parts.get("options", {})
    )
    assert trained(unscaled, batch, folder)[0]["grad_norm"] != pytest.approx(metrics["grad_norm"], rel=0.01)


def test_entropy_coef_raises_entropy_and_nothing_else(folder: Path, model: Any) -> None:
    same = ((1.0, 1.0, 1.0),) * 2  # without advantages, only the entropy trains
    plain = resolve(ALGORITHMS["grpo"])
    assert trained(plain, batch_of(plain, model, rewards=same), folder)[0]["grad_norm"] == 0
    norms = []
    for coefficient in (0.1, 0.2):
        algorithm = resolve(ALGORITHMS["grpo"], entropy_coef=coefficient)
        batch = pack(batch_of(algorithm, model, rewards=same).sequences, max_tokens=1000)
        with started("reference", folder, algorithm=algorithm) as backend:
            first, second = (backend.step([batch], learning_rate=LEARNING_RATE).metrics for _ in range(2))
        norms.append(first["grad_norm"])
        assert second["entropy"] > first["entropy"]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)


@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled_ppo", "gspo", "sapo"])
def test_a_clip_around_the_learner_does_not_bind_in_the_one_step_of_a_batch(
    loss: str, folder: Path, model: Any
) -> None:
    plain, clipped = (resolve(ALGORITHMS["grpo"], loss=name) for name in ("reinforce", loss))
    batch = batch_of(plain, model)
    expected, metrics = trained(plain, batch, folder)[0], trained(clipped, batch, folder)[0]
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert metrics["offpolicy/clip_fraction"] == 0


@pytest.mark.parametrize("loss", ["coupled_ppo", "aspo", "dppo", "gspo"])
def test_a_clip_around_the_behavior_policy_binds(loss: str, folder: Path, model: Any) -> None:
    options = {"anchor": "behavior"} if loss == "gspo" else {}
    algorithm = resolve(ALGORITHMS["grpo"], loss=loss, correction="none", options=options)
    metrics, _ = trained(algorithm, batch_of(algorithm, model, noise=1.5), folder)
    assert 0 < metrics["offpolicy/clip_fraction"] < 1
    assert metrics["grad_norm"] > 1e-3


# -- parts and options by name -----------------------------------------------------------------------------------------


def test_a_part_that_is_exchanged_takes_its_own_defaults() -> None:
    assert resolve(ALGORITHMS["dapo"]).loss.options["clip_high"] == 0.28
    assert resolve(ALGORITHMS["dapo"], loss="gspo").loss.options["clip_high"] == 4e-4


def test_a_row_sets_options_of_any_of_its_parts() -> None:
    spec = AlgorithmSpec(
        name="mine",
        paper="",
        advantage=GRPO(eps=1e-4),
        loss=PPOClip(),
        aggregation=TokenMean(),
        correction=(TISToken(cap=5.0), GeoMask(low=0.9)),
    )
    made = resolve(spec)
    assert [step.options for step in made.correction] == [{"cap": 5.0}, {"low": 0.9, "high": 1.01}]
    assert made.advantage.options["eps"] == 1e-4
    assert [step.options for step in resolve(spec, correction="tis_token").correction] == [{"cap": 2.0}]


@pytest.mark.parametrize("prefix", ["correction", "veto"])
def test_a_prefix_says_whose_option_is_meant(prefix: str) -> None:
    made = resolve(
        ALGORITHMS["m2po"],
        correction="tis_token + veto",
        options={"loss.threshold": 0.1, f"{prefix}.threshold": 1e-3},
    )
    assert made.loss.options["threshold"] == 0.1
    assert made.correction[1].options["threshold"] == 1e-3


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if resolve(ALGORITHMS[name]).advantage.has_group_baseline]
)
def test_a_group_of_one_has_no_baseline(name: str, folder: Path) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    alone = run(folder, f"algorithm.name={name}", "rollout.group_size=1")
    with pytest.raises(ConfigError, match="group_size 1 gives the advantage .* no baseline"):
        check(alone)
    check(run(folder, "rollout.group_size=1", "algorithm.name=topr"))


# -- docs/guides/algorithms.md ------------------------------------------------------------------------------------


def test_every_algorithm_is_in_the_guide_and_everything_there_is_to_choose_in_the_reference() -> None:
    guide, reference = (set(re.findall(r"`(\w+)`", page.read_text())) for page in (PAGE, REFERENCE))
    assert ALGORITHMS.keys() <= guide
    assert {*ALGORITHMS, *ADVANTAGES, *LOSSES, *AGGREGATIONS, *CORRECTIONS} <= reference


def test_the_run_files_of_the_page_mean_what_it_says(tmp_path: Path) -> None:
    blocks = [
        block
        for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if not any(one in block for one in ("my_losses", "response_key", "[servers"))  # other tests have these
    ]
    plain, ppo, opd, near, exchanged = (registry.algorithm(run(tmp_path, text=block)) for block in blocks)
    assert (ppo.models, opd.models, near.models) == ({"critic"}, {"teacher"}, {"reference"})
    assert ppo.advantage == GAE(lam=0.95)
    assert near.kl == Penalty(coef=0.001, estimate="unbiased", place="loss")
    assert (plain.name, plain.loss.name, plain.correction_name) == ("grpo", "ppo_clip", "tis_token")
    assert (exchanged.loss.name, exchanged.correction_name) == ("sapo", "tis_token + geo_mask")
    assert [dict(step.options) for step in exchanged.correction] == [{"cap": 3.0}, {"low": 0.9, "high": 1.1}]


def test_the_loss_that_the_page_adds_in_ten_lines_trains(
    folder: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module,) = re.findall(r"```python\n# my_losses\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_losses.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = "algorithm.loss=my_losses:Hopeful"
    algorithm = registry.algorithm(run(tmp_path, chosen, "algorithm.options={bad=0.2}"))
    assert isinstance(algorithm.loss, Loss)
    assert algorithm.loss.options == {"bad": 0.2}
    for options, reason in (
        ("{bad=1.5}", r"algorithm.options: bad of hopeful must be >= 0 and <= 1, got 1.5"),
        ('{bad="half"}', "algorithm.options: bad must be a number, got 'half'"),
        ("{bed=0.2}", r"no option 'bed'; did you mean 'bad'\?"),
    ):
        with pytest.raises(ConfigError, match=reason):
            registry.algorithm(run(tmp_path, chosen, f"algorithm.options={options}"))
    with pytest.raises(ConfigError, match="has no 'Hopful'; did you mean 'Hopeful'"):
        registry.algorithm(run(tmp_path, "algorithm.loss=my_losses:Hopful"))
    metrics, _ = trained(algorithm, batch_of(algorithm, model), folder)
    plain = resolve(ALGORITHMS["grpo"], loss="reinforce")
    assert np.isfinite(metrics["loss"])
    assert metrics["grad_norm"] != pytest.approx(trained(plain, batch_of(plain, model), folder)[0]["grad_norm"])
