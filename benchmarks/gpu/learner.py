"""The Megatron learner's step: tokens per second, model FLOP/s utilisation and memory, and where the time goes.

    python -m benchmarks.gpu.learner --json FILE                 0.6B and 1.7B, 16k and 32k tokens, none and full
    python -m benchmarks.gpu.learner --profile FOLDER ...        one more step of each under torch.profiler
    python -m benchmarks.gpu.learner --layouts 1x1 2x1 1x2       data-parallel x tensor-parallel ranks
    python -m benchmarks.gpu.learner --agree                     do layouts train the same weights?
    python -m benchmarks.gpu.learner --device cpu --shapes tiny --tokens 512    a rehearsal

A step is the backend's own: GRPO on documents of about a thousand random tokens, all but the first trained, one
optimizer step per --micro-batches rows. Packed lengths differ from step to step. Utilisation counts attention and
leaves recomputation out (asyncrl/backends/flops.py); 790e12 FLOP/s is what an H200 reaches on large matrices, 989e12
what its data sheet says. Measurements run in a child process; one that fails or hangs is reported and the rest go on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from asyncrl.backends import flops, huggingface
from asyncrl.backends.megatron import MegatronBackend, Options
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.policies.algorithms import ALGORITHMS
from asyncrl.policies.packing import Document, MicroBatch, pack, pack_for_ranks
from benchmarks.gpu.shapes import SHAPES, make_model

PEAKS: Final = (790e12, 989e12)
VARIANT_SECONDS: Final = 120.0
"""A child that says nothing for so long is ended."""
LEARNING_RATE: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One measurement. tokens: of one packed row; each data-parallel rank trains ``micro_batches`` rows a step."""

    shape: str
    tokens: int
    data_parallel: int = 1
    tensor_parallel: int = 1
    recompute: str = "none"
    micro_batches: int = 1
    length: int = 1024
    compile: bool = True
    distributed_optimizer: bool = True

    @property
    def name(self) -> str:
        layout = f"dp{self.data_parallel}tp{self.tensor_parallel}"
        extras = ["" if self.compile else "eager", "" if self.distributed_optimizer else "replicated"]
        parts = [self.shape, f"{self.tokens}x{self.micro_batches}", layout, self.recompute, *filter(None, extras)]
        return "-".join(parts)


