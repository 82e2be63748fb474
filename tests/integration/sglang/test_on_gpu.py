"""SGLang on a GPU: families and options that its CPU server does not run, held to the logprobs of the learner.

Each test starts a server of a small random model whose heads have published sizes. Several share a GPU, so they may run
beside each other. ``record_property`` keeps what was measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.backends.port import Backend
from asyncrl.engines.generation import Generation
from asyncrl.engines.port import Meeting
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.engines.sglang.options import EXACT
from asyncrl.engines.sglang.server import find_free_port
from asyncrl.messages import SamplingParams
from asyncrl.policies.batching.packing import TrainingSequence
from asyncrl.weights.files import FilesChannel
from tests.harness.backends import VOCABULARY, forward, sequences, shares, started, tiny_model, with_draft_layer
from tests.harness.images import tiny_vision_model
from tests.harness.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.asyncio]

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
SERVER: Final[Mapping[str, Any]] = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-cuda-graph": True,
    "disable-prefill-cuda-graph": True,
    "mem-fraction-static": 0.2,
    "max-total-tokens": 8192,
    "max-running-requests": 32,
}
LEARNING_RATE: Final = 0.004
"""One step of AdamW moves every weight by about this, a twelfth of its deviation."""

Record = Callable[[str, object], None]
Answers = Sequence[tuple[NDArray[np.int32], Generation]]

LATENT: Final[Mapping[str, Any]] = {"hidden_size": 1024, "num_heads": 8}
"""Latent attention of DeepSeek-V3's sizes: 512 latent numbers, heads of 128 + 64."""
SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    # by SGLang's triton attention a decoded token sees one token less of its window: a window of 8 is 0.22 nats
    "gpt_oss": {"num_heads": 8, "entries": {"sliding_window": 4096}},
    # SGLang reads no output layer of Gemma's; with large embeddings a tied model says its last token again
    "gemma3": {"num_heads": 2, "num_kv_heads": 1, "tied": True, "initializer_range": 0.02},
    "qwen3_next": {"entries": {"linear_value_head_dim": 128}},
}
"""Where heads are not of 128 numbers."""
MOONLIGHT: Final[Mapping[str, Any]] = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
"""Moonlight and Kimi-K2 are a DeepseekV3ForCausalLM with one group of experts; Moonlight's queries are not latent."""


@pytest.fixture(autouse=True)
def all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers import every model, not only those of the CPU's tests (tests/conftest.py)."""
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS", raising=False)


KEYS_OF_FOLDERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_next": {"full_attention_interval": 2},
}
"""Keys of published config.json files that SGLang reads and transformers does not write."""


def made(folder: Path, architecture: str, **more: Any) -> Path:
    """Write a model with bfloat16's rounding far below the differences between two versions."""
    sizes = {
        "hidden_size": 512,
        "num_heads": 4,
        "initializer_range": 0.05,
        **SIZES.get(architecture, {}),
        **more,
    }
    return in_bfloat16(
        tiny_model(folder, architecture=architecture, **sizes),
        KEYS_OF_FOLDERS.get(architecture, {}),
    )


