"""`asyncrl convert SRC DST`: converts a Hugging Face model folder to a Megatron checkpoint, or back."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.os_process import exiting_on_signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="SRC",
        help="a Hugging Face folder, a Megatron torch_dist checkpoint, or a run's checkpoint (checkpoints/step-...)",
    )
    parser.add_argument("destination", type=Path, metavar="DST", help="the folder to create, in the other format")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="when converting a checkpoint: a Hugging Face folder of the same model, for config.json and tokenizer "
        "(default: SRC/huggingface, where convert put it)",
    )


def run(options: argparse.Namespace) -> int:
    from asyncrl.contrib.importers.megatron_checkpoint import convert  # imports for seconds

    with exiting_on_signals():
        done = convert(options.source, options.destination, model=options.model)
    print(f"{options.destination}: {done.num_tensors:,} tensors, {done.num_bytes / 1e6:,.1f} MB")
    if done.padding:
        print(f"left out as padding, since config.json has a smaller vocab_size: {done.padding} rows of the embeddings")
    if done.left_out:
        print(f"left out, in no part of the model that is trained: {len(done.left_out)}, such as {done.left_out[0]}")
    return 0
