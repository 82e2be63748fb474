"""Model families: how they read config.json, which models they refuse, and which parts of a model each rank holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.backends import flops, huggingface, weight_cuts
from asyncrl.backends.families.table import FAMILIES
from asyncrl.backends.megatron import refusals
from asyncrl.backends.weight_map import Part, weight_map
from asyncrl.config.layout import Layout
from asyncrl.data import model_folder
from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.errors import ConfigError
from asyncrl.tensors.transformers_models import by_names_in_files
from tests.harness.backends import started, tiny_model, weights


def edited(folder: Path, **changes: Any) -> Path:
    """Change entries of ``folder``'s config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_cheap_check_knows_all_families() -> None:
    """`asyncrl check` uses the quick look before torch is imported."""
    assert set(model_folder.SUPPORTED_ARCHITECTURES) == set(FAMILIES)


def test_a_mixture_says_which_of_its_layers_are_dense(tmp_path: Path) -> None:
    tiny_model(tmp_path, architecture="qwen3_moe")
    shape = huggingface.read_shape(edited(tmp_path, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [shape.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]


def test_a_config_of_experts_alone_needs_no_size_of_dense_layers(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, architecture="qwen3_5_moe")
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with started("megatron-1", folder) as backend:
        assert weights(backend).keys() == load_file(folder / "model.safetensors").keys()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "minimax_m2"])
def test_weights_of_a_mixture_survive_being_cut_into_shards(tmp_path: Path, shards: int, architecture: str) -> None:
    tiny_model(tmp_path, architecture=architecture)
    shape, original = huggingface.read_shape(tmp_path), load_file(tmp_path / "model.safetensors")
    seen = set()
    for entry in weight_map(shape):
        cut = weight_cuts.fuse([original[n] for n in entry.huggingface], entry.cut, shape, tensor_parallel=shards)
        assert len({shard.shape for shard in cut}) == 1
        for name, tensor in zip(entry.huggingface, weight_cuts.unfuse(cut, entry.cut, shape), strict=True):
            assert torch.equal(tensor, original[name])
            seen.add(name)
    assert seen == set(original)


def test_a_published_qwen3_5_is_trained_as_it_is_but_for_its_draft_layers(tmp_path: Path) -> None:
    """Engines wait for the tensors that are exported, under the names of the folder."""
    make_tiny_vision_model(tmp_path, architecture="qwen3_5_moe")
    trained, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    save_file({**trained, "mtp.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edited(tmp_path, text_config=config["text_config"] | {"mtp_num_hidden_layers": 1, "attn_output_gate": True})
    model_folder.check_model(tmp_path)
    shape = huggingface.read_shape(tmp_path)
    refusals.require_tensors_of_engines(tmp_path, shape)
    assert {name for entry in weight_map(shape) for name in entry.huggingface} == trained.keys()


def test_parts_of_a_model_number_layers_and_experts_by_their_place_in_the_whole(tmp_path: Path) -> None:
    """Two stages of one layer x four ranks of eight experts: together they hold every tensor exactly once."""
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="qwen3_moe"))
    parts = [
        Part(
            layers=range(stage, stage + 1),
            experts=range(first, first + 4),
            has_embedding=not stage,
            has_output=stage == 1,
        )
        for stage in (0, 1)
        for first in (0, 4)
    ]
    maps = [weight_map(shape, part=part) for part in parts]
    second = {entry.megatron: entry.huggingface for entry in maps[3]}
    assert second["decoder.layers.0.mlp.experts.down"][0] == "model.layers.1.mlp.experts.4.down_proj.weight"
    of_experts = [name for entries in maps for entry in entries if entry.is_of_experts for name in entry.huggingface]
    others = [
        name for entries in maps[::2] for entry in entries if not entry.is_of_experts for name in entry.huggingface
    ]
    assert sorted(of_experts + others) == sorted(load_file(tmp_path / "model.safetensors"))


