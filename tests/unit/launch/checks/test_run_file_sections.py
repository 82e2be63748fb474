"""Sampling, optimizer steps and data in a run file: each mistake gives a one-line error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl import config
from asyncrl.backends import lora
from asyncrl.backends.megatron.backend import MegatronBackend
from asyncrl.backends.megatron.shared_settings import digests, shared_settings
from asyncrl.data.demo_task import DIGITS
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.engines.inprocess.engine import InProcessEngine
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from tests.harness.families import make_tiny_family

SERVER = ["engine.kind=sglang", "engine.options={url='http://127.0.0.1:1'}"]


ADAPTERS = ["engine.kind=sglang", "learner.lora={rank=4, publish='adapter'}", "learner.backend=megatron"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["run.colocated=true"], 'run.colocated: mode = "async" trains while it samples'),
        (["run.colocated=true", "run.mode=sync", "learner.backend=none"], "run.colocated: learner.backend"),
        (["rollout.workers=2", *SERVER], "one server serves one worker, and this run may start 2"),
        (
            ["weights.channel=nccl", "engine.kind=sglang", "engine.options={server_arguments={pp-size=2}}"],
            "with pp-size SGLang cannot receive weights from the learner's memory",
        ),
        (
            ["weights.channel=nccl", "engine.kind=sglang", "engine.options={server_arguments={enable-symm-mem=true}}"],
            "with enable-symm-mem SGLang's NCCL and the learner's wait for each other forever",
        ),
        (
            ["weights.channel=nccl", "engine.kind=sglang", "engine.options={server_arguments={dp-size=2}}"],
            r"replicas of one server \(dp-size\) cannot receive weights from the learner's memory",
        ),
        (
            [*ADAPTERS, "engine.options={tensor_parallel=2, server_arguments={enable-dp-attention=true, dp-size=2}}"],
            r'publish: "adapter": with dp-size \(.*\) SGLang takes no adapters that come and go',
        ),
        ([*ADAPTERS, "engine.options={server_arguments={data_parallel_size=2}}"], "with dp-size "),
        (["rollout.most_workers=3", *SERVER], "one server serves one worker, and this run may start 3"),
        (["rollout.repetition_penalty=1.1"], "rollout.repetition_penalty changes the distribution"),
        (["rollout.presence_penalty=0.0"], "an evaluation may set it"),
        (["rollout.stop=['']"], "stop holds an empty text"),
        (["rollout.stop=word"], "stop must be a list, got 'word'"),
        (["rollout.stop_token_ids=[9999]"], "rollout.stop_token_ids: 9999 is not a token of the model's 12"),
        (["engine.kind=sglang", f"rollout.stop={list('abc' * 11)}"], "stop may hold 32 texts, got 33"),
        (["rollout.min_new_tokens=9"], r"min_new_tokens must be <= max_new_tokens \(8\), got 9"),
        (["rollout.stop=['1']", "rollout.ignore_eos=true"], "ignore_eos samples max_new_tokens tokens"),
        (
            ["rollout.stop=['1']", "rollout.function=given", "rollout.group_size=1", "data.response_key=label"],
            "generates nothing; remove them",
        ),
    ],
)
def test_refuses_an_invalid_evaluation(run_file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check(config.load(run_file, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["learner.steps_per_batch=3"], r"groups_per_batch must be a multiple of steps_per_batch \(3\), got 4"),
        (["learner.steps_per_batch=2", "algorithm.loss=reinforce"], "loss reinforce has no ratio to them"),
        (
            ["learner.options={optimizer_device='cpu'}", "model.dtype=float32"],
            "only moments can leave it; use offload_optimizer, or bfloat16",
        ),
        (["learner.schedule=cosin"], "schedule must be one of 'constant', 'linear', 'cosine'"),
        (["learner.min_learning_rate=1e-7"], 'use schedule = "cosine" or "linear"'),
        (["learner.schedule=linear", "learner.min_learning_rate=1.0"], r"<= learning_rate \(1e-06\), got 1"),
        (["learner.schedule=linear", "learner.decay_steps=5", "learner.warmup_steps=5"], "must be > warmup_steps"),
    ],
)
def test_refuses_mistakes_about_optimizer_steps(run_file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check(config.load(run_file, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["learner.freeze=['embd_tokens']"],
            "'embd_tokens' matches no parameter of the model; names look like model",
        ),
        (["learner.freeze=['(']"], r"freeze: '\(' is not a regular expression"),
        (["learner.freeze=['.']"], "leave no parameter to train"),
        (["learner.train_only=['q_proj']"], "are one parameter in the megatron backend"),
        (["learner.train_only=['norm', 'embed']", "learner.freeze=['embed_tok']"], "'embed' trains nothing, as"),
        (["learner.train_vision=true"], "learner.train_vision: the model has no vision tower; remove the key"),
        (["learner.megatron={deterministic_mod=true}"], "did you mean deterministic_mode?"),
        (["learner.megatron={num_layers=3}"], "num_layers is set by asyncrl"),
        (["learner.megatron={moe_token_dispatcher_type='allgather'}"], "by Megatron's all-to-all, or by DeepEP"),
        (["learner.megatron={moe_token_dispatcher_type='flex'}"], "no ranks exchange tokens with learner.expert_para"),
        (["learner.megatron={cpu_offloading=true}"], "is for a feature that asyncrl does not support"),
        (
            [
                "learner.ranks=2",
                "learner.pipeline_parallel=2",
                "learner.virtual_pipeline=2",
                "learner.megatron={num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2}",
            ],
            "leave no stage between them, which Megatron needs with virtual_pipeline; remove one",
        ),
        (["learner.megatron={deterministic_mode=3}"], "deterministic_mode must be true or false, got 3"),
        (["learner.megatron={num_layers_in_first_pipeline_stage='1'}"], "_stage must be a whole number, got '1'"),
        (["learner.megatron={cross_entropy_fusion_impl='x'}"], '_impl must be "native" or "te", got \'x\''),
        (
            ["algorithm.name=ppo", "learner.megatron={deterministic_mode=true}", "critic.megatron={num_layer=3}"],
            "^critic.megatron: num_layer is not a field of .* did you mean num_layers?",
        ),
        (
            ["reference.kl_coef=0.1", "reference.megatron={deterministic_mode=3}"],
            "^reference.megatron: deterministic_mode must be true or false, got 3",
        ),
        (["learner.megatron={clip_grad=1.0}"], "clip_grad is learner.max_grad_norm here; set that instead"),
        (["learner.megatron={moe_aux_loss_coeff=0.1}"], "is learner.options.aux_loss_coefficient here; set that"),
        (["learner.options={aux_loss_coefficient=0.1}"], "aux_loss_coefficient: .* the model has none; remove it"),
        (
            ["learner.options={aux_loss_coefficient=-1}"],
            "learner.options.*aux_loss_coefficient must be >= 0, got -1",
        ),
        (
            ["learner.options={timeout_seconds=0}"],
            "learner.options.*timeout_seconds must be >= 1 and <= 1,000,000, got",
        ),
        (["learner.backend=reference", "learner.megatron={deterministic_mode=true}"], '"reference" is not Megatron'),
    ],
)
def test_refuses_mistakes_about_what_is_trained(run_file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check(config.load(run_file, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["learner.lora={rank=-1}"], r"rank must be >= 0 \(0 is off\), got -1"),
        (["learner.lora={publish='adapter'}"], 'publish = "adapter" needs a rank > 0'),
        (["learner.lora={rank=4, dropout=0.1}"], "unknown key 'dropout'"),
        (["learner.lora={rank=65}"], "learner.lora.rank: 65 is more than the model's hidden_size, 64"),
        (["learner.lora={rank=4, modules=['qproj']}"], "the model has no 'qproj'; did you mean 'q_proj'?"),
        (["learner.lora={rank=4, modules=['q_proj']}"], "k_proj, q_proj, v_proj are one parameter"),
        (["learner.lora={rank=4}", "learner.freeze=['embed']"], "remove learner.freeze and train_only"),
        (["learner.lora={rank=4}", "learner.backend=reference"], '"reference" has no adapters; use "megatron"'),
        (
            ["learner.lora={rank=4, publish='adapter'}", "engine.kind=inprocess"],
            'learner.lora.publish: engine.kind = "inprocess" takes no adapters',
        ),
        (
            ["learner.lora={rank=4, publish='adapter'}", "engine.kind=sglang", "weights.channel=objects"],
            'weights.channel = "objects" takes no adapters',
        ),
        (["weights.quantization=int8"], "quantization must be one of 'fp8', 'fp8_ue8m0', 'int4', 'int4_group32', got"),
        (
            ["weights.quantization=fp8", "engine.kind=sglang", "weights.channel=nccl"],
            'weights.channel = "nccl" takes no fp8',
        ),
        (["weights.quantization=fp8", "engine.kind=inprocess"], 'engine.kind = "inprocess" takes no fp8'),
        (["weights.quantization=int4", "engine.kind=inprocess"], 'engine.kind = "inprocess" takes no int4'),
        (["weights.quantization=int4", "engine.kind=sglang"], "is for routed experts, and the model has none"),
        (["weights.quantization=fp8", "engine.kind=sglang"], "blocks of 128 numbers, and hidden_size is"),
    ],
)
def test_refuses_mistakes_about_adapters_and_precision(run_file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check(config.load(run_file, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.path=''"], r"data.path: name a .jsonl or .parquet file, several in \[\[data.files\]\]"),
        (["data.path=''", "data.files=[{path='nowhere.jsonl'}]"], "data.files: nowhere.jsonl: no such data file"),
        (["data.path=''", "data.source=no_such:X"], "data.source: cannot import 'no_such'"),
        (["data.conversation_key=talk", "data.chat_template=true"], 'is for rollout.function = "given"'),
        (["reward.rows={a='exact'}"], "no column says which; set data.reward_key"),
        (["data.reward_key=rm", "reward.rows={a='no_such:f'}"], "reward.rows: cannot import 'no_such'"),
        (["reward.kind=parts"], r'reward.kind: "parts" needs parts, such as \[reward.parts.right\]'),
        (
            ["reward.kind=parts", "reward.parts.a.kind=none"],
            'reward.parts: "none" takes what the rollout function sets',
        ),
    ],
)
def test_refuses_mistakes_about_the_data(run_file: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        check(config.load(run_file, overrides))
    assert "\n" not in str(caught.value)


def test_trained_parts_can_be_chosen(run_file: Path) -> None:
    for chosen, unknown in (
        (["learner.freeze=['embed']", "learner.megatron={deterministic_mode=true}"], "learner.freeze=['no_such']"),
        (["learner.train_only=['q_proj']", "learner.backend=reference"], "learner.train_only=['no_such']"),
        (["learner.lora={rank=4, modules=['q_proj', 'k_proj', 'v_proj']}"], "learner.lora.modules=['no_such']"),
    ):
        check(config.load(run_file, chosen))
        with pytest.raises(ConfigError, match="no_such"):  # the setting is checked, not skipped
            check(config.load(run_file, [*chosen, unknown]))


@pytest.mark.parametrize(
    ("architecture", "modules", "problem"),
    [
        ("qwen3_moe", ["q_proj", "k_proj", "v_proj", "o_proj"], None),
        ("qwen3_moe", ["all-linear"], None),
        ("mixtral", ["all-linear"], None),
        ("qwen3_next", ["q_proj", "k_proj", "v_proj"], "no adapters of k_proj, q_proj, v_proj"),
        ("deepseek_v3", ["all-linear"], "no adapters of q_a_proj"),
        ("qwen3", ["all-linear"], None),
    ],
)
def test_adapters_are_published_alone_where_engines_take_the_adapted_matrices(
    architecture: str, modules: list[str], problem: str | None, run_file: Path, tmp_path: Path
) -> None:
    model = make_tiny_family(tmp_path / "model", architecture=architecture)
    overrides = [f"model.path={json.dumps(str(model))}", "engine.kind=sglang"]
    for publish in ("merged", "adapter"):
        run = config.load(run_file, [*overrides, f"learner.lora={{rank=8, modules={modules}, publish='{publish}'}}"])
        if publish == "adapter" and problem:
            mend = r'name other learner.lora.modules, such as \["o_proj"\], or use publish = "merged"$'
            with pytest.raises(ConfigError, match=f"{problem}; {mend}"):
                lora.check(run)
            lora.check(
                config.load(run_file, [*overrides, "learner.lora={rank=8, modules=['o_proj'], publish='adapter'}"])
            )
        else:
            lora.check(run)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["learner.lora={rank=8}"], None),
        (["learner.lora={rank=8}", "learner.train_vision=true"], "learner.lora: only adapters of the decoder"),
        (["learner.lora={rank=8, publish='adapter'}"], "was not tried with engines whose model has a vision tower"),
        (["learner.train_vision=true"], None),
        (["learner.train_vision=true", "learner.options={recompute='full'}"], 'recompute: "full" would run'),
        (["learner.options={recompute='full'}"], None),
        (["learner.freeze=['visual.blocks']"], None),
        (["learner.train_only=['visual']"], "leave no parameter to train"),
        (["learner.train_only=['visual']", "learner.train_vision=true"], None),
        (["weights.quantization=fp8"], '"fp8" was not tried with a vision tower; remove it'),
    ],
)
def test_a_vision_tower_is_trained_where_that_works(
    overrides: list[str], problem: str | None, run_file: Path, tmp_path: Path
) -> None:
    model = make_tiny_vision_model(tmp_path / "model", architecture="qwen3_vl")
    run = config.load(run_file, [f"model.path={json.dumps(str(model))}", "engine.kind=sglang", *overrides])
    if problem is None:
        MegatronBackend.check(run)
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        MegatronBackend.check(run)
    assert "\n" not in str(caught.value)


def test_refuses_attention_that_the_in_process_engine_lacks(run_file: Path, tmp_path: Path) -> None:
    run = config.load(run_file, [f"model.path={json.dumps(str(tmp_path))}"])
    for model_type in ("qwen3_next", "qwen3_5"):  # alone, and behind a vision tower
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match="does not support linear_attention"):
            InProcessEngine.check(run)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    InProcessEngine.check(run)


def test_refuses_a_folder_with_tensors_that_the_learner_does_not_export(run_file: Path, tmp_path: Path) -> None:
    """Before anything starts: engines wait for every tensor of the folder, except rotary frequencies."""
    model = make_tiny_model(tmp_path, architecture="llama")
    tensors = load_file(model / "model.safetensors")
    run = config.load(run_file, [f"model.path={json.dumps(str(model))}"])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    check(run)
    tensors["model.layers.0.self_attn.gate.weight"] = torch.ones(8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"its weights have model.layers.0.self_attn.gate.weight, which the learner does not train"
    ):
        check(run)


def digested(run_file: Path, overrides: list[str]) -> dict[str, str]:
    run = config.load(run_file, overrides)
    return digests(shared_settings(run, options=MegatronBackend.options(run)), {})


@pytest.mark.parametrize(
    ("setting", "is_shared"),
    [
        ("staleness.learning_rate='ess_linear'", True),
        ("rollout.max_new_tokens=7", True),
        ("reference.kl_coef=0.2", True),
        ("reference.path='elsewhere'", False),
        ("metrics.samples_per_evaluation=1", False),
    ],
)
def test_ranks_must_share_the_settings_of_their_losses(run_file: Path, setting: str, is_shared: bool) -> None:
    """A rank with others would train something else. Folders may differ between machines."""
    overrides = ["reference.kl_coef=0.1", "reference.path='here'"]
    assert (digested(run_file, overrides) != digested(run_file, [*overrides, setting])) == is_shared


@pytest.mark.parametrize("setting", ["algorithm.denominator='after'", "algorithm.correction='tis_token+self_norm'"])
def test_refuses_a_loss_that_the_correction_would_scale(run_file: Path, tmp_path: Path, setting: str) -> None:
    """With denominator "after", a batch that is all rejected would multiply it by the number of tokens."""
    mixture = make_tiny_model(tmp_path / "mixture", architecture="qwen3_moe", characters=DIGITS)
    chosen = [f"model.path={json.dumps(str(mixture))}", "learner.options={aux_loss_coefficient=0.1}"]
    check(config.load(run_file, chosen))
    with pytest.raises(ConfigError, match=r"^learner.options.aux_loss_coefficient: .* would scale this loss as well"):
        check(config.load(run_file, [*chosen, "algorithm.aggregation='token_mean'", setting]))


def test_accepts_stop_strings_stop_tokens_and_a_shortest_answer(run_file: Path) -> None:
    taken = ['rollout.stop=["12", "\\n"]', "rollout.stop_token_ids=[5]", "rollout.min_new_tokens=2"]
    run = config.load(run_file, taken)
    check(run)
    sampling = run.rollout
    assert (sampling.stop, sampling.stop_token_ids, sampling.min_new_tokens) == (("12", "\n"), (5,), 2)


@pytest.mark.parametrize(
    ("options", "others", "problem"),
    [
        ("tensor_parallel=3", [], "tensor_parallel: 3 GPUs cannot be divided among machines = 2"),
        ("tensor_parallel=2, url='http://127.0.0.1:1'", [], r"a server of your own \(url\) is on its machines already"),
        ("tensor_parallel=2, server_arguments={dp-size=2}", [], r"SGLang keeps replicas \(dp-size\) on one machine"),
        (
            "tensor_parallel=2, server_arguments={nnodes=2}",
            [],
            "'nnodes' is set by asyncrl; remove it and use machines",
        ),
        ("tensor_parallel=2", ["weights.channel=objects"], "which the other machines do not see"),
        ("tensor_parallel=2", ["rollout.most_workers=3"], "rollout.most_workers cannot add any"),
        ("tensor_parallel=2", ["run.mode=sync", "run.colocated=true"], "engines that take turns with the learner"),
    ],
)
def test_refuses_engines_that_cannot_span_machines(
    run_file: Path, options: str, others: list[str], problem: str
) -> None:
    overrides = ["engine.kind=sglang", f"engine.options={{machines=2, {options}}}", *others]
    with pytest.raises(ConfigError, match=problem):
        check(config.load(run_file, overrides))
