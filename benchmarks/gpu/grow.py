"""Grow a dense Llama into a Mixtral that still knows its task: every expert is its MLP, with a little noise.

    python -m benchmarks.gpu.grow DENSE FOLDER --experts 128      SmolLM2-135M becomes 10 B parameters, 20 GB

The weights of the chosen experts sum to 1, so without noise the mixture is the same function, whatever its router says.
Noise (a share of the deviation of each matrix) tells experts apart, so that it matters which are chosen. The router is
random, and the output layer is a copy of the embeddings of its own, as SGLang wants it of a mixture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import safe_open

from asyncrl.tensors.weight_files import INDEX_FILE, file_name, is_weight_file

_LEAVES: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_ONLY_DENSE: Final = ("mlp_bias", "attention_bias", "pretraining_tp")
_ROUTER_DEVIATION: Final = 0.02
_WRITERS: Final = 4


def grow(
    dense: Path,
    folder: Path,
    *,
    experts: int,
    chosen: int = 8,
    noise: float = 0.01,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the mixture to ``folder``, and return it.

    chosen  experts of a token
    noise   share of the deviation
    dtype   of its weights; None: that of the dense ones
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in dense.iterdir():
        if path.is_file() and not is_weight_file(path.name):
            shutil.copy(path, folder / path.name)
    config = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(grown_config(config, experts=experts, chosen=chosen), indent=1))
    layers = config["num_hidden_layers"]
    with safe_open(dense / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118  no mapping
    files: dict[str, str] = {}

    def write(number: int) -> list[str]:
        made = dict(_of_layer(tensors, number, experts=experts, noise=noise, seed=seed + number))
        name = file_name(number, layers + 1)
        safetensors.torch.save_file(made, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(made, name))
        return list(made)

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(layers)))
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")}
    rest.setdefault("lm_head.weight", rest["model.embed_tokens.weight"].clone())
    safetensors.torch.save_file(rest, folder / file_name(layers, layers + 1), metadata={"format": "pt"})
    files.update(dict.fromkeys(rest, file_name(layers, layers + 1)))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def grown_config(config: Mapping[str, Any], *, experts: int, chosen: int) -> dict[str, Any]:
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return {
        **{key: value for key, value in config.items() if key not in _ONLY_DENSE},
        "rope_theta": theta,  # where transformers looked for it before "rope_parameters"
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": min(chosen, experts),
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "tie_word_embeddings": False,
    }


def _of_layer(
    tensors: Mapping[str, torch.Tensor], layer: int, *, experts: int, noise: float, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"model.layers.{layer}."
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(seed)
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        if ".mlp." not in name:
            yield name, tensor
            continue
        leaf = _LEAVES[name.removesuffix(".weight").rpartition(".")[2]]
        deviation = noise * float(tensor.float().std())
        for expert in range(experts):
            drawn = torch.randn(tensor.shape, generator=random, device=device, dtype=tensor.dtype)
            grown = drawn.mul_(deviation).add_(tensor.to(device)).cpu()
            yield f"{prefix}block_sparse_moe.experts.{expert}.{leaf}.weight", grown
    hidden = tensors[f"{prefix}mlp.gate_proj.weight"].shape[1]
    gate = torch.randn(experts, hidden, generator=random, device=device) * _ROUTER_DEVIATION
    yield f"{prefix}block_sparse_moe.gate.weight", gate.to(tensors[f"{prefix}mlp.gate_proj.weight"].dtype).cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path, help="folder of a Llama with its weights in one file")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8, help="experts of a token (default 8)")
    parser.add_argument("--noise", type=float, default=0.01, help="share of the deviation of each matrix (default .01)")
    options = parser.parse_args()
    began = time.monotonic()
    settings = {"experts": options.experts, "chosen": options.chosen, "noise": options.noise}
    grow(options.dense, options.folder, **settings, dtype=torch.bfloat16)
    size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
    print(f"{options.folder}: {size / 1e9:.1f} GB in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
