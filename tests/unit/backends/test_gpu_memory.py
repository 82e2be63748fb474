"""How much of its GPU a learner needs, against what was seen on an H200 (139.8 GiB)."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.backends import gpu_memory
from asyncrl.backends.gpu_memory import MemoryPlan
from asyncrl.config import RunConfig
from asyncrl.config.layout import Layout
from asyncrl.config.learner import LearnerSection
from asyncrl.errors import ConfigError
from asyncrl.launch import summary
from asyncrl.weights import files, ring
from benchmarks.gpu.shapes import SHAPES, num_parameters, sizes
from benchmarks.gpu.vision_shapes import VISION_SHAPES

GIB = 2**30
WORKSPACE_GIB = 10
"""Of an SGLang server besides weights and cache (engines/sglang/engine.py)."""


def run_of(shape: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunConfig:
    """A run of a model of this shape, whose weights are not written."""
    kind = SHAPES[shape]
    entries = {
        "hidden_size": kind.hidden,
        "num_hidden_layers": kind.layers,
        "intermediate_size": kind.ffn,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.kv_heads,
        "head_dim": kind.head_size,
        "vocab_size": kind.vocabulary,
        "dtype": "bfloat16",
        **({"num_experts_per_tok": 8, "moe_intermediate_size": kind.expert_ffn} if kind.experts else {}),
    }
    (folder / "config.json").write_text(json.dumps(entries))
    (folder / "run.toml").write_text(f'[model]\npath = "{folder}"\ndtype = "bfloat16"\n[data]\npath = "data"\n')
    monkeypatch.setattr(gpu_memory, "read_shapes", lambda folder: dict(sizes(kind)))
    return config.load(folder / "run.toml", overrides)


def test_a_model_of_06_b_parameters_needs_what_it_was_seen_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process held 49.9 GiB at most in rows of 16k tokens, one copy of the weights fewer than the worst case."""
    needed = gpu_memory.learner_bytes(run_of("0.6B", tmp_path, monkeypatch), MemoryPlan(recomputes_all=False))
    assert 45 * GIB < needed < 55 * GIB


def test_a_model_of_4_b_parameters_leaves_room_for_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("4B", tmp_path, monkeypatch)
    assert 90 * GIB < gpu_memory.learner_bytes(run, MemoryPlan(recomputes_all=True)) < 110 * GIB
    assert gpu_memory.learner_bytes(run, MemoryPlan(recomputes_all=False)) > 130 * GIB


def test_adapters_need_no_optimizer_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("8B", tmp_path, monkeypatch, "learner.lora.rank=32")
    assert gpu_memory.learner_bytes(run, MemoryPlan(recomputes_all=True)) < 85 * GIB


def phases_of(run: RunConfig, **options: Any) -> dict[str, gpu_memory.Phase]:
    return {phase.name: phase for phase in gpu_memory.phases(run, MemoryPlan(**{"recomputes_all": True, **options}))}


ATTENTION = "learner.lora.modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']"
ADAPTERS = ("learner.lora.rank=32", "learner.lora.publish=adapter", "engine.kind=sglang")


