"""`asyncrl quantize SOURCE FOLDER`: writes a Hugging Face model folder in FP8 or INT4, which SGLang loads.

The matrices of layers are quantized; embeddings, output layer, routers and norms are not. `asyncrl import-model` is the
way back. Test: tests/unit/contrib/importers/test_quantize.py.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from asyncrl.data.model_folder import check_model, new_folder
from asyncrl.errors import ConfigError
from asyncrl.os_process import exiting_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a Hugging Face folder with 16- or 32-bit weights")
    parser.add_argument("destination", type=Path, metavar="FOLDER", help="the folder to create")
    parser.add_argument(
        "--format",
        choices=["fp8", "fp8_ue8m0", "int4"],
        required=True,
        help="fp8: e4m3 in blocks of 128 x 128, as DeepSeek-V3; fp8_ue8m0: the same with powers of two as scales. "
        "int4: symmetric, as compressed-tensors packs it",
    )
    parser.add_argument(
        "--group", type=int, choices=[32, 64, 128], help="numbers of a row that share a scale in int4 (default: 128)"
    )


def run(options: argparse.Namespace) -> int:
    if options.group and options.format != "int4":
        raise ConfigError(f"--group is for int4; {options.format} has blocks of 128 x 128: remove it")
    with exiting_on_signals():
        quantize(options.source, options.destination, options.format, group=options.group or 128)
    print(f"model.path = {json.dumps(str(options.destination))}")
    return 0


def quantize(source: Path, destination: Path, quantization: str, *, group: int = 128) -> None:
    """Write the model in ``source`` to ``destination``.

    Raises ConfigError for a model that is quantized already, for sizes that the format does not fit, and for a
    destination that exists.
    """
    check_model(source)
    config = json.loads((source / "config.json").read_text())
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: its weights are quantized already; `asyncrl import-model` makes 16-bit ones")
    if "GptOssForCausalLM" in config["architectures"]:
        raise ConfigError(
            f"{source}: gpt-oss holds all experts of a layer in one tensor, which {quantization} does not"
        )
    from asyncrl.tensors import fp8, int4  # import torch
    from asyncrl.tensors.quantized_model import find_scale, write_folder

    if name := find_scale(source):
        raise ConfigError(f"{source}: has {name}, so its weights are quantized, although config.json does not say so")
    with new_folder(destination) as folder:
        try:
            if quantization == "int4":
                write_folder(
                    source, folder, partial(int4.quantize_tensors, group=group), partial(int4.config, group=group)
                )
            else:
                eight_bits = partial(fp8.quantize_tensors, quantization=quantization)
                write_folder(source, folder, eight_bits, lambda _: fp8.config(quantization))
        except ValueError as error:
            raise ConfigError(f"{source}: {error}; use a smaller --group, or --format fp8") from None
