"""Checks that all engines share."""

from __future__ import annotations

from asyncrl.tensors.model_tensors import trained_shapes


def test_layers_that_predict_further_tokens_are_not_waited_for() -> None:
    """DeepSeek-V3's folder has layers 0..60 and an additional layer 61; the learner trains and exports 0..60."""
    folder = {"model.layers.1.norm": (2,), "model.layers.2.norm": (2,), "model.layers.21.norm": (2,), "lm_head": (2,)}
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    assert list(trained_shapes(folder, config)) == ["model.layers.1.norm", "model.layers.21.norm", "lm_head"]
    assert trained_shapes(folder, {"num_hidden_layers": 2}) == folder


def test_rotary_frequencies_of_older_conversions_are_not_waited_for() -> None:
    """Engines compute them; Llama-2-7b-hf has them among its weights."""
    folder = {"model.layers.0.self_attn.rotary_emb.inv_freq": (64,), "model.layers.0.self_attn.q_proj.weight": (2, 2)}
    assert list(trained_shapes(folder, {"num_hidden_layers": 1})) == ["model.layers.0.self_attn.q_proj.weight"]
