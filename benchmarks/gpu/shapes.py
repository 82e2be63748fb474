"""Make model folders of real sizes with random weights in seconds, for benchmarks that need no trained model.

    python -m benchmarks.gpu.shapes 0.6B FOLDER [bfloat16 | float32]

They have Qwen3's layers and vocabulary. The tokenizer of asyncrl.data.tiny_model knows the first forty ids, and decodes
the others to nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from asyncrl.tensors.weight_files import INDEX_FILE, file_name
from benchmarks.gpu.vision_shapes import VISION_SHAPES, make_vision_model

PROMPT_CHARACTERS: Final = 100
"""Characters of a prompt, and so its number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int = 128
    vocabulary: int = 151_936
    positions: int = 40_960
    experts: int = 0
    experts_per_token: int = 8
    expert_ffn: int = 768
    tied: bool = True
    """The output layer is the embeddings'; a mixture has its own."""


SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(hidden=64, layers=2, ffn=128, heads=4, kv_heads=2, head_size=16, vocabulary=1024, positions=4096),
    # For eight ranks in any layout.
    "tiny-8": Shape(hidden=64, layers=8, ffn=128, heads=8, kv_heads=8, head_size=16, vocabulary=1024, positions=4096),
    "0.6B": Shape(hidden=1024, layers=28, ffn=3072, heads=16, kv_heads=8),
    "1.7B": Shape(hidden=2048, layers=28, ffn=6144, heads=16, kv_heads=8),
    "4B": Shape(hidden=2560, layers=36, ffn=9728, heads=32, kv_heads=8),
    "8B": Shape(hidden=4096, layers=36, ffn=12288, heads=32, kv_heads=8),
    "14B": Shape(hidden=5120, layers=40, ffn=17408, heads=40, kv_heads=8, tied=False),
    "32B": Shape(hidden=5120, layers=64, ffn=25600, heads=64, kv_heads=8, tied=False),
    "tiny-moe": Shape(
        hidden=64,
        layers=2,
        ffn=128,
        heads=4,
        kv_heads=2,
        head_size=16,
        vocabulary=1024,
        positions=4096,
        experts=8,
        experts_per_token=2,
        expert_ffn=32,
    ),
    # The first of its 48 layers, or all.
    **{
        f"30B-A3B:{layers}": Shape(hidden=2048, layers=layers, ffn=6144, heads=32, kv_heads=4, experts=128)
        for layers in (4, 6, 8, 12, 18, 24, 48)
    },
    # The first of its 94 layers, or all.
    **{
        f"235B-A22B:{layers}": Shape(
            hidden=4096, layers=layers, ffn=12288, heads=64, kv_heads=4, experts=128, expert_ffn=1536
        )
        for layers in (8, 12, 16, 24, 48, 94)
    },
}

_LARGEST_FILE: Final = 100e9
"""Bytes. The weights of a larger model are written layer by layer, as the host has no room for them twice."""


def make_model(shape: Shape, folder: Path, *, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write config, weights (normal, 0.02) and tokenizer to ``folder``, and return it."""
    import safetensors.torch
    import torch
    import transformers

    from asyncrl.data.tiny_model import make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(max_positions=shape.positions)
    tokenizer.save_pretrained(folder)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    transformers.GenerationConfig(**special).save_pretrained(folder)
    kind, experts = ("Qwen3Moe", _experts(shape)) if shape.experts else ("Qwen3", {})
    getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=is_tied(shape),
        bos_token_id=None,
        dtype=getattr(torch, dtype),
        **special,
        **experts,
    ).save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:  # the weight of a norm
            return torch.ones(size, dtype=getattr(torch, dtype))
        random = torch.randn(size, generator=generator, device=device, dtype=getattr(torch, dtype))
        return random.mul_(0.02).cpu()

    files = split(shape, most_parameters=_LARGEST_FILE / getattr(torch, dtype).itemsize)
    for file, names in files.items():
        weights = {name: tensor(size) for name, size in names.items()}
        safetensors.torch.save_file(weights, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        places = {name: file for file, names in files.items() for name in names}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def split(shape: Shape, *, most_parameters: float) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the sizes of the tensors of each file: one file, or one for each layer if there are more parameters."""
    if num_parameters(shape) <= most_parameters:
        return {"model.safetensors": dict(sizes(shape))}
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in sizes(shape):
        words = name.split(".")
        layer = int(words[2]) if words[1] == "layers" else shape.layers
        files.setdefault(file_name(layer, shape.layers + 1), {})[name] = size
    return files


def _experts(shape: Shape) -> dict[str, Any]:
    """Return the entries of config.json about experts."""
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": True,
    }


