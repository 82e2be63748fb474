"""Ranks that share experts may exchange tokens by DeepEP (learner.megatron: moe_token_dispatcher_type = "flex")."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from asyncrl.backends import huggingface
from asyncrl.backends.megatron import backend as megatron
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.transformer_config import refuse_options, transformer_config
from asyncrl.config.layout import Layout
from asyncrl.errors import ConfigError
from tests.harness.backends import LAYOUTS, distance, sequences, shares, started, tiny_model, weights
from tests.harness.deep_ep import DISPATCHER, Buffer

FLEX = {"moe_token_dispatcher_type": "flex"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3_moe")


def job(transformer: dict[str, Any], *, layout: Layout = LAYOUTS["megatron-ep2"], dtype: str = "bfloat16") -> Job:
    options = megatron.Options()
    made = Job(models={}, temperature=1.0, device="cpu", dtype=dtype, threads=1, layout=layout, options=options)
    return dataclasses.replace(made, transformer=transformer)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            job({"moe_flex_dispatcher_backend": "hybridep"}),
            "_backend: tokens travel by Megatron.s all-to-all",
        ),
        (job(FLEX, layout=Layout(ranks=2)), "no ranks exchange tokens with learner.expert_parallel = 1; remove it"),
        (job(FLEX, layout=LAYOUTS["megatron-ep2-etp2"]), "never tried with learner.expert_tensor_parallel"),
        (job({"moe_deepep_num_sms": 24}), 'num_sms is read with moe_token_dispatcher_type = "flex" alone; set that'),
        (job(FLEX, dtype="float32"), 'DeepEP sends bfloat16; set model.dtype = "bfloat16"'),
    ],
)
def test_an_exchange_that_cannot_be_is_refused_in_one_line(
    given: Job, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=f"^learner.megatron: moe_.*{problem}") as caught:
        refuse_options(given, huggingface.read_shape(folder), where="model.path", own={})
    assert "\n" not in str(caught.value)


def test_deep_ep_is_asked_for_only_where_it_is_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, given = huggingface.read_shape(folder), job({**FLEX, "moe_deepep_num_sms": 24})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="its package deep_ep is not installed; install it, or remove the field"):
        refuse_options(given, shape, where="model.path", own={})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    refuse_options(given, shape, where="model.path", own={})


def test_tokens_travel_by_all_to_all_unless_the_run_file_says_otherwise(folder: Path) -> None:
    """Megatron's own default gathers rows, which must have one length then."""
    shape = huggingface.read_shape(folder)
    for own, wanted in (({}, "alltoall"), (FLEX, "flex")):
        with quiet():
            assert transformer_config(job({}), shape, own=own).moe_token_dispatcher_type == wanted
            assert transformer_config(job(dict(own)), shape, own={}).moe_token_dispatcher_type == wanted


def exchanged(backend: Any) -> list[Any]:
    """Return what the layers of rank 0 still hold of the last tokens that travelled by DeepEP."""
    layers = [module for stage in backend._rank._loaded["policy"]._stages for module in stage.modules()]
    dispatchers = [one.token_dispatcher for one in layers if hasattr(one, "token_dispatcher")]
    exchanges = [one._comm_manager for one in dispatchers if hasattr(one, "_comm_manager")]
    return [probs for one in exchanges for probs in (one.token_probs, one.dispatched_probs)]


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_tokens_that_travel_by_deep_ep_are_computed_and_learned_alike(folder: Path) -> None:
    found = []
    flex = {"moe_token_dispatcher_type": DISPATCHER, "moe_deepep_num_sms": 24}
    for kind, transformer in (("megatron-1", {}), ("megatron-ep2", flex)):
        with started(kind, folder, transformer=transformer, options={"recompute": "full"}) as backend:
            step = backend.step(shares(kind, sequences()), learning_rate=1e-2)
            found.append((step.metrics["grad_norm"], weights(backend)))
            assert exchanged(backend) == [None, None] * (2 if transformer else 0)  # each layer's would be kept
    (ours, ours_after), (theirs, theirs_after) = found
    assert Buffer.num_sms == 24
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert distance(ours_after, theirs_after) < 1e-5