def documents(variant: Variant, *, vocabulary: int, seed: int) -> list[Document]:
    """One row's worth of tokens for each micro-batch of each rank, within 2 % of the budget."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(variant.micro_batches * variant.data_parallel):
        left = int(variant.tokens * random.uniform(0.98, 1.0))
        while left > 1:
            drawn = int(np.clip(random.normal(variant.length, variant.length / 4), 2, 2 * variant.length))
            length = left if left - drawn < 2 else min(drawn, left)
            left -= length
            made.append(document(length, vocabulary=vocabulary, random=random))
    return made


def document(length: int, *, vocabulary: int, random: np.random.Generator) -> Document:
    mask = np.arange(length) > 0
    return Document(
        tokens=random.integers(0, vocabulary, length).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        advantages=np.where(mask, random.standard_normal(), 0).astype(np.float32),
        loss_weights=np.where(mask, 1 / 16_384, 0).astype(np.float32),
        staleness=np.zeros(length, np.int32),
    )


def shares(variant: Variant, batch: Sequence[Document]) -> list[list[MicroBatch]]:
    """As the learner packs them, but that a single row stays one."""
    if variant.data_parallel == variant.micro_batches == 1:
        return [pack(batch, max_tokens=sum(len(d) for d in batch))]
    return pack_for_ranks(batch, ranks=variant.data_parallel, max_tokens=variant.tokens)


@contextlib.contextmanager
def backend(variant: Variant, folder: Path, *, device: str, dtype: str) -> Iterator[MegatronBackend]:
    made = MegatronBackend(
        folder,
        algorithm=ALGORITHMS["grpo"],
        optimizer=OptimizerSettings(),
        temperature=1.0,
        device=device,
        dtype=dtype,
        threads=0,
        options=Options(
            recompute=variant.recompute,  # type: ignore[arg-type]
            distributed_optimizer=variant.distributed_optimizer,
            timeout_seconds=VARIANT_SECONDS,
        ),
        ranks=variant.data_parallel * variant.tensor_parallel,
        tensor_parallel=variant.tensor_parallel,
    )
    try:
        made.start()
        yield made
    finally:
        made.close()
        del made
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def measure(variant: Variant, folder: Path, *, device: str, steps: int, profile: Path | None) -> dict[str, Any]:
    """Two steps to warm up (kernels are compiled), then ``steps`` timed ones."""
    shape = huggingface.read_shape(folder)
    batches = [documents(variant, vocabulary=shape.vocabulary_size, seed=seed) for seed in range(steps + 2)]
    packed = [shares(variant, batch) for batch in batches]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with backend(variant, folder, device=device, dtype="bfloat16") as learner:
        started = time.perf_counter()
        for share in packed[:2]:
            learner.step(share, learning_rate=LEARNING_RATE)
        warm = time.perf_counter()
        seconds, metrics = [], {}
        for share in packed[2:]:
            begin = time.perf_counter()
            metrics = learner.step(share, learning_rate=LEARNING_RATE).metrics
            seconds.append(time.perf_counter() - begin)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        begin = time.perf_counter()
        learner.export()
        exported = time.perf_counter() - begin
        phases = profiled(learner, packed[-1], variant, device, profile) if profile else {}
    lengths = [[len(d) for d in batch] for batch in batches[2:]]
    work = sum(flops.training_flops(shape, step) for step in lengths) / sum(seconds)
    ranks = variant.data_parallel * variant.tensor_parallel
    return {
        **dataclasses.asdict(variant),
        "name": variant.name,
        "documents": len(lengths[0]),
        "step_tokens": sum(lengths[0]),
        "step_seconds": float(np.median(seconds)),
        "slowest_seconds": max(seconds),
        "tokens_per_second": sum(map(sum, lengths)) / sum(seconds),
        "mfu_790": work / ranks / PEAKS[0],
        "mfu_989": work / ranks / PEAKS[1],
        "mfu_790_without_attention": 6.0
        * flops.matrix_parameters(shape)
        * sum(map(sum, lengths))
        / sum(seconds)
        / ranks
        / PEAKS[0],
        "peak_gib": peak,
        "export_seconds": exported,
        "start_seconds": started - began,
        "warm_seconds": warm - started,
        "loss": metrics["loss"],
        "entropy": metrics["entropy"],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        **phases,
    }


def profiled(
    learner: MegatronBackend, share: list[list[MicroBatch]], variant: Variant, device: str, folder: Path
) -> dict[str, float]:
    """One step under torch.profiler: its kernels to a file, seconds of its phases and the busy share of the GPU."""
    on = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        on.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=on) as profile:
        learner.step(share, learning_rate=LEARNING_RATE)
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    averages = profile.key_averages()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    labels = [e for e in kernels if e.name.startswith("learner:")]
    kernels = [e for e in kernels if not e.name.startswith(("learner:", "ProfilerStep"))]
    result = {}
    for event in averages:
        if event.key.startswith("learner:"):
            result[f"{event.key[9:]}_host_seconds"] = event.cpu_time_total / 1e6
    for event in labels:
        name = f"{event.name[9:]}_gpu_seconds"
        result[name] = result.get(name, 0.0) + event.time_range.elapsed_us() / 1e6
    if kernels:
        spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        result["gpu_busy"] = busy / (until - spans[0][0])
        result["num_kernels"] = float(len(kernels))
    folder.mkdir(parents=True, exist_ok=True)
    table = averages.table(sort_by=key, row_limit=25, max_name_column_width=90)
    by_kernel: dict[str, list[float]] = {}
    for e in kernels:
        by_kernel.setdefault(e.name, []).append(e.time_range.elapsed_us())
    total = sum(map(sum, by_kernel.values())) or 1.0
    rows = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:25]
    lines = [f"{sum(us) / 1e3:9.2f} ms {sum(us) / total:6.1%} {len(us):6d} x  {name[:150]}" for name, us in rows]
    text = "\n".join([variant.name, json.dumps(result), "", "GPU time by kernel:", *lines, "", table])
    (folder / f"{variant.name}.txt").write_text(text)
    print(
        "\n".join(["", f"GPU time by kernel, {variant.name}: {json.dumps(result)}", *lines]),
        file=sys.stderr,
        flush=True,
    )
    return result


# -- agreement of layouts ----------------------------------------------------------------------------------------------


def agree(folder: Path, *, device: str, dtype: str, tokens: int, layouts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Three steps on the same documents in each layout, compared with the first: metrics and weights."""
    shape = huggingface.read_shape(folder)
    results: list[dict[str, Any]] = []
    for data_parallel, tensor_parallel in layouts:
        variant = Variant(
            shape="", tokens=tokens, data_parallel=data_parallel, tensor_parallel=tensor_parallel, length=256
        )
        same = dataclasses.replace(variant, data_parallel=2)  # as many documents whatever the layout
        with backend(variant, folder, device=device, dtype=dtype) as learner:
            before = cpu_weights(learner)
            metrics = []
            for seed in range(3):
                batch = documents(same, vocabulary=shape.vocabulary_size, seed=seed)
                cut = pack_for_ranks(batch, ranks=data_parallel, max_tokens=tokens)
                metrics.append(dict(learner.step(cut, learning_rate=1e-3).metrics))
            after = cpu_weights(learner)
        results.append({"layout": f"dp{data_parallel}tp{tensor_parallel}", "metrics": metrics, "weights": after})
        moved = mean_distance(after, before)
    first = results[0]
    rows = []
    for other in results[1:]:
        worst = max(
            (abs(b[name] - a[name]) / max(1e-6, abs(a[name])), name)
            for a, b in zip(first["metrics"], other["metrics"], strict=True)
            for name in ("loss", "grad_norm", "entropy", "offpolicy/ess")
        )
        rows.append(
            {
                "layout": other["layout"],
                "worst_metric": worst[1],
                "worst_metric_relative": worst[0],
                "weights_largest": max(
                    float((other["weights"][n] - first["weights"][n]).abs().max()) for n in first["weights"]
                ),
                "weights_mean_over_moved": mean_distance(other["weights"], first["weights"]) / moved,
            }
        )
    return {"agree": rows, "dtype": dtype, "moved_mean": moved, "grad_norm": [m["grad_norm"] for m in first["metrics"]]}