@pytest.mark.parametrize(
    ("shape", "overrides", "offloads", "ring", "mapped", "seen"),
    [
        ("4B", [], False, False, False, 81.41),
        ("8B", [], True, False, False, 95.13),
        ("8B", ["learner.lora.rank=32"], False, False, True, 37.57),
        ("8B", ADAPTERS, False, False, False, 22.27),
        ("30B-A3B:48", ["learner.lora.rank=32", ATTENTION], False, True, False, 65.48),
        ("30B-A3B:48", [*ADAPTERS, ATTENTION], False, False, False, 62.24),
    ],
)
def test_peaks_with_full_recomputation_are_estimated_to_a_twentieth(
    shape: str,
    overrides: list[str],
    offloads: bool,
    ring: bool,
    mapped: bool,
    seen: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen: most GiB that torch had allocated (docs/results/gpu: one_gpu, full_8b, lora_30b), so without what CUDA
    takes and without fragments; the ring only where it was used, and a merged version that an engine mapped."""
    run = run_of(shape, tmp_path, monkeypatch, *overrides)
    found = phases_of(run, offloads_moments=offloads)
    held = float(found["checkpoint"].device - gpu_memory._CONTEXT_BYTES)
    held += (found["step"].device - found["checkpoint"].device) / gpu_memory._FRAGMENTED
    if "learner.lora.publish=adapter" not in overrides and not ring:
        held -= gpu_memory._RING_BYTES
    held += 2 * num_parameters(SHAPES[shape]) * mapped
    assert held / GIB == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "tokens", "split", "is_recomputed", "seen"),
    [
        ("0.6B", 2**14, "", False, 36.44),
        ("1.7B", 2**14, "", False, 67.33),
        ("1.7B", 2**15, "", False, 99.97),
        ("1.7B", 2**14, "tensor", False, 34.14),
        ("1.7B", 2**15, "tensor", False, 52.59),
        ("30B-A3B:6", 2**14, "", False, 85.83),
        ("30B-A3B:4", 2**14, "expert", False, 38.44),
        ("0.6B", 2**16, "context", True, 11.08),
        ("0.6B", 2**17, "", True, 24.78),
    ],
)
def test_peaks_of_a_learner_alone_are_estimated_to_a_twentieth(
    shape: str,
    tokens: int,
    split: str,
    is_recomputed: bool,
    seen: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen on one GPU or two that split the model, most GiB that torch had allocated (docs/results/gpu/learner.jsonl).
    No versions are exported there."""
    ranks = [f"learner.{split}_parallel=2", "learner.ranks=2"] if split else []
    run = run_of(shape, tmp_path, monkeypatch, f"learner.micro_batch_tokens={tokens}", *ranks)
    found = phases_of(run, recomputes_all=is_recomputed, exports_to="host")
    held = float(found["checkpoint"].device - gpu_memory._CONTEXT_BYTES - gpu_memory._RING_BYTES)
    held += (found["step"].device - found["checkpoint"].device) / gpu_memory._FRAGMENTED
    assert held / GIB == pytest.approx(seen, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "total", "two_copies", "one_copy"),
    [
        ("8B", 139.8, 85.5, 97.9),
        ("8B", 79.2, 24.9, 37.3),
        ("14B", 139.8, 55.0, 79.8),
        ("14B", 79.2, -5.6, 19.2),
        ("32B", 139.8, -20.1, 34.7),
        ("32B", 79.2, -80.7, -25.9),
    ],
)
def test_one_copy_of_frozen_weights_would_leave_an_engine_this_cache(
    shape: str, total: float, two_copies: float, one_copy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table in docs/results/performance.md, GiB. Shared would be all but q, k and v."""
    plan = MemoryPlan(recomputes_all=True, shares_prefixes=True)
    learner = gpu_memory.learner_bytes(run_of(shape, tmp_path, monkeypatch, *ADAPTERS), plan)
    shared = sum(2 * math.prod(size) for name, size in sizes(SHAPES[shape]) if not re.search("[qkv]_proj", name))
    cache = total - (learner + 2 * num_parameters(SHAPES[shape])) / GIB - WORKSPACE_GIB
    assert (cache, cache + shared / GIB) == pytest.approx((two_copies, one_copy), abs=0.1)


@pytest.mark.parametrize(("tokens", "stages", "layers"), [(2048, 1, 0), (32_768, 1, 1), (32_768, 2, 1)])
def test_a_recomputed_layer_is_whole_on_its_stage_and_counts_once_it_is_more_than_the_output_layer(
    tokens: int, stages: int, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 layers of 4,096 numbers that are kept for each token, and 174 kB of one layer. The first of two stages keeps
    two rows of 18 layers."""
    passes = list[int]()
    for count in (tokens, 2 * tokens):
        overrides = [f"learner.ranks={stages}", f"learner.pipeline_parallel={stages}"]
        run = run_of("8B", tmp_path, monkeypatch, *overrides, f"learner.micro_batch_tokens={count}")
        found = phases_of(run)
        passes.append(found["step"].device - found["checkpoint"].device)
    of_token = (passes[1] - passes[0]) / tokens / gpu_memory._FRAGMENTED
    assert of_token == pytest.approx(2 * 4096 * 36 + 174_490 * layers, rel=1e-5)


# Seen on a CPU, as multiples of the bytes of a rank's share of the model (docs/results/performance.md): full training
# is 2 bytes a parameter, 4 of its gradient, 4 of its float32 copy and 8 of its moments; data-parallel ranks share the
# last two.
LEARNER_RANKS = "learner.ranks=2"
ATTENTION_16 = "learner.lora={rank=16, modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']}"


@pytest.mark.parametrize(
    ("shape", "overrides", "loaded", "moments", "saved"),
    [
        ("8B", [], 5.0, 4.0, 7.0),
        ("8B", [LEARNER_RANKS], 4.0, 2.0, 3.5),
        ("8B", [LEARNER_RANKS, "learner.tensor_parallel=2"], 2.5, 2.0, 3.5),
        ("30B-A3B:12", [LEARNER_RANKS, "learner.expert_parallel=2"], 2.57, 2.0, 3.5),
        ("8B", [ATTENTION_16], 1.01, 0.01, 0.02),
        ("8B", ["learner.freeze=['.']"], 1.0, 0.0, 1.0),
        # a critic is a second whole model, whatever is trained of the policy
        ("8B", ["algorithm.name='ppo'"], 10.0, 8.0, 14.0),
        ("8B", ["algorithm.advantage='gae'", "learner.lora={rank=16, modules=['q_proj', 'k_proj']}"], 6.0, 4.0, 7.0),
        ("8B", ["algorithm.name='ppo'", "algorithm.advantage='grpo'"], 5.0, 4.0, 7.0),
        # a reference is a second model; with adapters it is the policy without them, until it is refreshed
        ("8B", ["reference.kl_coef=0.1"], 6.0, 4.0, 7.0),
        ("8B", ["reference.kl_coef=0.1", ATTENTION_16], 1.01, 0.01, 0.02),
        ("8B", ["reference.kl_coef=0.1", "reference.refresh_steps=9", ATTENTION_16], 2.01, 0.01, 0.02),
        ("8B", ["teacher.server='large'", "servers.large.path='models/large'"], 5.0, 4.0, 7.0),
    ],
)
def test_state_is_counted_to_a_twentieth(
    shape: str,
    overrides: list[str],
    loaded: float,
    moments: float,
    saved: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of(shape, tmp_path, monkeypatch, *overrides)
    of_model = 2 * num_parameters(SHAPES[shape])
    (found,) = gpu_memory._states(run, gpu_memory._models(run, dict(sizes(SHAPES[shape]))), run.learner)
    assert found.loaded / of_model == pytest.approx(loaded, rel=0.05)
    assert found.moments / of_model == pytest.approx(moments, rel=0.1, abs=0.01)
    assert found.saved / of_model == pytest.approx(saved, rel=0.05, abs=0.02)


@pytest.mark.parametrize(("stages", "chunks", "seen"), [(2, 1, 4_585_472), (4, 1, 4_586_496), (2, 2, 5_732_608)])
def test_a_first_stage_keeps_as_many_rows_as_there_are_stages(stages: int, chunks: int, seen: int) -> None:
    """Seen on a CPU: most bytes that the first stage of a tiny model kept for its backward passes, of eight rows. One
    rank with all layers kept 4,657,414, of any number of rows."""
    layout = Layout(ranks=stages, pipeline=stages, virtual_pipeline=chunks)
    rows = gpu_memory._rows_in_flight(layout, 0)
    assert rows / stages * 4_657_414 == pytest.approx(seen, rel=0.02)
    assert gpu_memory._rows_in_flight(layout, stages - 1) == (1 if chunks == 1 else 1.5)


@pytest.mark.parametrize(
    ("overrides", "layers"),
    [
        ([], [18, 18]),
        (["learner.train_only=['layers[.](2[7-9]|3[0-5])[.]']"], [0, 9]),
        (["learner.megatron.num_layers_in_last_pipeline_stage=12"], [24, 12]),
        (["learner.virtual_pipeline=3", "learner.train_only=['layers[.][0-9][.]']"], [6, 4]),
    ],
)
def test_each_stage_has_the_state_of_its_own_layers(
    overrides: list[str], layers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("8B", tmp_path, monkeypatch, LEARNER_RANKS, "learner.pipeline_parallel=2", *overrides)
    shapes = {name: size for name, size in sizes(SHAPES["8B"]) if ".layers." in name}
    of_layer = sum(math.prod(size) for name, size in shapes.items() if ".layers.0." in name)
    states = gpu_memory._states(run, gpu_memory._models(run, shapes), run.learner)
    assert [state.moments / 8 / of_layer for state in states] == layers


@pytest.mark.parametrize(("coefficient", "layers"), [(0.0, [18, 18]), (0.2, [18, 19])])
def test_draft_layers_are_of_the_last_stage_if_they_are_trained(
    coefficient: float, layers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("learner.pipeline_parallel=2", f"learner.options.draft_coefficient={coefficient}")
    run = run_of("8B", tmp_path, monkeypatch, LEARNER_RANKS, *overrides)
    of_layer = add_draft_layer(tmp_path, monkeypatch)
    states = gpu_memory._states(run, gpu_memory._models(run, gpu_memory._read_policy(run)), run.learner)
    assert [state.moments / 8 / of_layer for state in states] == layers


def test_critic_and_reference_in_the_policys_folder_have_no_draft_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 36 layers each, and one of drafts that the policy has."""
    others = ("algorithm.advantage=gae", "reference.kl_coef=0.1", "learner.options.draft_coefficient=0.2")
    run = run_of("8B", tmp_path, monkeypatch, *others)
    of_layer = add_draft_layer(tmp_path, monkeypatch)
    (state,) = gpu_memory._states(run, gpu_memory._models(run, gpu_memory._read_policy(run)), run.learner)
    assert (state.moments / 8 / of_layer, state.others / 2 / of_layer) == (37 + 36, 36 + 36)


def add_draft_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give the model of run_of("8B", ..) a draft layer as large as its others, and no ends. Returns its numbers."""
    config_file, shapes = folder / "config.json", {n: size for n, size in sizes(SHAPES["8B"]) if ".layers." in n}
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "num_nextn_predict_layers": 1}))
    one = {name: size for name, size in shapes.items() if ".layers.0." in name}
    drafts = {name.replace(".layers.0.", ".layers.36."): size for name, size in one.items()}
    drafts["model.layers.36.shared_head.head.weight"] = (151_936, 4096)
    monkeypatch.setattr(gpu_memory, "read_shapes", lambda folder: {**shapes, **drafts})
    return sum(map(math.prod, one.values()))


def test_half_of_each_adapter_is_on_every_tensor_parallel_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other half, which is as long as what ranks divide of the matrix, each has a fourth."""
    ranks = ("learner.ranks=4", "learner.tensor_parallel=4")
    run = run_of("8B", tmp_path, monkeypatch, "learner.lora.rank=64", *ranks)
    divided = (
        4096 + 2 * 1024 + 4096 + 2 * 12_288 + 12_288
    )  # outputs of q, k, v, inputs of o, outputs of gate and up, ..
    (found,) = gpu_memory._states(run, gpu_memory._models(run, dict(sizes(SHAPES["8B"]))), run.learner)
    assert found.main == 4 * 36 * 64 * (divided / 4 + 7 * 4096)


def test_offloaded_moments_leave_ten_bytes_a_parameter_and_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, parameters = run_of("8B", tmp_path, monkeypatch), num_parameters(SHAPES["8B"])
    beside = gpu_memory._CONTEXT_BYTES + gpu_memory._RING_BYTES + 2 * parameters
    plain, offloaded = (phases_of(run, offloads_moments=offloads) for offloads in (False, True))
    assert plain["update"].device - beside == pytest.approx(18 * parameters, rel=0.01)
    assert offloaded["update"].device - beside == pytest.approx(10 * parameters + 2**30, rel=0.01)
    assert offloaded["update"].host == pytest.approx((8 + 2) * parameters, rel=0.01)


@pytest.mark.parametrize("said", [{"dtype": "bfloat16"}, {"torch_dtype": "float32"}, {}])
def test_a_version_has_the_dtype_of_the_run(
    said: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, config_file = run_of("8B", tmp_path, monkeypatch), tmp_path / "config.json"
    entries = json.loads(config_file.read_text())
    del entries["dtype"]
    config_file.write_text(json.dumps(entries | said))
    (found,) = gpu_memory._states(run, gpu_memory._models(run, dict(sizes(SHAPES["8B"]))), run.learner)
    parameters = num_parameters(SHAPES["8B"])
    assert found.copy == found.weights == 2 * parameters
    on_host = MemoryPlan(recomputes_all=True, exports_to="host")
    without_engine = max(phase.device for phase in gpu_memory.phases(run, on_host))
    assert gpu_memory.learner_bytes(run, on_host) - without_engine == 2 * parameters


@pytest.mark.parametrize(("gradients", "held"), [("float32", 6), ("bfloat16", 4)])
def test_an_optimizer_on_the_host_leaves_weights_and_gradients_on_the_device(
    gradients: str, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has 12 bytes a parameter, two versions, and two pieces of gradients and weights (the embedding's). While
    main weights are moved, gradients have no memory, but theirs is no less than 4 bytes a parameter."""
    parameters = num_parameters(SHAPES["8B"])
    run = run_of("8B", tmp_path, monkeypatch, f"learner.options={{gradients_dtype='{gradients}'}}")
    found = phases_of(run, updates_on_host=True, exports_to="host")
    context, embedding = gpu_memory._CONTEXT_BYTES, 151_936 * 4096
    assert found["load"].device - context == pytest.approx(6 * parameters, rel=0.01)
    beside = context + gpu_memory._RING_BYTES + gpu_memory._SCALED_BYTES
    assert found["update"].device - beside == pytest.approx(held * parameters, rel=0.01)
    assert found["update"].host == pytest.approx((12 + 2 * 2) * parameters + 12 * embedding, rel=0.01)
    assert found["checkpoint"].host - found["update"].host == pytest.approx(14 * parameters, rel=0.01)
    whole = phases_of(run, updates_on_host=True, exports_to="host", moment_bytes=4)
    assert found["update"].host - whole["update"].host == pytest.approx(4 * parameters, rel=0.01)


def test_what_is_kept_on_the_host_must_fit_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MemoryPlan(recomputes_all=True, updates_on_host=True, exports_to="host")
    refuse = functools.partial(gpu_memory.refuse_host, plan=plan, total=96 * GIB)
    refuse(run_of("4B", tmp_path, monkeypatch))
    with pytest.raises(ConfigError, match=r"1 ranks keep 1\d\d GiB of optimizer .* this machine has 96 GiB; use more"):
        refuse(run_of("8B", tmp_path, monkeypatch))
    refuse(run_of("8B", tmp_path, monkeypatch, "learner.ranks=2", "learner.machines=2"))


def test_full_training_needs_its_state_and_a_twentieth_more_beside_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides a row's passes, and what CUDA takes. On the host there is no version on the device at all."""
    run, parameters = run_of("8B", tmp_path, monkeypatch), num_parameters(SHAPES["8B"])
    device, host = (phases_of(run, exports_to=where)["update"] for where in ("device", "host"))
    assert device.device - gpu_memory._CONTEXT_BYTES < 1.05 * (18 + 2) * parameters
    assert host.device == pytest.approx(device.device - 2 * parameters, rel=1e-6)
    assert host.host == pytest.approx(device.host + 2 * parameters, rel=1e-6)
    largest = max(phase.device for phase in phases_of(run).values())
    plan = MemoryPlan(recomputes_all=True)
    assert not gpu_memory.describe_shortage(run, plan, total=largest)
    assert gpu_memory.describe_shortage(run, plan, total=largest - 1).endswith("use learner.micro_batch_tokens = 4096")
    assert gpu_memory.describe_shortage(run, plan, total=device.device - 1).endswith("GiB are without activations")


@pytest.mark.parametrize(("ranks", "in_passes", "in_update"), [(1, -2, +2), (8, -2, -1.5)])
def test_gradients_in_16_bits_save_in_the_passes_and_with_many_ranks_in_the_update(
    ranks: int, in_passes: float, in_update: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes a parameter: the update has each rank's own gradients in float32 as well, half a byte with eight ranks."""
    parameters = num_parameters(SHAPES["8B"])
    overrides = [f"learner.ranks={ranks}", "learner.options={gradients_dtype='bfloat16'}"]
    whole = phases_of(run_of("8B", tmp_path, monkeypatch, overrides[0]))
    half = phases_of(run_of("8B", tmp_path, monkeypatch, *overrides))
    for phase, difference in (("step", in_passes), ("update", in_update)):
        saved = (half[phase].device - whole[phase].device) / parameters
        assert saved == pytest.approx(difference, abs=0.01)


def test_adapters_of_30_b_parameters_copy_nothing_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """58 GB were seen after loading; the model with tied embeddings is 56.3 GiB."""
    modules = "['q_proj', 'k_proj', 'v_proj', 'o_proj']"
    run = run_of("30B-A3B:48", tmp_path, monkeypatch, f"learner.lora={{rank=32, modules={modules}}}")
    found = phases_of(run)
    assert 56 * GIB < found["load"].device - gpu_memory._CONTEXT_BYTES < 58 * GIB
    assert found["update"].device < 1.1 * found["load"].device
    assert found["checkpoint"].host < GIB
    assert re.search(
        r"load 6\d\.\d, step .* update .* checkpoint .* GiB on its GPU", summary._in_gib(tuple(found.values()))
    )


@pytest.mark.parametrize(("quantization", "of_expert", "of_layer"), [("fp8", 1, 1), ("int4_group32", 0.5625, 2)])
def test_adapters_of_30_b_parameters_are_copied_with_the_model_where_engines_are_quantized(
    quantization: str, of_expert: float, of_layer: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("30B-A3B:48", tmp_path, monkeypatch, "learner.lora.rank=32", f"weights.quantization={quantization}")
    (found,) = gpu_memory._states(run, gpu_memory._models(run, dict(sizes(SHAPES["30B-A3B:48"]))), run.learner)
    experts, ends = 48 * 128 * 3 * 2048 * 768, 2 * 151_936 * 2048
    layers = num_parameters(SHAPES["30B-A3B:48"]) - experts - ends
    assert found.copy == pytest.approx(of_expert * experts + of_layer * layers + 2 * ends, rel=1e-3)
    assert found.kept == 0


@pytest.mark.parametrize(
    ("gib", "new_tokens", "remedy"),
    [
        (140, 2048, ""),
        (60, 2048, "learner.micro_batch_tokens = 4096"),
        (60, 16_384, 'learner.options.recompute = "full"'),  # a row of its own for each long answer
        (24, 2048, 'learner.micro_batch_tokens = 4096 and learner.options.recompute = "full"'),
    ],
)
def test_a_shortage_of_activations_names_the_fastest_passes_that_fit(
    gib: int, new_tokens: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 4,096 tokens trained 4,500 to 4,750 tokens/s, and full recomputation 3,400 (8B, adapters, one H200)."""

    def describe(*overrides: str, recomputes_all: bool) -> str:
        run = run_of("8B", tmp_path, monkeypatch, *ADAPTERS, f"rollout.max_new_tokens={new_tokens}", *overrides)
        plan = MemoryPlan(recomputes_all=recomputes_all, exports_to="host")
        return gpu_memory.describe_shortage(run, plan, total=gib * GIB)

    assert describe(recomputes_all=False).partition("; if it runs out of memory, use ")[2] == remedy
    rows = ["learner.micro_batch_tokens=4096"] if "micro_batch_tokens" in remedy else []
    assert describe(*rows, recomputes_all="recompute" in remedy) == ""


def test_what_cannot_fit_is_refused_with_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: RunConfig, *, total: int = 140 * GIB, **options: Any) -> None:
        plan = MemoryPlan(**{"recomputes_all": False, "exports_to": "host", **options})
        gpu_memory.refuse(run, plan, total=total)

    refuse(run_of("4B", tmp_path, monkeypatch))
    refuse(run_of("8B", tmp_path, monkeypatch), offloads_moments=True)
    refuse(run_of("8B", tmp_path, monkeypatch))
    fully, in_rows = r"\(with learner.options.recompute = \"full\"\)", r"\(with learner.micro_batch_tokens = 4096\)"
    remedies = rf"learner.lora or learner.options.offload_optimizer = true {in_rows} or learner.ranks = 2 {fully}$"
    with pytest.raises(ConfigError, match=rf"a rank needs 1\d\d GiB .* has 140 GiB; use {remedies}"):
        refuse(run_of("8B", tmp_path, monkeypatch), exports_to="device")
    with pytest.raises(
        ConfigError, match=rf'70 GiB; use learner.lora {in_rows} or learner.options.optimizer_device = "cpu"'
    ):
        refuse(run_of("8B", tmp_path, monkeypatch), total=70 * GIB)
    refuse(run_of("8B", tmp_path, monkeypatch), updates_on_host=True, total=70 * GIB)
    mixture = run_of("30B-A3B:48", tmp_path, monkeypatch)
    with pytest.raises(
        ConfigError, match=rf"use learner.lora {in_rows} or learner.ranks = 8 with expert_parallel = 8 {in_rows}$"
    ) as caught:
        refuse(mixture)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gib", "overrides", "is_named"), [(70, [], True), (12, [], False), (70, ["algorithm.name=ppo"], False)]
)
def test_adapters_are_named_only_where_they_would_fit(
    gib: int, overrides: list[str], is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8B by adapters has 14 GiB of weights; a critic beside it is trained whole."""
    run = run_of("8B", tmp_path, monkeypatch, *overrides)
    with pytest.raises(ConfigError) as caught:
        gpu_memory.refuse(run, MemoryPlan(recomputes_all=True, exports_to="host"), total=gib * GIB)
    assert ("learner.lora" in str(caught.value)) == is_named


def test_a_remedy_leaves_room_for_more_than_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8B with offloaded moments is 71.5 GiB of state: on a GPU of 75 it could not load, on one of 85 not step."""
    run, plan = run_of("8B", tmp_path, monkeypatch), MemoryPlan(recomputes_all=True, exports_to="host")
    for gib, remedy in (
        (75, 'optimizer_device = "cpu"'),
        (85, 'optimizer_device = "cpu"'),
        (95, "offload_optimizer = true"),
    ):
        with pytest.raises(ConfigError, match=f"use learner.lora or learner.options.{remedy}"):
            gpu_memory.refuse(run, plan, total=gib * GIB)
    assert phases_of(run, offloads_moments=True, exports_to="host")["load"].device > 75 * GIB
    assert phases_of(run, updates_on_host=True, exports_to="host")["update"].device < 75 * GIB


def test_what_the_context_and_the_ring_leave_too_little_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8B has 18 bytes a parameter of state, 126.9 GiB; a small GPU, where less was seen, is not given up for them."""
    plan = MemoryPlan(recomputes_all=True, exports_to="host")
    gpu_memory.refuse(run_of("8B", tmp_path, monkeypatch), plan, total=136 * GIB)
    with pytest.raises(ConfigError, match="a rank needs 135 GiB for weights, gradients, optimizer and CUDA without"):
        gpu_memory.refuse(run_of("8B", tmp_path, monkeypatch), plan, total=133 * GIB)
    gpu_memory.refuse(run_of("0.6B", tmp_path, monkeypatch), plan, total=12 * GIB)


@pytest.mark.parametrize("gib", [18, 30, 75, 100])
def test_the_layout_that_is_named_fits_and_is_one_that_the_model_can_have(
    gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts are divided evenly, and so are its layers, 48, or it says how many the last stage has."""
    run = run_of("30B-A3B:48", tmp_path, monkeypatch)
    plan = MemoryPlan(recomputes_all=False, offloads_moments=True, exports_to="host")
    refuse = functools.partial(gpu_memory.refuse, plan=plan, total=gib * GIB)
    asked = list[LearnerSection]()

    def is_possible(learner: LearnerSection) -> bool:
        asked.append(learner)
        return learner.tensor_parallel <= 4

    with pytest.raises(ConfigError) as caught:
        refuse(run, is_possible=is_possible)
    named = {key: int(size) for key, size in re.findall(r"(\w+) = (\d+)", str(caught.value))}
    last = named.pop("num_layers_in_last_pipeline_stage", None)
    fitting = dataclasses.replace(run.learner, **named)
    assert fitting.layout == asked[-1].layout and fitting.tensor_parallel <= 4
    assert 128 % fitting.expert_parallel == 0
    assert (last is None) == (48 % fitting.pipeline_parallel == 0)
    refuse(named_run := dataclasses.replace(run, learner=fitting))
    says_full = 'recompute = "full"' in str(caught.value)
    peak = max(
        phase.device for phase in gpu_memory.phases(named_run, dataclasses.replace(plan, recomputes_all=says_full))
    )
    assert peak <= gib * GIB  # with rows of 16k tokens
    for learner in asked[:-1]:
        assert learner.tensor_parallel > 4 and learner.ranks <= fitting.ranks


@pytest.mark.parametrize(("layers", "stages", "last"), [(94, 4, 22), (61, 8, 5), (46, 2, None), (3, 2, 1)])
def test_stages_that_do_not_divide_the_layers_are_named_with_the_last_one(
    layers: int, stages: int, last: int | None
) -> None:
    (some,) = {
        learner.megatron.get("num_layers_in_last_pipeline_stage")
        for learner in gpu_memory._layouts(LearnerSection(ranks=128), fewest=1, layers=layers, experts=128)
        if learner.pipeline_parallel == stages
    }
    assert some == last


def test_what_tensor_parallel_ranks_merge_together_is_copied_once_or_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the model on each of two ranks; adapters alone are merged later, and up to three versions are alive."""
    overrides = ("learner.lora.rank=32", "learner.ranks=2", "learner.tensor_parallel=2")
    run, half = run_of("8B", tmp_path, monkeypatch, *overrides), num_parameters(SHAPES["8B"])
    device, host = (phases_of(run, exports_to=where)["update"] for where in ("device", "host"))
    assert device.device - host.device == pytest.approx(half, rel=0.01)
    assert host.host - device.host == pytest.approx(half, rel=0.01)
    larger, plan = run_of("32B", tmp_path, monkeypatch, *overrides), MemoryPlan(recomputes_all=True, exports_to="host")
    gpu_memory.refuse(larger, plan, total=65 * GIB)
    with pytest.raises(ConfigError, match=r'use learner.options.exports = "host"'):
        gpu_memory.refuse(larger, dataclasses.replace(plan, exports_to="device"), total=65 * GIB)


def test_the_ring_and_the_writers_of_folders_are_counted() -> None:
    assert gpu_memory._RING_BYTES == ring.RING_BYTES + files._WRITERS * 2**28


def test_all_logits_of_a_row_are_counted_where_the_loss_is_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("0.6B", tmp_path, monkeypatch, "learner.micro_batch_tokens=8192")
    own, all_logits = (
        phases_of(run, needs_logits=needs, recomputes_all=False)["step"].device for needs in (False, True)
    )
    assert all_logits - own == pytest.approx(1.1 * (32 * 8192 * 151_936 - 2 * GIB), rel=1e-6)


def test_choices_of_sparse_attention_that_later_layers_use_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four bytes for each of 2,048 keys of a token, of a layer and of the one full layer before a shared one."""
    run = run_of("8B", tmp_path, monkeypatch, "learner.micro_batch_tokens=16384")
    without = phases_of(run)["step"].device
    entries = json.loads((tmp_path / "config.json").read_text())
    sparse = {"index_topk": 2048, "indexer_types": ["full", "full", "shared", "shared"]}
    (tmp_path / "config.json").write_text(json.dumps(entries | sparse))
    assert phases_of(run)["step"].device - without == pytest.approx(1.1 * 2 * 4 * 2048 * 16384, rel=1e-6)


@pytest.mark.parametrize("recomputes_all", [True, False])
@pytest.mark.parametrize("needs_logits", [True, False])
def test_a_trajectory_that_is_longer_than_a_row_is_counted_as_a_row_of_its_length(
    recomputes_all: bool, needs_logits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*overrides: str, context: int = 40_960) -> int:
        run = run_of("4B", tmp_path, monkeypatch, "learner.lora.rank=32", *overrides)
        entries = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": context}
        (tmp_path / "config.json").write_text(json.dumps(entries))
        return phases_of(run, recomputes_all=recomputes_all, needs_logits=needs_logits)["step"].device

    rows, answers = "learner.micro_batch_tokens=", "rollout.max_new_tokens="
    long = step(f"{rows}4096", f"{answers}32768", "data.max_prompt_tokens=1024")
    assert long == step(f"{rows}{32_768 + 1024}")
    assert step(f"{rows}4096", f"{answers}32768", "rollout.max_context_tokens=8192") == step(f"{rows}8192")
    assert step(f"{rows}4096", f"{answers}32768", context=8192) == step(f"{rows}8192")
    assert step(f"{rows}4096", f"{answers}2048") == step(f"{rows}4096") < long


@pytest.mark.parametrize(
    ("entries", "of_token"),
    [
        ({}, 3.7 * 128 * (32 + 2 * 8) + 3 * 12_288),
        ({"n_shared_experts": 1}, 3.7 * 128 * (32 + 2 * 8) + 3 * 2 * 12_288),
        ({"shared_expert_intermediate_size": 100}, 3.7 * 128 * (32 + 2 * 8) + 3 * 12_388),
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, 3.7 * 160 * (32 + 2 * 8) + 3 * 12_288),
    ],
)
def test_activations_of_shared_experts_and_of_latent_attention_are_counted(
    entries: dict[str, int], of_token: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted on a CPU, a token of a tiny DeepSeek-V3 keeps 1.6 times as much as of a Qwen3 mixture of its sizes."""
    passes = list[int]()
    for count in (8192, 16_384):
        run = run_of("8B", tmp_path, monkeypatch, f"learner.micro_batch_tokens={count}")
        config_file = tmp_path / "config.json"
        config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **entries}))
        found = phases_of(run, recomputes_all=False)
        passes.append(found["step"].device - found["checkpoint"].device)
    a_token = (passes[1] - passes[0]) / 8192 / gpu_memory._FRAGMENTED
    assert a_token == pytest.approx(2 * 36 * (3 * 4096 + of_token), rel=1e-5)


def run_with_tower(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> RunConfig:
    """A run of Qwen2.5-VL 3B, with the number of weights of its parts."""
    run = run_of("1.7B", folder, monkeypatch, *overrides)
    _, text, tower = VISION_SHAPES["Qwen2.5-VL-3B"]
    (folder / "config.json").write_text(
        json.dumps({"text_config": text, "vision_config": tower | {"hidden_act": "silu"}})
    )
    sizes = {"model.layers.0.mlp.up_proj.weight": (3086, 10**6), "visual.blocks.0.mlp.up_proj.weight": (669, 10**6)}
    monkeypatch.setattr(gpu_memory, "read_shapes", lambda folder: sizes)
    return run


def test_a_row_with_pictures_that_a_trained_tower_keeps_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of 16k tokens with 16 pictures of 32 x 32 patches the frozen tower fitted an H200, the trained not."""
    plan = MemoryPlan(recomputes_all=False, exports_to="host")
    describe = functools.partial(gpu_memory.describe_shortage, plan=plan, total=int(139.8 * GIB))
    overrides = ["learner.micro_batch_tokens=16384"]
    assert not describe(run_with_tower(tmp_path, monkeypatch, *overrides))
    trained = run_with_tower(tmp_path, monkeypatch, *overrides, "learner.train_vision=true")
    expected = r"in its step a rank needs about 1\d\d GiB, .* has 140 GiB; .* use learner.micro_batch_tokens = 4096$"
    assert re.search(expected, describe(trained))


def test_what_a_trained_tower_adds_is_estimated_to_a_twentieth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """102.3 GiB instead of 58.4 with full recomputation, on an H200 (docs/results/gpu/vision.jsonl)."""
    frozen, trained = (
        phases_of(
            run_with_tower(
                tmp_path, monkeypatch, "learner.micro_batch_tokens=16384", f"learner.train_vision={is_trained}"
            ),
            exports_to="host",
        )["step"].device
        for is_trained in ("false", "true")
    )
    assert (trained - frozen) / GIB == pytest.approx(102.26 - 58.43, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "experts", "size"), [(48, 128, 16), (256, 128, 32), (8, 0, 1), (12, 8, 4), (64, 256, 32)]
)
def test_a_recommended_layout_distributes_experts_over_ranks_that_divide_both(
    ranks: int, experts: int, size: int
) -> None:
    assert gpu_memory._expert_parallel(ranks, experts) == size