def test_a_last_stage_has_a_copy_of_a_tied_embedding(tmp_path: Path) -> None:
    shape = huggingface.read_shape(tiny_model(tmp_path, tied=True))
    last = Part(layers=range(1, 2), experts=range(0), has_embedding=False)
    assert weight_map(shape, part=last)[-1].huggingface == ("model.embed_tokens.weight",)


def test_a_token_s_flops_are_those_of_the_experts_that_it_visits(tmp_path: Path) -> None:
    """Per layer, besides attention: a router of 64 x 8, and two experts of three 64 x 32 matrices."""
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="qwen3_moe"))
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 64 * 8 + 2 * 3 * 64 * 32
    assert flops.matrix_parameters(shape) == 2 * per_layer + 64 * shape.vocabulary_size


def test_a_token_s_flops_include_the_shared_expert_and_its_gate(tmp_path: Path) -> None:
    """Per layer: attention, a router of 64 x 8, two experts of 64 x 32, a shared one of 64 x 64, its gate of 64."""
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="qwen2_moe"))
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 64 * 8 + 2 * 3 * 64 * 32 + 3 * 64 * 64 + 64
    assert flops.matrix_parameters(shape) == 2 * per_layer + 64 * shape.vocabulary_size


def test_a_token_s_flops_in_linear_attention_are_those_of_its_products_and_states(tmp_path: Path) -> None:
    """Two key heads of 16 and four value heads of 32: inputs 64 x (32 + 32 + 2 x 128 + 8), outputs 128 x 64, a
    convolution of 4 x 192, and three times four states of 16 x 32. The other layer's queries have gates.
    """
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="qwen3_next"))
    linear = 64 * (32 + 32 + 2 * 128 + 8) + 128 * 64 + 4 * 192 + 3 * 4 * 16 * 32
    full = 3 * 64 * 64 + 2 * 64 * 32
    feed_forward = 64 * 8 + 2 * 3 * 64 * 32 + 3 * 64 * 64 + 64
    assert [shape.has_linear_attention(layer) for layer in range(2)] == [True, False]
    assert flops.matrix_parameters(shape) == linear + full + 2 * feed_forward + 64 * shape.vocabulary_size
    scores = 3 * 10 * 10 * 2 * 4 * 16  # in one layer of two
    assert flops.training_flops(shape, [10]) == 6 * flops.matrix_parameters(shape) * 10 + scores


def test_flops_exclude_scores_outside_the_window(tmp_path: Path) -> None:
    """For 10 tokens, a full layer has 2 x 50 scores per head; with a window of 8, it has 2 x (10 x 8 - 8 x 8 / 2)."""
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="gemma3"))
    products = 6.0 * flops.matrix_parameters(shape) * 10
    assert [shape.window(layer) for layer in range(2)] == [8, 0]
    assert flops.training_flops(shape, [10]) == products + 3.0 * (100 + 96) * 2 * shape.num_heads * shape.head_size


def test_a_token_s_flops_in_latent_attention_are_those_of_its_six_products(tmp_path: Path) -> None:
    """Queries 64 x 32 and 32 x 4 (16 + 8); keys and values 64 x (32 + 8) and 32 x 4 (16 + 16); output 4 x 16 x 64."""
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="deepseek_v3"))
    attention = 64 * 32 + 32 * 96 + 64 * 40 + 32 * 128 + 64 * 64
    dense, sparse = 3 * 64 * 128, 64 * 16 + (4 + 1) * 3 * 64 * 32
    assert flops.matrix_parameters(shape) == 2 * attention + dense + sparse + 64 * shape.vocabulary_size
    products = 3 * 2 * 10 * 10 * 4 * (24 + 16)  # three passes, two layers, half of the scores
    assert flops.training_flops(shape, [10]) == 6 * flops.matrix_parameters(shape) * 10 + products