def is_tied(shape: Shape) -> bool:
    return shape.tied and not shape.experts  # SGLang ties no mixture's output layer


def sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the Hugging Face name and size of every tensor."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        parts = {
            "input_layernorm": (shape.hidden,),
            "post_attention_layernorm": (shape.hidden,),
            "self_attn.q_proj": (queries, shape.hidden),
            "self_attn.k_proj": (keys, shape.hidden),
            "self_attn.v_proj": (keys, shape.hidden),
            "self_attn.o_proj": (shape.hidden, queries),
            "self_attn.q_norm": (shape.head_size,),
            "self_attn.k_norm": (shape.head_size,),
            **_feed_forward(shape),
        }
        for name, size in parts.items():
            yield f"model.layers.{layer}.{name}.weight", size
    yield "model.norm.weight", (shape.hidden,)
    if not is_tied(shape):
        yield "lm_head.weight", (shape.vocabulary, shape.hidden)


def _feed_forward(shape: Shape) -> dict[str, tuple[int, ...]]:
    names = [f"mlp.experts.{expert}" for expert in range(shape.experts)] or ["mlp"]
    ffn = shape.expert_ffn if shape.experts else shape.ffn
    parts: dict[str, tuple[int, ...]] = {"mlp.gate": (shape.experts, shape.hidden)} if shape.experts else {}
    for name in names:
        up, down = (ffn, shape.hidden), (shape.hidden, ffn)
        parts |= {f"{name}.gate_proj": up, f"{name}.up_proj": up, f"{name}.down_proj": down}
    return parts


def num_parameters(shape: Shape) -> int:
    return sum(int(np.prod(size)) for _, size in sizes(shape))


def write_prompts(path: Path, *, metadata: Mapping[str, Any], rows: int = 4096, seed: int = 0) -> Path:
    """Write rows of random text, PROMPT_CHARACTERS each, all different; each row carries ``metadata``."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    random = np.random.default_rng(seed)
    with path.open("w") as file:
        for _ in range(rows):
            prompt = "".join(random.choice(letters, PROMPT_CHARACTERS))
            file.write(json.dumps({"prompt": prompt, "metadata": dict(metadata)}) + "\n")
    return path


def main() -> int:
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in (*SHAPES, *VISION_SHAPES):
        print(__doc__, f"shapes: {', '.join((*SHAPES, *VISION_SHAPES))}", sep="\n", file=sys.stderr)
        return 2
    began = time.monotonic()
    if sys.argv[1] in VISION_SHAPES:
        make_vision_model(sys.argv[1], Path(sys.argv[2]), dtype=sys.argv[3] if len(sys.argv) == 4 else "bfloat16")
        print(f"{sys.argv[2]}: {sys.argv[1]} in {time.monotonic() - began:.0f} s", flush=True)
        return 0
    shape, folder = SHAPES[sys.argv[1]], Path(sys.argv[2])
    make_model(shape, folder, dtype=sys.argv[3] if len(sys.argv) == 4 else "bfloat16")
    print(f"{folder}: {num_parameters(shape) / 1e9:.2f} B parameters in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
