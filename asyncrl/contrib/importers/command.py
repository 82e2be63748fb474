"""`asyncrl import-model SOURCE FOLDER`: creates a Hugging Face model folder from a GGUF file or a published folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asyncrl.contrib.importers.gguf_model import import_model
from asyncrl.errors import ConfigError
from asyncrl.os_process import exiting_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a .gguf file, package:NAME for one inside an installed Python package, or a Hugging Face folder with FP8 "
        "weights (DeepSeek-V3, Kimi-K2, MiniMax-M2), MXFP4 weights (gpt-oss), or INT4 weights (compressed-tensors); or "
        "one of MiMo-7B, or of Qwen3.5, of which the text part is taken",
    )
    parser.add_argument("destination", type=Path, metavar="FOLDER", help="the folder to create")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="data type of GGUF weights (default: float32)")


def run(options: argparse.Namespace) -> int:
    if Path(options.source).is_dir():
        from asyncrl.contrib.importers.quantized_folder import import_folder  # imports for seconds

        if options.dtype == "float32":
            raise ConfigError("--dtype: a folder keeps its dtype, and what is quantized becomes bfloat16; remove it")
        with exiting_on_signals():
            import_folder(Path(options.source), options.destination)
    else:
        import_model(options.source, options.destination, dtype=options.dtype or "float32")
    print(f"model.path = {json.dumps(str(options.destination))}")
    return 0