def test_flops_of_sparse_attention_are_those_of_the_keys_that_are_chosen_and_of_their_choice(tmp_path: Path) -> None:
    """Of 10 tokens, the last two choose 8 of 9 or 10 keys, by 16 heads of 16: products 32 x 256 and 64 x (16 + 16)."""
    shape = huggingface.read_shape(tiny_model(tmp_path, architecture="deepseek_v32"))
    products = 6 * flops.matrix_parameters(shape)
    assert flops.training_flops(shape, [8]) == products * 8 + 3 * 2 * 8 * 8 * 4 * (24 + 16)
    attention = 3 * 2 * (10 * 10 - 2 * 2) * 4 * (24 + 16)
    choice = 2 * (2 * 10 * (32 * 256 + 64 * 32) + 256 * (10 * 10 - 8 * 8))
    assert flops.training_flops(shape, [10]) == products * 10 + attention + choice


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("deepseek_v3", {"num_experts_per_tok": 2}, ["topk_group = 2", "best 2 // 2 experts"]),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, ["rms_norm_eps = 1e-05"]),
        ("deepseek_v32", {"index_kpool": 4}, ["index_kpool = 4"]),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, ["a first layer that uses the choice of a layer"]),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor = 0.5"],
        ),
        ("mistral", {"sliding_window": 4096}, ["sliding_window = 4096"]),
        ("glm4_moe", {"norm_topk_prob": False}, ["norm_topk_prob = False"]),
        ("glm4_moe", {"num_experts_per_tok": 1}, ["num_experts_per_tok = 1 and norm_topk_prob = true"]),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            ["num_experts_per_tok = 1 and norm_topk_prob = true"],
        ),
        ("qwen3_moe", {"num_experts_per_tok": 1}, ["num_experts_per_tok = 1 and norm_topk_prob = true"]),
        ("mixtral", {"num_experts_per_tok": 1}, ["num_experts_per_tok = 1: Megatron"]),
        ("mixtral", {"sliding_window": 4096}, ["sliding_window = 4096"]),
        ("qwen3_next", {"linear_num_value_heads": 3}, ["linear_num_value_heads = 3, no multiple of"]),
        ("qwen3_next", {"output_gate_type": "sigmoid"}, ["output_gate_type = 'sigmoid'"]),
        ("minimax_m2", {"rotary_dim": 16}, ["rotary_dim = 16", "`asyncrl import-model` writes both"]),
        ("minimax_m2", {"attn_type_list": [1, 0]}, ["a 0 in attn_type_list"]),
        ("deepseek_v3", {"v_head_dim": 25}, ["v_head_dim = 25, more than qk_nope_head_dim + qk_rope_head_dim = 24"]),
        ("gemma3", {"sliding_window": None}, ["sliding_window = None and layers of sliding_attention"]),
        ("qwen3", {"num_attention_heads": 5}, ["num_attention_heads = 5, no multiple of num_key_value_heads = 2"]),
        ("qwen3", {"head_dim": 7}, ["heads of odd size, 7"]),
        ("qwen3_moe", {"num_experts_per_tok": 99}, ["num_experts_per_tok = 99 of 8 experts"]),
        ("deepseek_v3", {"n_group": 3}, ["n_group = 3 groups of 16 experts"]),
        ("deepseek_v3", {"n_group": 16}, ["n_group = 16 groups of 16 experts"]),
    ],
    ids=[
        "groups",
        "eps",
        "pooled keys",
        "shared first",
        "part",
        "window",
        "scores",
        "glm-one",
        "deepseek-one",
        "qwen-one",
        "mixtral-one",
        "mixtral-window",
        "heads",
        "gate",
        "rotary",
        "lightning",
        "values",
        "no window",
        "shared keys",
        "odd heads",
        "more than all experts",
        "uneven groups",
        "groups of one",
    ],
)
def test_unsupported_config_values_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], words: list[str]
) -> None:
    folder = edited(tiny_model(tmp_path, architecture=architecture), **changes)
    with pytest.raises(ConfigError) as caught:
        huggingface.read_shape(folder)
    for word in [str(folder), "does not support", *words]:
        assert word in str(caught.value)


def test_choosing_all_groups_equals_no_groups(tmp_path: Path) -> None:
    folder = edited(tiny_model(tmp_path, architecture="deepseek_v3"), topk_group=4)
    experts = huggingface.read_shape(folder).experts
    assert experts is not None
    assert experts.num_groups == 1