def cpu_weights(learner: MegatronBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.float().cpu() for name, tensor in learner.export().tensors()}


def mean_distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    total = sum(float((first[name] - second[name]).abs().sum()) for name in first)
    return total / sum(tensor.numel() for tensor in first.values())


# -- processes ---------------------------------------------------------------------------------------------------------


def child(task: dict[str, Any]) -> int:
    """Measure each variant in turn; a line of JSON each, so that the parent knows how far we came."""
    folder, profile = Path(task["folder"]), Path(task["profile"]) if task["profile"] else None
    for entry in task["variants"]:
        variant = Variant(**entry)
        print(json.dumps({"begins": variant.name}), flush=True)
        torch.compiler.set_stance("default" if variant.compile else "force_eager")
        result = measure(variant, folder, device=task["device"], steps=task["steps"], profile=profile)
        print(json.dumps({"result": result}), flush=True)
    if task["agree"]:
        print(json.dumps({"begins": "agree"}), flush=True)
        layouts = [tuple(layout) for layout in task["agree"]["layouts"]]
        result = agree(
            folder, device=task["device"], dtype=task["agree"]["dtype"], tokens=task["agree"]["tokens"], layouts=layouts
        )
        print(json.dumps({"result": result}), flush=True)
    return 0


def run_child(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Results of a child process; ends early when it dies or falls silent, after saying so."""
    command = [sys.executable, "-m", "benchmarks.gpu.learner", "--child", json.dumps(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = threading.Timer(VARIANT_SECONDS, process.kill)
        watch.start()
        for line in process.stdout:
            watch.cancel()
            watch = threading.Timer(VARIANT_SECONDS, process.kill)
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
        f"{result['name']:44} {result['documents']:5} {result['tokens_per_second']:9,.0f} "
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
    """Every variant's result; after a failure the rest goes to a new child."""
    task = {"folder": str(folder), "device": arguments.device, "steps": arguments.steps, "agree": None}
    task["profile"] = arguments.profile or ""
    while variants:
        todo = {**task, "variants": [dataclasses.asdict(v) for v in variants]}
        done = 0
        for result in run_child(todo):
            done += 1
            yield result
        if done < len(variants):
            yield {**dataclasses.asdict(variants[done]), "name": variants[done].name, "failed": True}
            done += 1
        variants = variants[done:]


def layouts_of(words: Sequence[str]) -> list[tuple[int, int]]:
    return [(int(data), int(tensor)) for data, tensor in (word.split("x") for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one object a line")
    parser.add_argument("--shapes", nargs="*", default=["0.6B", "1.7B"], choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[16_384, 32_768])
    parser.add_argument("--length", type=int, default=1024, help="mean tokens of a document")
    parser.add_argument("--recompute", nargs="*", default=["none", "full"], choices=["none", "selective", "full"])
    parser.add_argument("--layouts", nargs="*", default=["1x1"], help="data-parallel x tensor-parallel, as 2x1")
    parser.add_argument("--micro-batches", nargs="*", type=int, default=[1], help="rows a rank trains per step")
    parser.add_argument("--compile", nargs="*", default=["on"], choices=["on", "off"])
    parser.add_argument("--variants", nargs="*", help="only those whose name contains one of these words")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", help="folder for one text file per variant")
    parser.add_argument("--agree", action="store_true", help="compare 1x1 with --layouts after three steps")
    parser.add_argument("--models", type=Path, help="folder that keeps the model folders")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(json.loads(arguments.child))
    with tempfile.TemporaryDirectory() as temporary:
        return lead(arguments, arguments.models or Path(temporary))


def lead(arguments: argparse.Namespace, models: Path) -> int:
    variants = [
        Variant(
            shape=shape,
            tokens=tokens,
            data_parallel=data,
            tensor_parallel=tensor,
            recompute=recompute,
            micro_batches=rows,
            length=arguments.length,
            compile=compiled == "on",
        )
        for shape, (data, tensor), rows, compiled, tokens, recompute in itertools.product(
            arguments.shapes,
            layouts_of(arguments.layouts),
            arguments.micro_batches,
            arguments.compile,
            arguments.tokens,
            arguments.recompute,
        )
    ]
    if arguments.variants is not None:
        variants = [v for v in variants if any(word in v.name for word in arguments.variants)]
    print(HEADER, flush=True)
    for shape in arguments.shapes:
        began = time.monotonic()
        for dtype in ("bfloat16", "float32") if arguments.agree else ("bfloat16",):
            folder = models / f"{shape}-{dtype}"
            if not (folder / "model.safetensors").exists():
                make_model(SHAPES[shape], folder, dtype=dtype)
            if arguments.agree:
                report(arguments, compare(arguments, folder, dtype))
        print(f"# {shape}: model ready after {time.monotonic() - began:.1f} s", flush=True)
        if not arguments.agree:
            for result in run_shape(arguments, folder, [v for v in variants if v.shape == shape]):
                report(arguments, result)
    return 0


def compare(arguments: argparse.Namespace, folder: Path, dtype: str) -> dict[str, Any]:
    layouts = [(1, 1), *(layout for layout in layouts_of(arguments.layouts) if layout != (1, 1))]
    task = {
        "folder": str(folder),
        "device": arguments.device,
        "variants": [],
        "profile": "",
        "steps": 0,
        "agree": {"dtype": dtype, "tokens": min(arguments.tokens), "layouts": layouts},
    }
    return next(iter(list(run_child(task))), {"name": f"agree {folder.name}", "failed": True}) | {"model": folder.name}


def report(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if "agree" in result:
        print(f"# {result['model']}: weights moved {result['moved_mean']:.2e}, grad norms {result['grad_norm']}")
        for row in result["agree"]:
            print(
                f"{row['layout']:12} worst metric {row['worst_metric']} off by {row['worst_metric_relative']:.2e}; "
                f"weights at most {row['weights_largest']:.2e}, mean {row['weights_mean_over_moved']:.4f} of moved",
                flush=True,
            )
    else:
        print(table_row(result), flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        with arguments.json.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
