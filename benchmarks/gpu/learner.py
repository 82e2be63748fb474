"""Measure the Megatron learner's step: tokens per second, model FLOP/s utilisation, memory, and where the time goes.

    python -m benchmarks.gpu.learner --json FILE                 0.6B and 1.7B, 16k and 32k tokens, none and full
    python -m benchmarks.gpu.learner --profile FOLDER ...        one more step of each under torch.profiler
    python -m benchmarks.gpu.learner --layouts 1x1 2x1 1x2       data-parallel x tensor-parallel ranks
    python -m benchmarks.gpu.learner --layouts 1x1 cp2 pp2 ep2 tp2-cp2     context, pipeline and expert parallel too
    python -m benchmarks.gpu.learner --agree                     do layouts train the same, and resume 1x1?
    python -m benchmarks.gpu.learner --checkpoints FOLDER        the pause for a checkpoint that is written there
    python -m benchmarks.gpu.learner --shapes Qwen2.5-VL-3B --sides 0 32 --towers frozen trained      with pictures
    python -m benchmarks.gpu.learner --device cpu --shapes tiny --tokens 512    a rehearsal

A step is the backend's own: GRPO on sequences of about a thousand random tokens, all but the first token trained, one
optimizer step per --micro-batches rows. Packed lengths differ from step to step. Utilisation includes attention and
excludes recomputation (asyncrl/backends/flops.py); an H200 reaches 790e12 FLOP/s on large matrices, and its data sheet
says 989e12. Measurements run in a child process. A measurement that fails or hangs is reported, and the rest continue.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.learner_step import Sizes, Variant, agree, measure
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.vision_shapes import VISION_SHAPES

SILENCE_SECONDS: Final = 120.0
"""A child that prints nothing for this long is killed."""


def child(task: dict[str, Any]) -> int:
    """Measure each variant in turn. Print a JSON line for each, and for each step, so that the parent sees progress."""
    folder, profile = Path(task["folder"]), Path(task["profile"]) if task["profile"] else None
    checkpoints = Path(task["checkpoints"]) if task["checkpoints"] else None
    for entry in task["variants"]:
        variant = Variant(**entry)
        result = measure(
            variant,
            folder,
            device=task["device"],
            warm_up=task["warm_up"],
            steps=task["steps"],
            profile=profile,
            checkpoints=checkpoints,
            told=begins,
        )
        print(json.dumps({"result": result}), flush=True)
    if task["agree"]:
        begins("agree")
        result = agree(folder, device=task["device"], **task["agree"])
        print(json.dumps({"result": result}), flush=True)
    return 0


def begins(what: str) -> None:
    print(json.dumps({"begins": what}), flush=True)


def run_child(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the results of a child process. If it dies or falls silent, report that and end early."""
    command = [sys.executable, "-m", "benchmarks.gpu.learner", "--child", json.dumps(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = threading.Timer(SILENCE_SECONDS, process.kill)
        watch.start()
        for line in process.stdout:
            watch.cancel()
            watch = threading.Timer(SILENCE_SECONDS, process.kill)
            watch.start()
            try:
                message = json.loads(line)
            except json.JSONDecodeError:
                print(line, end="", flush=True)
                continue
            if "result" in message:
                yield message["result"]
        process.wait()
        watch.cancel()
        if process.returncode:
            print(f"child ended with {process.returncode}", flush=True)


def table_row(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{result['name']:44} failed"
    return (
        f"{result['name']:44} {result['sequences']:5} {result['tokens_per_second']:9,.0f} "
        f"{result['mfu_790']:6.3f} {result['mfu_790_without_attention']:6.3f} {result['mfu_989']:6.3f} "
        f"{result['step_seconds']:7.3f} {result.get('optimizer_gpu_seconds', float('nan')):7.4f} "
        f"{result.get('gpu_busy', float('nan')):5.2f} {result['peak_gib']:6.1f} "
        f"{result['start_seconds']:6.1f} {result['warm_seconds']:6.1f}"
    )


HEADER: Final = (
    f"{'variant':44} {'docs':>5} {'tokens/s':>9} {'mfu790':>6} {'no att':>6} {'mfu989':>6} "
    f"{'step s':>7} {'optim s':>7} {'busy':>5} {'GiB':>6} {'start':>6} {'warm':>6}"
)


def run_shape(arguments: argparse.Namespace, folder: Path, variants: list[Variant]) -> Iterator[dict[str, Any]]:
    """Yield the result of every variant. After a failure, a new child takes the rest.

    A variant with overlap has a child of its own: all ranks must be new (overlapped_linear.find_window_problem).
    """
    task = {"folder": str(folder), "device": arguments.device, "agree": None}
    task["warm_up"], task["steps"] = arguments.warm_up, arguments.steps
    task["profile"], task["checkpoints"] = arguments.profile or "", arguments.checkpoints or ""
    while variants:
        alone = variants[0].is_overlapped
        batch = variants[:1] if alone else list(itertools.takewhile(lambda v: not v.is_overlapped, variants))
        todo = {**task, "variants": [dataclasses.asdict(v) for v in batch]}
        done = 0
        for result in run_child(todo):
            done += 1
            yield result
        if done < len(batch):
            yield {**dataclasses.asdict(variants[done]), "name": variants[done].name, "failed": True}
            done += 1
        variants = variants[done:]


def layout_of(word: str) -> Sizes:
    """Parse "2x1" (data x tensor) or sizes such as "tp2-cp2". The ranks of ep are data-parallel ranks."""
    data, times, tensor = word.partition("x")
    if times:
        return {"data_parallel": int(data), "tensor_parallel": int(tensor)}
    sizes = {size[:2]: int(size[2:]) for size in word.split("-")}
    if unknown := sizes.keys() - set(_SIZES):
        raise ValueError(f"{word!r}: {', '.join(sorted(unknown))} is none of {', '.join(_SIZES)}")
    return {
        "data_parallel": sizes.get("dp", sizes.get("ep", 1)),
        "tensor_parallel": sizes.get("tp", 1),
        "context_parallel": sizes.get("cp", 1),
        "pipeline_parallel": sizes.get("pp", 1),
        "expert_parallel": sizes.get("ep", 1),
    }


_SIZES: Final = ("dp", "tp", "cp", "pp", "ep")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one object a line")
    parser.add_argument("--shapes", nargs="*", default=["0.6B", "1.7B"], choices=[*SHAPES, *VISION_SHAPES])
    parser.add_argument("--tokens", nargs="*", type=int, default=[16_384, 32_768])
    parser.add_argument("--length", type=int, default=1024, help="mean tokens of a sequence")
    parser.add_argument("--sides", nargs="*", type=int, default=[0], help="patches per side of each sequence's picture")
    parser.add_argument("--towers", nargs="*", default=["frozen"], choices=["frozen", "trained"])
    parser.add_argument("--recompute", nargs="*", default=["none", "full"], choices=["none", "selective", "full"])
    parser.add_argument("--layouts", nargs="*", default=["1x1"], help="data-parallel x tensor-parallel, or as tp2-cp2")
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[1], help="rows a copy trains per step")
    parser.add_argument("--compile", nargs="*", default=["on"], choices=["on", "off"])
    parser.add_argument("--offload", nargs="*", default=["off"], choices=["on", "off"])
    parser.add_argument("--optimizer-device", nargs="*", default=["learner"], choices=["learner", "cpu"])
    parser.add_argument("--gradients", nargs="*", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--overlap", nargs="*", default=["on"], choices=["on", "off"], help="of tensor parallelism")
    parser.add_argument("--variants", nargs="*", help="only those whose name contains one of these words")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", help="folder for one text file per variant")
    parser.add_argument("--checkpoints", help="an existing folder; each variant writes two there, and removes them")
    parser.add_argument("--agree", action="store_true", help="compare --layouts with 1x1, and resume its checkpoint")
    parser.add_argument("--models", type=Path, help="folder that keeps the model folders")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as temporary:
        return lead(arguments, arguments.models or Path(temporary))


def lead(arguments: argparse.Namespace, models: Path) -> int:
    every = itertools.product(
        arguments.shapes,
        list(map(layout_of, arguments.layouts)),
        arguments.micro_batches,
        arguments.compile,
        arguments.offload,
        arguments.optimizer_device,
        arguments.gradients,
        arguments.overlap,
        arguments.sides,
        arguments.towers,
        arguments.tokens,
        arguments.recompute,
    )
    variants = [
        Variant(
            shape=shape,
            tokens=tokens,
            recompute=recompute,
            micro_batches=rows,
            length=arguments.length,
            compile=compiled == "on",
            offload=offload == "on",
            optimizer_device=where,
            gradients_dtype=gradients,
            overlap=overlap == "on",
            side=side,
            trains_vision=tower == "trained",
            **layout,
        )
        for shape, layout, rows, compiled, offload, where, gradients, overlap, side, tower, tokens, recompute in every
    ]
    variants = list({v.name: v for v in variants}.values())  # one rank has nothing to overlap
    if arguments.variants is not None:
        variants = [v for v in variants if any(word in v.name for word in arguments.variants)]
    print(HEADER, flush=True)
    for shape in arguments.shapes:
        began = time.monotonic()
        for dtype in ("bfloat16", "float32") if arguments.agree else ("bfloat16",):
            folder = models / f"{shape}-{dtype}"
            if not any(folder.glob("*.safetensors")):
                make_model(shape, folder, dtype=dtype)
            if arguments.agree:
                report(arguments, compare(arguments, folder, dtype))
        print(f"# {shape}: model ready after {time.monotonic() - began:.1f} s", flush=True)
        if not arguments.agree:
            for result in run_shape(arguments, folder, [v for v in variants if v.shape == shape]):
                report(arguments, result)
    return 0


def make_model(shape: str, folder: Path, *, dtype: str) -> None:
    """Make the model in a process that ends, because this one would keep a CUDA context on the learner's GPU."""
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.shapes", shape, str(folder), dtype], check=True, stdout=2)


def compare(arguments: argparse.Namespace, folder: Path, dtype: str) -> dict[str, Any]:
    layouts = [layout_of(word) for word in ["1x1", *(word for word in arguments.layouts if word != "1x1")]]
    task = {
        "folder": str(folder),
        "device": arguments.device,
        "variants": [],
        "profile": "",
        "checkpoints": "",
        "agree": {"dtype": dtype, "tokens": min(arguments.tokens), "layouts": layouts},
    }
    return next(iter(list(run_child(task))), {"name": f"agree {folder.name}", "failed": True}) | {"model": folder.name}


def report(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if "agree" in result:
        print(f"# {result['model']}: weights moved {result['moved_mean']:.2e}, grad norms {result['grad_norm']}")
        for row in result["agree"]:
            print(
                f"{row['layout']:12} worst metric {row['worst_metric']} off by {row['worst_metric_relative']:.2e}; "
                f"weights at most {row['weights_largest']:.2e}, mean {row['weights_mean_over_moved']:.4f} of moved, "
                f"{row['resumed_mean_over_moved']:.4f} if resumed from 1x1",
                flush=True,
            )
    else:
        print(table_row(result), flush=True)
    if result.get("optimizer_device") == "cpu" and "host_update_seconds" in result:
        print(f"  AdamW on the host: {result['host_update_seconds']:.3f} s of the last step", flush=True)
    if "checkpoint_bytes" in result:
        print(
            f"  checkpoint of {result['checkpoint_bytes'] / 1e9:.2f} GB: {result['checkpoint_waited_seconds']:.2f} s "
            f"waited for; beside steps a pause of {result['checkpoint_pause_seconds']:.3f} s and "
            f"{result['checkpoint_beside_seconds']:.2f} s in all, {result['checkpoint_steps']} steps of "
            f"{result['checkpoint_step_seconds']:.3f} s",
            flush=True,
        )
    keep(result | {"command": command("benchmarks.gpu.learner"), **machine()}, arguments.json)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