def test_experts_have_the_names_of_the_folder() -> None:
    """The tensors are views: a write to them changes the model. gpt-oss has fused experts in its files."""
    gate_up = torch.arange(2 * 6 * 3.0).view(2, 6, 3)
    model = {
        "a.mlp.experts.gate_up_proj": gate_up,
        "a.mlp.experts.down_proj": torch.zeros(2, 3, 3),
        "a.norm": torch.ones(3),
    }
    named = by_names_in_files(model, model_type="qwen3_moe")
    assert list(named) == [
        *(f"a.mlp.experts.{expert}.{x}_proj.weight" for expert in (0, 1) for x in ("gate", "up")),
        *(f"a.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)),
        "a.norm",
    ]
    assert torch.equal(named["a.mlp.experts.1.up_proj.weight"], gate_up[1, 3:])
    named["a.mlp.experts.0.gate_proj.weight"].zero_()
    assert not gate_up[0, :3].any()
    assert list(by_names_in_files(model, model_type="gpt_oss")) == list(model)
    assert list(by_names_in_files(model, model_type="mixtral")) == [
        *(f"a.block_sparse_moe.experts.{expert}.{x}.weight" for expert in (0, 1) for x in ("w1", "w3")),
        *(f"a.block_sparse_moe.experts.{expert}.w2.weight" for expert in (0, 1)),
        "a.norm",
    ]


def test_linear_attention_is_cut_by_its_key_heads(tmp_path: Path) -> None:
    shape = huggingface.read_shape(edited(tiny_model(tmp_path, architecture="qwen3_next"), linear_num_key_heads=1))
    with pytest.raises(ConfigError, match="2 does not divide the model's linear_num_key_heads, 1"):
        weight_cuts.require_divisible(shape, 2)


def test_latent_attention_is_cut_by_its_heads(tmp_path: Path) -> None:
    """DeepSeek-V3's code ignores num_key_value_heads, whose default is 128."""
    folder = edited(tiny_model(tmp_path, architecture="deepseek_v3"), num_attention_heads=4, num_key_value_heads=1)
    weight_cuts.require_divisible(huggingface.read_shape(folder), 2)
    with pytest.raises(ConfigError, match="2 does not divide the model's num_attention_heads, 3"):
        weight_cuts.require_divisible(huggingface.read_shape(edited(folder, num_attention_heads=3)), 2)


def test_every_rank_needs_a_token_of_the_vocabulary(tmp_path: Path) -> None:
    folder = edited(tiny_model(tmp_path, architecture="qwen3"), num_key_value_heads=4)
    for vocabulary in (7, 8):
        weight_cuts.require_divisible(huggingface.read_shape(edited(folder, vocab_size=vocabulary)), 4)
    for vocabulary in (5, 6):
        with pytest.raises(ConfigError, match=f"vocabulary of {vocabulary} leaves the last of 4 ranks without a token"):
            weight_cuts.require_divisible(huggingface.read_shape(edited(folder, vocab_size=vocabulary)), 4)


def test_an_output_layer_that_is_tied_must_not_differ_from_the_embedding(tmp_path: Path) -> None:
    """transformers would not tie them, and other engines would."""
    folder = edited(tiny_model(tmp_path, architecture="qwen3"), tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    refusals.require_trainable(folder, where="model.path", layout=Layout(), transformer={})
    save_file(weights | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^teacher.path: .*lm_head.weight differs from model.embed_tokens.weight"):
        refusals.require_trainable(folder, where="teacher.path", layout=Layout(), transformer={})


@pytest.mark.parametrize("changes", [{"hidden_size": 60}, {"moe_intermediate_size": 20}])
def test_expert_sizes_must_be_multiples_of_16_bytes(tmp_path: Path, changes: dict[str, int]) -> None:
    shape = huggingface.read_shape(edited(tiny_model(tmp_path, architecture="qwen3_moe"), **changes))
    refusals.require_aligned_experts(shape, "float32", where="model.path")
    with pytest.raises(ConfigError, match=r"^model.path: .* is .0, and kernels for experts need a multiple of 8 in bf"):
        refusals.require_aligned_experts(shape, "bfloat16", where="model.path")


def test_experts_in_one_tensor_are_not_shared(tmp_path: Path) -> None:
    layout = Layout(ranks=2, expert_tensor=2)
    with pytest.raises(ConfigError, match=r"^learner.expert_tensor_parallel: .* have all experts of a layer in one t"):
        refusals.require_trainable(
            tiny_model(tmp_path, architecture="gpt_oss"), where="model.path", layout=layout, transformer={}
        )


def test_a_mixture_without_dense_layers_has_no_intermediate_size_to_cut(tmp_path: Path) -> None:
    folder = edited(tiny_model(tmp_path, architecture="qwen3_moe"), intermediate_size=33)
    weight_cuts.require_divisible(huggingface.read_shape(folder), 2)
    with pytest.raises(ConfigError, match="2 does not divide the model's intermediate_size, 33"):
        weight_cuts.require_divisible(huggingface.read_shape(edited(folder, mlp_only_layers=[1])), 2)


def test_uneven_stages_need_a_field_that_says_how(tmp_path: Path) -> None:
    folder = edited(tiny_model(tmp_path, architecture="llama"), num_hidden_layers=3)
    layout, field = Layout(ranks=2, pipeline=2), "account_for_embedding_in_pipeline_split"
    refusals.require_trainable(folder, where="model.path", layout=layout, transformer={field: True})
    with pytest.raises(ConfigError, match="2 does not divide the model's num_hidden_layers, 3; for stages of diff"):
        refusals.require_trainable(folder, where="model.path", layout=layout, transformer={field: False})
    with pytest.raises(ConfigError, match="4 does not divide the model's num_hidden_layers, 3; use fewer stages"):
        refusals.require_trainable(folder, where="model.path", layout=Layout(ranks=4, pipeline=4), transformer={})


def test_gemma3_default_rope_has_no_factor(tmp_path: Path) -> None:
    """transformers reads a factor only with "linear"."""
    folder = tiny_model(tmp_path, architecture="gemma3")
    kinds = json.loads((folder / "config.json").read_text())["rope_parameters"]
    frequencies = {}
    for kind, factor in (("default", 1.0), ("default", 8.0), ("linear", 8.0)):
        rope = kinds["full_attention"] | {"rope_type": kind, "factor": factor}
        shape = huggingface.read_shape(edited(folder, rope_parameters=kinds | {"full_attention": rope}))
        frequencies[kind, factor] = shape.rope_frequencies
    assert torch.equal(frequencies["default", 8.0], frequencies["default", 1.0])
    assert torch.equal(frequencies["linear", 8.0], frequencies["default", 1.0] / 8)


def test_ranks_that_share_a_row_share_the_key_heads_of_linear_attention(tmp_path: Path) -> None:
    tiny_model(tmp_path, architecture="qwen3_next")  # 2 key heads
    refusals.require_trainable(tmp_path, where="model.path", layout=Layout(ranks=2, context=2), transformer={})
    for context, tensor, heads in ((4, 1, 2), (2, 2, 1)):
        layout = Layout(ranks=4, context=context, tensor=tensor, is_sequence_parallel=tensor > 1)
        with pytest.raises(ConfigError, match=rf"^learner.context_parallel: {context} .*tensor_parallel, {heads}; use"):
            refusals.require_trainable(tmp_path, where="model.path", layout=layout, transformer={})


def test_a_shared_expert_is_cut_by_tensor_parallelism(tmp_path: Path) -> None:
    folder = edited(tiny_model(tmp_path, architecture="glm4_moe"), moe_intermediate_size=33)
    with pytest.raises(ConfigError, match="2 does not divide the model's shared expert's size, 33"):
        weight_cuts.require_divisible(huggingface.read_shape(folder), 2)