def in_bfloat16(folder: Path, keys: Mapping[str, Any] | None = None) -> Path:
    """Give a folder weights of 16 bits, as published ones have: SGLang makes some layers in config.json's dtype."""
    stored = load_file(folder / "model.safetensors")
    tensors = {name: one if "e_score_correction_bias" in name else one.bfloat16() for name, one in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for part in (config, *(config[name] for name in ("text_config", "vision_config") if name in config)):
        part["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps({**config, **(keys or {})}))
    return folder


@contextlib.asynccontextmanager
async def serving(
    folder: Path, arguments: Mapping[str, Any] | None = None, *, starts: bool = True, ranks: int = 1, **settings: Any
) -> AsyncIterator[Any]:
    """starts: False if the caller starts it, beside another one.  ranks: GPUs"""
    engine = SGLangEngine(
        folder,
        device=DEVICE,
        dtype="bfloat16",
        version=(0, 0),
        options=Options(
            tensor_parallel=ranks, server_arguments={**(SERVER if DEVICE == "cuda" else {}), **(arguments or {})}
        ),
        log_path=folder.parent / "server.log",
        **settings,
    )
    try:
        if starts:
            await engine.start()
        yield engine
    finally:
        await engine.close()
        print((folder.parent / "server.log").read_text(errors="replace")[-6000:])


def learner(folder: Path, kind: str = "megatron-1", **settings: Any) -> contextlib.AbstractContextManager[Backend]:
    return started(kind, folder, device=DEVICE, dtype="bfloat16", **settings)


def prompts(count: int = 16, *, seed: int = 0) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(seed)
    return [random.integers(4, VOCABULARY, 20 + 5 * n).astype(np.int32) for n in range(count)]


async def answer(engine: Any, asked: Sequence[NDArray[np.int32]], *, tokens: int = 32) -> Answers:
    """Let the engine answer all prompts at once, every second one greedily."""
    greedy = SamplingParams(max_new_tokens=tokens, ignore_eos=True, temperature=0.0, is_trained=False)
    sampled = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    made = (engine.generate(one, greedy if n % 2 else sampled, seed=n) for n, one in enumerate(asked))
    return list(zip(asked, await asyncio.gather(*made), strict=True))


def trained(backend: Backend, answers: Answers) -> NDArray[np.float32]:
    """Return the learner's logprobs of all tokens of the answers."""
    rows = [as_sequence(prompt, one) for prompt, one in answers]
    (packed,) = pack(rows, max_tokens=sum(len(row.tokens) for row in rows))
    found = forward(backend, "megatron-1", packed)  # of one process, as the reference backend
    order = np.argsort(packed.sequences, kind="stable")
    spans = [slice(packed.boundaries[n], packed.boundaries[n + 1]) for n in order]
    return np.concatenate([found[span][packed.response_mask[span]] for span in spans])


def as_sequence(prompt: NDArray[np.int32], made: Generation) -> TrainingSequence:
    tokens = np.concatenate([prompt, made.tokens])
    mask = np.arange(len(tokens)) >= len(prompt)
    zeros = np.zeros(len(tokens), np.float32)
    return TrainingSequence(
        tokens=tokens,
        response_mask=mask,
        behavior_logprobs=np.concatenate([zeros[: len(prompt)], made.logprobs]),
        advantages=zeros,
        loss_weights=zeros,
        staleness=zeros.astype(np.int32),
    )


def sampled(answers: Answers) -> NDArray[np.float32]:
    """Return the engine's logprobs of all tokens of the answers."""
    return np.concatenate([one.logprobs for _, one in answers])


async def hold_two_versions(
    engine: Any,
    backend: Backend,
    folder: Path,
    record: Record,
    *,
    mean: float = 0.08,
    version: int = 1,
    quantization: str = "",
) -> None:
    """The engine's logprobs are the learner's, before and after a step; the step moves them far more than they differ.

    version  number of the step's weights
    mean  bound on the mean difference. The largest is where rounding lets a mixture choose other experts, in bfloat16
          about one nat, whatever computes it; it is recorded
    """
    before = await answer(engine, prompts())
    first = trained(backend, before)
    backend.step(shares("megatron-1", sequences()), learning_rate=LEARNING_RATE)
    moved = float(np.abs(trained(backend, before) - first).mean())
    channel = FilesChannel(folder.parent / "weights", keep=2, model_path=folder, quantization=quantization)
    await engine.load(channel.publish(backend.export(), incarnation=0, policy_version=version))
    after = await answer(engine, prompts(seed=1))
    found = {"before": np.abs(sampled(before) - first), "after": np.abs(sampled(after) - trained(backend, after))}
    for name, errors in found.items():
        record(f"{name}_mean", round(float(errors.mean()), 5))
        record(f"{name}_p99", round(float(np.quantile(errors, 0.99)), 4))
        record(f"{name}_max", round(float(errors.max()), 4))
    record("tokens", sum(errors.size for errors in found.values()))
    record("moved_mean", round(moved, 4))
    assert max(float(errors.mean()) for errors in found.values()) < mean
    assert moved > 3 * mean
    assert {span.policy_version for _, one in after for span in one.version_spans} == {version}


# -- exactly on policy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
async def test_logprobs_of_engine_and_learner_are_equal_to_the_bit(
    ranks: int, tmp_path: Path, record_property: Record
) -> None:
    """run.exact: prompts read and answers decoded beside others, across a tile of 256 keys, before and after a step."""
    folder = made(tmp_path / "model", "qwen3")
    how = SamplingParams(max_new_tokens=300, ignore_eos=True)
    channel = FilesChannel(tmp_path / "weights", keep=2, model_path=folder)
    async with serving(folder, EXACT, ranks=ranks) as engine:
        with learner(folder, "reference", exact_ranks=ranks) as backend:
            for version in range(2):
                if version:
                    backend.step(shares("reference", sequences()), learning_rate=LEARNING_RATE)
                    await engine.load(channel.publish(backend.export(), incarnation=0, policy_version=version))
                asked = prompts(seed=version)
                found = await asyncio.gather(*(engine.generate(one, how, seed=n) for n, one in enumerate(asked)))
                answers = list(zip(asked, found, strict=True))
                errors = np.abs(sampled(answers) - trained(backend, answers))
                record_property(f"max_{version}", float(errors.max()))
                record_property(f"equal_{version}", f"{int((errors == 0).sum())} of {errors.size}")
                assert not errors.any()


# -- two machines ------------------------------------------------------------------------------------------------------

RUN: Final = """
run = { name = "parts", directory = "%(folder)s/runs" }
model = { path = "%(folder)s/model", dtype = "bfloat16" }
data = { path = "%(folder)s/none.jsonl" }
weights = { channel = "files" }
[engine]
kind = "sglang"
device = "%(device)s"
[engine.options]
machines = 2
tensor_parallel = 2
[engine.options.server_arguments]
"""


@pytest.mark.gpu(2)
async def test_an_engine_in_two_parts_samples_from_every_version(
    tmp_path: Path, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines with a GPU each: two addresses, `asyncrl engine-node`, and sockets between the parts."""
    folder = made(tmp_path / "model", "qwen3")
    arguments = {"disable-custom-all-reduce": True, **(SERVER if DEVICE == "cuda" else {"max-total-tokens": 8192})}
    lines = [f"{name} = {json.dumps(value)}" for name, value in arguments.items()]
    file = tmp_path / "run.toml"
    file.write_text(RUN % {"folder": tmp_path, "device": DEVICE} + "\n".join(lines) + "\n")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.setenv(name, "1")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    meeting = Meeting(host="127.0.0.2", port=find_free_port("127.0.0.2"), worker="w0")
    engine = registry.engine(config.load(file), name="w0")
    assert isinstance(engine, SGLangEngine)
    engine.meet_at(meeting)
    command = [sys.executable, "-m", "asyncrl", "engine-node", str(file), "--worker", "w0"]
    node = await asyncio.create_subprocess_exec(
        *(*command, "--meet", f"{meeting.host}:{meeting.port}", "--name", "w0-node1"),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus[1], "NCCL_HOSTID": "second"},
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[0])
    monkeypatch.setenv("NCCL_HOSTID", "first")
    try:
        await engine.start()
        with learner(folder) as backend:
            await hold_two_versions(engine, backend, folder, record_property)
            await hold_two_versions(engine, backend, folder, record_property, version=2)
        await engine.close()
        assert await node.wait() == 0, "the node ends with its engine"
    finally:
        with contextlib.suppress(ProcessLookupError):
            node.kill()
        await engine.close()
        for path in sorted((tmp_path / "runs").rglob("*.log")):
            print(f"--- {path.name}", path.read_text(errors="replace")[-3000:])


# -- families ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    [
        *("glm4_moe", "glm4", "deepseek_v3", "llama", "minimax_m2", "gpt_oss", "gemma3", "qwen2"),
        *("glm4_moe_lite", "qwen3_next", "mistral", "mixtral", "qwen2_moe", "qwen3_moe"),
    ],
)
async def test_a_family_is_sampled_as_it_is_trained(architecture: str, tmp_path: Path, record_property: Record) -> None:
    folder = made(tmp_path / "model", architecture)
    async with serving(folder) as engine:
        with learner(folder) as backend:
            await hold_two_versions(engine, backend, folder, record_property)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe"])
async def test_a_qwen3_5_as_published_is_sampled_as_it_is_trained(
    architecture: str, tmp_path: Path, record_property: Record
) -> None:
    """Prompts of text; the vision tower is in every version. Linear attention has the published sizes of a head."""
    folder = tiny_vision_model(
        tmp_path / "model",
        architecture=architecture,
        hidden_size=512,
        vision_size=128,
        initializer_range=0.05,
        entries={"linear_value_head_dim": 128},
    )
    async with serving(in_bfloat16(folder)) as engine:
        with learner(folder) as backend:
            await hold_two_versions(engine, backend, folder, record_property)


@pytest.mark.parametrize("architecture", ["Phi3", "Olmo2", "StableLm", "SeedOss", "Starcoder2"])
async def test_what_the_reference_backend_alone_trains_is_sampled_as_it_is_trained(
    architecture: str, tmp_path: Path, record_property: Record
) -> None:
    folder = made(tmp_path / "model", f"{architecture}Config")
    async with serving(folder) as engine:
        with learner(folder, "reference") as backend:
            await hold_two_versions(engine, backend, folder, record_property)


async def test_moonlight_is_sampled_as_it_is_trained(tmp_path: Path, record_property: Record) -> None:
    folder = made(tmp_path / "model", "deepseek_v3", entries=MOONLIGHT)
    async with serving(folder) as engine:
        with learner(folder) as backend:
            await hold_two_versions(engine, backend, folder, record_property)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "quantization"), [("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("qwen3", "fp8_ue8m0")]
)
async def test_every_version_is_served_in_fp8(
    architecture: str, quantization: str, tmp_path: Path, record_property: Record
) -> None:
    """weights.quantization: the server starts on a quantized copy and loads quantized versions.

    By rounding a mixture chooses other experts here and there, so that it may be further off than a dense model.
    """
    folder = made(tmp_path / "model", architecture)
    async with serving(folder, quantization=quantization, quantized=tmp_path / "quantized") as engine:
        with learner(folder, quantization=quantization) as backend:
            mean = 0.2 if architecture == "qwen3_moe" else 0.15
            await hold_two_versions(engine, backend, folder, record_property, mean=mean)


@pytest.mark.parametrize("quantization", ["int4_group32", "int4"])
async def test_every_version_is_served_in_int4(quantization: str, tmp_path: Path, record_property: Record) -> None:
    """weights.quantization: experts in 4 bits, to which the learner rounds them as well, so that both are as close as
    without. With CUDA graphs, which read the same memory after each of the two loads."""
    folder = made(tmp_path / "model", "qwen3_moe")
    graphs = {"disable-cuda-graph": False, "cuda-graph-max-bs": 16}
    async with serving(folder, graphs, quantization=quantization, quantized=tmp_path / "quantized") as engine:
        with learner(folder, quantization=quantization) as backend:
            for version in (1, 2):
                await hold_two_versions(
                    engine, backend, folder, record_property, version=version, quantization=quantization
                )


@pytest.mark.parametrize("dtype", ["fp8_e5m2", "fp8_e4m3"])
async def test_keys_and_values_in_fp8(dtype: str, tmp_path: Path, record_property: Record) -> None:
    folder = made(tmp_path / "model", "qwen3")
    async with serving(folder, {"kv-cache-dtype": dtype}) as engine:
        with learner(folder) as backend:
            await hold_two_versions(engine, backend, folder, record_property, mean=0.15)


async def test_the_state_of_linear_attention_in_bfloat16(tmp_path: Path, record_property: Record) -> None:
    folder = made(tmp_path / "model", "qwen3_next")
    async with serving(folder, {"mamba-ssm-dtype": "bfloat16"}) as engine:
        with learner(folder) as backend:
            await hold_two_versions(engine, backend, folder, record_property, mean=0.1)


# -- speculation, cache ------------------------------------------------------------------------------------------------


STEPS: Final = {"speculative-num-steps": 1, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": 2}


@pytest.mark.parametrize("kind", ["NGRAM", "NEXTN", "STANDALONE"])
async def test_speculation_changes_no_greedy_token(kind: str, tmp_path: Path, record_property: Record) -> None:
    """The same tokens as a server without, except after two that are equally likely but for rounding; and versions.

    STANDALONE drafts with the first version, which stays: it is accepted less once the policy has moved.
    """
    options: dict[str, Any] = {}
    arguments: Mapping[str, Any] = STEPS
    if kind == "NEXTN":
        folder = in_bfloat16(
            with_draft_layer(tmp_path, "glm4_moe", hidden_size=512, num_heads=4, initializer_range=0.05)
        )
        options = {"draft_coefficient": 0.2}
    else:
        folder = made(tmp_path / "model", "qwen3")
        draft = shutil.copytree(folder, tmp_path / "draft")
        own = {**STEPS, "speculative-draft-model-path": str(draft)}
        arguments = own if kind == "STANDALONE" else {"speculative-num-draft-tokens": 4}
    plain_folder = tmp_path / "plain" / "model"
    plain_folder.parent.mkdir()
    plain_folder.symlink_to(folder)
    asked = [np.tile(one[:8], 6) for one in prompts()]
    async with (
        serving(
            folder, {"speculative-algorithm": kind, **arguments}, starts=False, has_drafts=kind == "NEXTN"
        ) as engine,
        serving(plain_folder, starts=False) as plain,
    ):
        await asyncio.gather(engine.start(), plain.start())
        ours, theirs = await answer_greedily(engine, asked), await answer_greedily(plain, asked)
        record_property("accepted", accepted(ours))
        differ = [list(one.tokens) != list(other.tokens) for one, other in zip(ours, theirs, strict=True)]
        record_property("answers_that_differ", f"{sum(differ)} of {len(ours)}")
        for one, other in itertools.compress(zip(ours, theirs, strict=True), differ):
            at = int(np.argmax(one.tokens != other.tokens))
            assert abs(one.logprobs[at] - other.logprobs[at]) < 0.05, f"token {at} of an answer"
        with learner(folder, options=options) as backend:
            await hold_two_versions(engine, backend, folder, record_property)
        later = accepted(await answer_greedily(engine, asked))
        record_property("accepted_later", later)
        assert accepted(ours) > 0
        if kind == "STANDALONE":
            assert later < 0.5 * accepted(ours)


def accepted(answers: Sequence[Generation]) -> float:
    """Return the share of the drafted tokens that the policy took."""
    drafted = sum(one.report.drafted_tokens for one in answers)
    return sum(one.report.accepted_tokens for one in answers) / max(1, drafted)


async def answer_greedily(engine: Any, asked: Sequence[NDArray[np.int32]]) -> list[Generation]:
    greedy = SamplingParams(max_new_tokens=64, ignore_eos=True, temperature=0.0, is_trained=False)
    return list(await asyncio.gather(*(engine.generate(one, greedy, seed=0) for one in asked)))


async def test_what_leaves_the_cache_comes_back_from_the_host(tmp_path: Path, record_property: Record) -> None:
    """Prompts of 8,000 tokens pass a cache of 2,048; the first ones are then read from the host, and a new version
    reads none of them."""
    folder = made(tmp_path / "model", "qwen3")
    arguments = {"enable-hierarchical-cache": True, "hicache-size": 1, "hicache-write-policy": "write_through"}
    few = SamplingParams(max_new_tokens=8, ignore_eos=True)
    random = np.random.default_rng(0)
    asked = [random.integers(4, VOCABULARY, 200).astype(np.int32) for _ in range(40)]
    async with serving(folder, {**arguments, "max-total-tokens": 2048, "max-running-requests": 4}) as engine:
        for one in asked:
            await engine.generate(one, few, seed=0)
        again = [(one, await engine.generate(one, few, seed=1)) for one in asked[:8]]
        cached = [one.report.cached_tokens for _, one in again]
        record_property("cached_tokens", str(cached))
        with learner(folder) as backend:
            errors = np.abs(sampled(again) - trained(backend, again))
            record_property("again_mean", round(float(errors.mean()), 5))
            assert errors.mean() < 0.05
            assert min(cached) > 150
            await hold_two_versions(engine, backend, folder, record_property)
