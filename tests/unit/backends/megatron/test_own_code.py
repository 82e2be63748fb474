"""A user's own code in the Megatron learner: a family of models, and hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from asyncrl.backends import huggingface
from asyncrl.backends.megatron.hooks import MegatronHooks, load_hooks
from asyncrl.backends.megatron.job import Options
from asyncrl.backends.weight_map import weight_map
from asyncrl.errors import ConfigError
from tests.harness.backends import (
    LEARNING_RATE,
    VOCABULARY,
    distance,
    expected_logprobs,
    forward,
    hugging_face,
    sequences,
    shares,
    started,
    tiny_model,
    weights,
)
from tests.harness.packing import pack
from tests.integration.extending.toy_family import FAMILY


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arcee")
    torch.manual_seed(0)
    config = transformers.ArceeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        dtype=torch.float32,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_family_of_ones_own_with_a_module_of_transformers_has_its_logprobs_and_gradients(arcee: Path) -> None:
    model, batch = hugging_face(arcee), sequences(0)
    with started("megatron-1", arcee, family=FAMILY) as backend, started("reference", arcee) as reference:
        (micro_batch,) = pack(batch, max_tokens=999)
        expected = [expected_logprobs(model, one.tokens) for one in batch]
        made = forward(backend, "megatron-1", micro_batch)
        for number, index in enumerate(micro_batch.sequences):
            begin, end = micro_batch.boundaries[number : number + 2]
            assert abs(made[begin:end] - expected[index]).max() < 1e-4
        for number in range(2):
            batch = sequences(number)
            backend.step(shares("megatron-1", batch), learning_rate=LEARNING_RATE)
            reference.step(shares("reference", batch), learning_rate=LEARNING_RATE)
        exported = weights(backend)
        assert exported.keys() == dict(model.named_parameters()).keys()
        assert distance(exported, weights(reference)) < 1e-4


def test_a_family_of_ones_own_is_named_in_the_run_file(arcee: Path) -> None:
    with pytest.raises(ConfigError, match="holds a ArceeForCausalLM; the megatron backend supports .*model.family"):
        huggingface.read_shape(arcee)
    own = huggingface.load_family("tests.integration.extending.toy_family:FAMILY")
    shape = huggingface.read_shape(arcee, own=own)
    assert "model.layers.1.mlp.up_proj.weight" in {name for entry in weight_map(shape) for name in entry.huggingface}
    with pytest.raises(ConfigError, match=r"^model.family: '.*:layer' is a function, not a Family"):
        huggingface.load_family("tests.integration.extending.toy_family:layer")
    nothing: Any = lambda config: None  # noqa: E731
    no_shape = dataclasses.replace(FAMILY, shape=nothing)
    with pytest.raises(ConfigError, match=r"the family's shape returned a NoneType, not a ModelShape"):
        huggingface.read_shape(arcee, own=no_shape)


SEEN: list[str] = []


class Recorder(MegatronHooks):
    """Records when it is called, and halves a weight before the first forward pass."""

    def after_start(self, models: Mapping[str, Sequence[torch.nn.Module]]) -> None:
        SEEN.append(f"start {' '.join(models)}")

    def before_forward(self, model: str, stages: Sequence[torch.nn.Module]) -> None:
        SEEN.append(f"forward {model}")
        with torch.no_grad():
            stages[0].get_parameter("decoder.final_layernorm.weight").mul_(0.5)

    def before_step(
        self, model: str, stages: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        SEEN.append(f"step {model} {len(optimizers)}")
        if len(SEEN) > 3:
            raise ValueError("no more")


def test_hooks_see_the_start_and_come_before_logprobs_and_steps(tmp_path: Path) -> None:
    SEEN.clear()
    folder = tiny_model(tmp_path / "model")
    options: dict[str, Any] = {"hooks": f"{__name__}:Recorder"}
    with started("megatron-1", folder, options=options) as backend:
        batch = shares("megatron-1", sequences())
        before = weights(backend)["model.norm.weight"]
        backend.forward(batch)
        assert torch.equal(weights(backend)["model.norm.weight"], before / 2)
        backend.step(batch, learning_rate=LEARNING_RATE)
        assert SEEN == ["start policy", "forward policy", "step policy 1"]
        kept = weights(backend)
        with pytest.raises(ValueError, match="no more"):
            backend.step(batch, learning_rate=LEARNING_RATE)
        assert distance(weights(backend), kept) == 0.0


def test_what_is_no_class_of_hooks_is_refused_in_one_line() -> None:
    assert load_hooks(Options().hooks).before_forward("policy", []) is None  # type: ignore[func-returns-value]
    with pytest.raises(
        ConfigError, match=r"^learner.options.hooks: '.*:sequences' is no class derived from .*MegatronHooks$"
    ):
        load_hooks("tests.harness.backends:sequences")


def test_the_hooks_of_the_page_change_the_model_before_the_first_step(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    with started("megatron-1", folder, options={"hooks": "tests.integration.extending.toy_hooks:HalveHead"}) as backend:
        half = weights(backend)["lm_head.weight"]
    assert torch.equal(half, hugging_face(folder).lm_head.weight / 2)
