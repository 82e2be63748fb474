"""slime's own trainer: python -m benchmarks.gpu.peers.slime_run {train | train_async} GPUS [options of slime]"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Final

from benchmarks.gpu.shapes import SHAPES, is_tied

HERE: Final = "benchmarks.gpu.peers"


def options_of_model(name: str, folder: str) -> dict[str, Any]:
    shape = SHAPES[name]
    return {
        "hf-checkpoint": folder,
        "load": folder,
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "group-query-attention": True,
        "num-query-groups": shape.kv_heads,
        "kv-channels": shape.head_size,
        "vocab-size": shape.vocabulary,
        "swiglu": True,
        "qk-layernorm": True,
        "use-rotary-position-embeddings": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "norm-epsilon": 1e-6,
        "rotary-base": 10_000,
        "untie-embeddings-and-output-weights": not is_tied(shape),
        "seq-length": 4096,
        "max-position-embeddings": shape.positions,
    }


LAYERS: Final[dict[str, Any]] = {
    "transformer-impl": "local",
    "spec": [f"{HERE}.slime_layers", "layers"],
    "no-gradient-accumulation-fusion": True,
    "no-masked-softmax-fusion": True,
    "no-rope-fusion": True,
    "no-persist-layer-norm": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "accumulate-allreduce-grads-in-fp32": True,
}
LEARNING: Final[dict[str, Any]] = {
    "advantage-estimator": "grpo",
    "optimizer": "adam",
    "lr": 1e-6,
    "lr-decay-style": "constant",
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "use-dynamic-batch-size": True,
    "num-rollout": 1000,
    "rollout-temperature": 1.0,
    "input-key": "prompt",
}
PARTS: Final[dict[str, Any]] = {
    "custom-generate-function-path": f"{HERE}.slime_parts.generate",
    "custom-rm-path": f"{HERE}.slime_parts.reward",
    "rollout-data-postprocess-path": f"{HERE}.slime_parts.begun",
    "custom-rollout-log-function-path": f"{HERE}.slime_parts.collected",
}
COLOCATED: Final[dict[str, Any]] = {"colocate": True, "no-offload-train": True, "no-offload-rollout": True}
"""Both sides fit at once, and slime is faster so than with its offloading."""
FULLY_ASYNC: Final[dict[str, Any]] = {
    "rollout-function-path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
}


def words(options: dict[str, Any]) -> list[str]:
    """True is a flag, False none."""
    made: list[str] = []
    for name, value in options.items():
        if value is not False:
            made.append(f"--{name}")
        if not isinstance(value, bool):
            made += [str(one) for one in (value if isinstance(value, list) else [value])]
    return made


def main() -> None:
    import ray

    module, gpus = sys.argv[1], int(sys.argv[2])
    sys.argv = [f"{module}.py", *sys.argv[3:]]
    # Its actors reserve CPUs for every GPU and for each helper, however few of them the machine has.
    ray.init("local", num_gpus=gpus, num_cpus=max(16, os.cpu_count() or 0), include_dashboard=False)
    from slime.utils.arguments import parse_args

    importlib.import_module(module).train(parse_args())


if __name__ == "__main__":
    main()
