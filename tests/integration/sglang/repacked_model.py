"""A program: updates a real SGLang model whose INT4 layers SGLang has repacked, without a GPU.

Usage: repacked_model.py OLD NEW, two folders in INT4. Prints a JSON object: the error of SGLang's own second load, the
parameters that differ from a start from NEW before and after our update, and those that moved.

Marlin's two CUDA functions are replaced: the one that repacks weights by a permutation, and the one that measures its
workspace. Everything else is SGLang's own.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import sglang.srt.layers.dp_attention as dp_attention
import torch
import transformers
from sglang.srt import distributed, server_args
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as scheme
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.qwen3 import Qwen3ForCausalLM

from asyncrl.engines.sglang import loader
from asyncrl.tensors import int4
from tests.unit.engines.sglang.test_loader import ordered

CPU = torch.device("cpu")


def repack(data: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: int) -> torch.Tensor:
    assert (data.shape, num_bits) == ((size_k // 8, size_n), 4)
    order = torch.randperm(data.numel(), generator=torch.Generator().manual_seed(0))
    return data.reshape(-1)[order].reshape(size_k // 16, size_n * 2)


def prepare(folder: Path) -> None:
    """Set up what a server's process sets up before it builds a model."""
    scheme.gptq_marlin_repack = repack
    scheme.marlin_make_workspace = lambda device: torch.zeros(4, dtype=torch.int32, device=device)
    scheme.WNA16_SUPPORTED_TYPES_MAP[4] = types.SimpleNamespace(size_bits=4)
    CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True  # asks the GPU
    arguments = server_args.ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native")
    server_args.set_global_server_args_for_scheduler(arguments)
    distributed.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder / 'meeting'}", backend="gloo"
    )
    distributed.initialize_model_parallel(backend="gloo")
    try:
        from sglang.srt.runtime_context import get_parallel

        names = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp")
        get_parallel().override_permanently(**{f"{name}_rank": 0 for name in names})
        dp_attention.initialize_dp_attention(server_args=arguments)
    except (ImportError, AttributeError, TypeError):  # SGLang 0.5.16
        from sglang.srt.configs.model_config import ModelConfig

        dp_attention.initialize_dp_attention(arguments, ModelConfig(str(folder)))
    torch.set_default_dtype(torch.bfloat16)


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    return loader.tensors(folder / "model.safetensors", CPU)


def started(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = Qwen3ForCausalLM(config, quant_config=CompressedTensorsConfig.from_config(int4.CONFIG))
    DefaultModelLoader.load_weights_and_postprocess(model, tensors(folder), CPU)
    return model


def places(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(one), one.data_ptr()) for name, one in model.named_parameters()}


def different(model: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    expected = dict(other.named_parameters())
    return [name for name, one in model.named_parameters() if not torch.equal(one, expected[name])]


def main(old: Path, new: Path) -> None:
    prepare(old)
    model, expected = started(old), started(new)
    before = places(model)
    told: dict[str, Any] = {"parameters": len(before), "own_error": ""}
    try:
        model.load_weights(tensors(new))
    except (AssertionError, AttributeError) as error:
        told["own_error"] = f"{type(error).__name__}: {error}"
    told["before"] = different(model, expected)
    loader.load(model, ordered(loader.serialized((new / "model.safetensors",))))
    told["after"] = different(model, expected)
    told["moved"] = [name for name, place in places(model).items() if place != before[name]]
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
