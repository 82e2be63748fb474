"""Train a model that reads images beside SGLang, by the runs that a user would start, and compare what both see.

    python -m benchmarks.gpu.images --json docs/results/gpu/images.jsonl          one GPU, or one and one where two are
    python -m benchmarks.gpu.images --arms Qwen2.5-VL-3B:trained --steps 10
    python -m benchmarks.gpu.images --arms counting                               a small model learns to count
    python -m benchmarks.gpu.images --rehearse                                    tiny, on a CPU

An arm SHAPE:frozen or SHAPE:trained has random weights, photograph-like PNG and JPEG files of 448 x 448 to 1024 x 768
pixels, answers of about --length-mean tokens, and the vision tower frozen or trained. Its numbers are of the steps
after the first two. "images" compares the engine's logprobs of answers by the first weights with those of transformers
in float32: with the image of their prompt, and with another one of the same size, which is how far an engine that saw
wrong pixels, or none, would be off.

The arm counting is examples/counting.toml with a small Qwen3-VL in bfloat16: SGLang has no kernels in float32, and
computes Qwen2.5-VL with patches of 14 pixels alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.gpu.arm import override_words, read_rows, started, tail
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.lengths import Lengths
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.one_gpu import measure_run
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.vision_shapes import VISION_SHAPES
from benchmarks.gpu.window import Row

COUNTING: Final = "counting"
SIZES: Final = ((448, 448), (640, 480), (800, 600), (1024, 768))
SERVER: Final[Mapping[str, Any]] = {
    **GPU_ARGUMENTS,
    "mm-attention-backend": "triton_attn",
    "disable-prefill-cuda-graph": True,
    "cuda-graph-max-bs": 256,
}
COUNTS: Final = {"hidden_size": 128, "num_heads": 2, "vision_size": 128}
"""Heads of 64, as kernels of GPUs want them."""
WARM_UP: Final = 2
_MOST_STEPS: Final = 200
"""More than any arm with a shape takes: the log must have room for all of them."""
COMPARED: Final = 8
REHEARSAL: Final[Mapping[str, Any]] = {
    "arms": ["tiny-Qwen2.5-VL:trained", "tiny-Qwen2.5-VL:frozen", COUNTING],
    "groups": 2,
    "group_size": 4,
    "length_mean": 16.0,
    "steps": 4,
    "learns": 8,
    "count": 16,
    "set": ["learner.threads=1", "engine.kind='inprocess'", "engine.device='cpu'", "learner.device='cpu'"],
}
HEAD: Final = (
    "arm                       tok/s  step s  train s  MFU 989  learner GiB  all GiB  pause p50    p99 ms  publish s"
    "  trainer - engine  engine - transformers  with another image"
)


def line(row: Row) -> str:
    start = f"{row['arm']:22s} "
    if "error" in row:
        return f"{start}FAILED: {row['error']}"
    if row["arm"] == COUNTING:
        curve = ", ".join(f"{step}: {seen:.2f} ({blind:.2f})" for step, seen, blind in row["curve"])
        return f"{start}held-out right after step (blind) {curve}; trainer - engine {row['mismatch']:.4f}"
    return (
        f"{start}{row['tokens_per_second']:8,.0f}  {row['step_seconds']:6.2f}  {row['train_seconds']:7.2f}"
        f"  {row['mfu']:7.3f}  {row['memory_gib']:11.1f}  {row['used_gib']:7.1f}  {1e3 * row['pause_p50']:9.0f}"
        f"  {1e3 * row['pause_p99']:8.0f}  {row['publish_seconds']:9.2f}  {row['mismatch']:16.4f}"
        f"  {row['images']['right']:21.4f}  {row['images']['other']:18.4f}"
    )


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    real = [f"{shape}:{tower}" for shape in ("Qwen2.5-VL-3B", "Qwen3-VL-4B") for tower in ("trained", "frozen")]
    add = parser.add_argument
    add("--arms", nargs="+", default=[*real, COUNTING], metavar="ARM", help="SHAPE:frozen, SHAPE:trained, counting")
    add("--steps", type=int, default=10, help="of an arm with a shape (default 10)")
    add("--learns", type=int, default=60, metavar="STEPS", help="of the arm counting (default 60)")
    add("--groups", type=int, default=16, help="groups per batch (default 16)")
    add("--group-size", type=int, default=8, help="samples of a group (default 8)")
    add("--length-mean", type=float, default=300.0, help="tokens of an answer (default 300)")
    add("--count", type=int, default=256, help="prompts, each with an image of its own (default 256)")
    add("--max-staleness", type=int, default=4, help="default 4")
    add("--limit", type=float, default=200.0, help="seconds an arm may take with its start (default 200)")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the SGLang server")
    add("--set", nargs="+", default=[], metavar="SECTION.KEY=VALUE", help="of the run file, for every arm")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--out", type=Path, metavar="FOLDER", help="logs of the arms are copied there")
    add("--rehearse", action="store_true", help="tiny, on a CPU")
    add("--make", nargs=2, metavar=("ARM", "FOLDER"), help=argparse.SUPPRESS)
    add("--compare", nargs=2, metavar=("RUN", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
    for arm in options.arms:
        shape, _, tower = arm.partition(":")
        if arm != COUNTING and (shape not in VISION_SHAPES or tower not in ("frozen", "trained")):
            parser.error(f"{arm!r}: no such arm")
    options.set, options.engine = assignments(options.set), assignments(options.engine)
    return options


# -- model and data, in a process of their own, which leaves the GPU ---------------------------------------------------


def make(arm: str, folder: Path, options: argparse.Namespace) -> None:
    if arm == COUNTING:
        from asyncrl.data import counting_task

        counting_task.write(folder, architecture="qwen3_vl", sizes=COUNTS)
        return
    from benchmarks.gpu.vision_shapes import make_vision_model

    make_vision_model(arm.partition(":")[0], folder / "model", dtype="bfloat16" if has_gpu() else "float32")
    lengths = Lengths(mean=options.length_mean, sigma=0.5, maximum=round(3 * options.length_mean), seed=0)
    write_rows(folder, count=options.count, metadata=lengths.as_metadata())


def write_rows(folder: Path, *, count: int, metadata: Mapping[str, Any]) -> None:
    """Write prompts.jsonl and the images: every other one PNG or JPEG, of each of SIZES in turn."""
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    random, rows = np.random.default_rng(0), []
    for index in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        made = coarse.resize(SIZES[index // 2 % len(SIZES)], Image.Resampling.BICUBIC)
        grain = random.integers(-20, 21, (made.height, made.width, 1))
        made = Image.fromarray((np.asarray(made, np.int16) + grain).clip(0, 255).astype(np.uint8))
        name = f"images/{index}.{'png' if index % 2 else 'jpeg'}"
        made.save(folder / name)
        rows.append({"prompt": f"{index} <image>what is it?", "images": [name], "metadata": dict(metadata)})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(run: Path, folder: Path) -> dict[str, float]:
    """Return mean |engine - transformers in float32| of the logprobs of answers by the first weights.

    right  with the image of their prompt;  other: with another one of the same grid;  tokens: compared
    """
    import torch

    from asyncrl.images.processor import ImageProcessor
    from asyncrl.messages.images import ImageRef, positions
    from asyncrl.tensors.transformers_models import load_model

    processor = ImageProcessor(folder / "model")
    device = "cuda" if has_gpu() else "cpu"
    model = load_model(folder / "model", dtype=torch.float32).to(device).eval()
    grids: dict[int, Any] = {}
    pixels: dict[int, Any] = {}

    def image(index: int) -> Any:
        if index not in pixels:
            path = next((folder / "images").glob(f"{index}.*"))
            pixels[index], grids[index] = processor.patches(path.read_bytes())
        return pixels[index]

    found: dict[str, list[Any]] = {"right": [], "other": []}
    with torch.no_grad():
        for row in _first(run, COMPARED):
            index = int(re.findall(r"\d+", row["prompt"])[0])
            tokens = np.array([*row["prompt_tokens"], *row["tokens"]], np.int32)
            start = row["prompt_tokens"].index(processor.token)
            right = image(index)
            other = next(i for i in range(index % 8, index + 9, 8) if i != index)  # of the same size and format
            ref = ImageRef(
                digest="0" * 64, grid=grids[index], start=start, num_tokens=processor.num_tokens(grids[index])
            )
            num = len(row["tokens"])
            for name, patches in (("right", right), ("other", image(other))):
                logits = model(
                    input_ids=torch.tensor(tokens)[None].long().to(device),
                    pixel_values=torch.tensor(patches).to(device),
                    image_grid_thw=torch.tensor([grids[index]]).to(device),
                    position_ids=torch.tensor(positions(len(tokens), [ref])).long()[:, None].to(device),
                ).logits[0, -num - 1 : -1]
                logprobs = logits.float().log_softmax(-1).gather(1, torch.tensor(row["tokens"]).to(device)[:, None])
                apart = np.abs(logprobs[:, 0].cpu().numpy() - np.array(row["behavior_logprobs"]))
                found[name].append(apart)
    means = {name: float(np.concatenate(apart).mean()) for name, apart in found.items()}
    return {**means, "tokens": sum(map(len, found["right"])), "answers": len(found["right"])}


def _first(run: Path, count: int) -> list[Row]:
    """Return answers by the first weights, one of each group."""
    from asyncrl.audit.opened_run import open_run

    rows: dict[int, Row] = {}
    for row in open_run(run).trajectories(text=True):
        if row["newest_version"] == 0:
            rows.setdefault(row["group_id"], row)
        if len(rows) >= count:
            break
    return list(rows.values())


# -- runs --------------------------------------------------------------------------------------------------------------


def overrides(arm: str, options: argparse.Namespace, scratch: Path, data: Path) -> dict[str, Any]:
    shape, _, tower = arm.partition(":")
    learns = arm == COUNTING
    made: dict[str, Any] = {
        "run.name": _name(arm),
        "run.directory": scratch / "runs",
        "run.steps": options.learns if learns else _MOST_STEPS,
        "model.path": data / "model",
        "model.dtype": "bfloat16" if has_gpu() else "float32",
        "data.path": data / "prompts.jsonl",
        "learner.train_vision": learns or tower == "trained",
        "weights.directory": scratch / "weights",
        "bus.max_log_bytes": 2**33,
    }
    server: dict[str, Any] = {**SERVER}
    if learns:
        server |= {"mem-fraction-static": 0.2, "max-total-tokens": 2**16}  # of a tiny model there is room for all
        named = [("held_out", {"image_key": "images"}), ("blind", {})]
        made |= {
            "learner.backend": "megatron",
            "learner.learning_rate": 3e-4,
            "evaluation.every_steps": max(1, options.learns // 4),
            "evaluation.share": 1.0,
            "evaluation.datasets": [
                {"name": name, "path": data / f"{name}.jsonl", "chat_template": True, **more} for name, more in named
            ],
            "engine.kind": "sglang",  # the run file is one for a CPU
            "engine.device": "auto",
            "engine.options": {},
            "learner.device": "auto",
            "learner.threads": 0,
        }
    else:
        made |= {
            "data.image_key": "images",
            "data.chat_template": True,
            "data.max_prompt_tokens": 2048,
            "rollout.workers": 1,
            "rollout.group_size": options.group_size,
            "rollout.max_new_tokens": round(3 * options.length_mean),
            "rollout.max_running": 256,
            "learner.groups_per_batch": options.groups,
            "learner.micro_batch_tokens": 3072 if arm == "Qwen3-VL-4B:trained" else 4096,
            "staleness.max_staleness": options.max_staleness,
        }
    if has_gpu():
        made["engine.options.server_arguments"] = {**server, **options.engine}
    return {**made, **options.set}


def run_arm(arm: str, options: argparse.Namespace, scratch: Path) -> Row:
    data, run = scratch / "data" / arm.partition(":")[0], scratch / "runs" / _name(arm)
    out = options.out or scratch
    out.mkdir(parents=True, exist_ok=True)
    common: Row = {"arm": arm, "command": command("benchmarks.gpu.images"), **machine()}
    if not (data / "made").exists():
        if problem := _child(["--make", arm, str(data)], out / f"{_name(arm)}-make.out", options):
            return {**common, "error": problem}
        (data / "made").touch()
    run_file = "examples/counting.toml" if arm == COUNTING else "benchmarks/gpu/modes.toml"
    words = ["-m", "asyncrl", "run", run_file, *override_words(overrides(arm, options, scratch, data))]
    output = out / f"{_name(arm)}.out"
    used: list[int] = []

    def is_enough() -> bool:
        """An arm with a shape is killed, so that it writes no checkpoint."""
        return arm != COUNTING and len(read_rows(run / "metrics.jsonl")) >= options.steps

    with _memory(used):
        problem = _ended(words, output, seconds=options.limit, is_enough=is_enough)
    rows = read_rows(run / "metrics.jsonl")
    try:
        if arm == COUNTING:
            found = learnt(rows)
        elif len(rows) > WARM_UP:
            seen = _compared(run, data, out / f"{_name(arm)}-compare.out", options)
            found = {**measure_run(rows[WARM_UP - 1 :]), **mismatch(rows), "used_gib": max(used, default=0) / 1024}
            found |= {"groups": options.groups, "group_size": options.group_size, "images": seen}
            found |= {"engine_gb": engine_gb(run / "logs"), "generated": mean(rows[WARM_UP:], "length/trained_mean")}
        else:
            found = {}
        if not found:
            print(tail(output), flush=True)
            return {**common, "error": problem or f"only {len(rows)} steps"}
        return {**common, **found, **({"ended": problem} if problem else {})}
    finally:
        with contextlib.suppress(OSError):
            shutil.copytree(run / "logs", out / _name(arm), dirs_exist_ok=True)
            shutil.copyfile(run / "metrics.jsonl", out / f"{_name(arm)}.jsonl")
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(scratch / "weights", ignore_errors=True)


def learnt(rows: Sequence[Row]) -> Row:
    """Return (step, held-out share right, the same without images) of each evaluation, and how far the sides are."""
    seen, blind = (f"evaluation/{name}/mean@1" for name in ("held_out", "blind"))
    steps = [row for row in rows if "loss" in row]
    curve = [(row["step"], row[seen], row[blind]) for row in rows if seen in row and blind in row]
    if not steps:
        return {}
    began, ended = steps[0]["time"], steps[-1]["time"]
    return {"curve": curve, "steps": len(steps), "seconds": ended - began, **mismatch(steps)}


def mismatch(rows: Sequence[Row]) -> Row:
    """Return mean |trainer - engine| of answers by the weights that are trained, in nats a token, and of all answers.

    The engine's tower would be left behind by the learner's, step by step, if it kept outputs of earlier weights: the
    last steps are apart for that. Fresh answers are in few steps of an asynchronous run.
    """
    fresh = [row["mismatch/fresh_mean"] for row in rows if "mismatch/fresh_mean" in row]
    return {
        "mismatch": float(np.mean(fresh)) if fresh else 0.0,
        "mismatch_last_fresh": fresh[-1] if fresh else None,
        "mismatch_of_all": [round(row["mismatch/mean"], 5) for row in rows[-20:] if "mismatch/mean" in row],
    }


def mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows if name in row] or [0.0]))


def engine_gb(logs: Path) -> float | None:
    """Return GB of weights, keys and values, and graphs by the engine's own log; None without SGLang."""
    text = "".join(path.read_text(errors="replace") for path in logs.glob("*.engine.log"))
    parts = re.findall(r"(?:mem usage=|K size: |V size: |KV size: )([\d.]+) GB", text)
    return sum(map(float, parts)) if parts else None


@contextlib.contextmanager
def _memory(used: list[int]) -> Iterator[None]:
    """Collect MiB used on all visible GPUs together, by all processes, every second."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *(["-i", gpus] if gpus else [])]
    done = threading.Event()

    def poll() -> None:
        while not done.wait(1.0):
            with contextlib.suppress(OSError, ValueError):
                said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
                used.append(sum(map(int, said.split())))

    thread = threading.Thread(target=poll, daemon=True)
    if has_gpu():
        thread.start()
    try:
        yield
    finally:
        done.set()


def _compared(run: Path, data: Path, output: Path, options: argparse.Namespace) -> Row:
    if problem := _child(["--compare", str(run), str(data)], output, options):
        return {"right": float("nan"), "other": float("nan"), "error": problem}
    found: Row = json.loads(output.read_text().strip().rpartition("\n")[2])
    return found


def _child(words: Sequence[str], output: Path, options: argparse.Namespace) -> str:
    """Do a part of an arm in a process of its own, which leaves the GPU. Return what is wrong, or ""."""
    lengths = ["--length-mean", str(options.length_mean), "--count", str(options.count)]
    problem = _ended(["-m", "benchmarks.gpu.images", *lengths, *words], output, seconds=options.limit)
    if problem:
        print(tail(output), flush=True)
    return problem


def _ended(words: Sequence[str], output: Path, *, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> str:
    """Run Python with ``words``. Return why it did not end well, or ""; everything that it started ends with it."""
    until = time.monotonic() + seconds
    try:
        with started(words, output) as process:
            while not is_enough():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.5)
                    return f"ended with exit code {code}" if code else ""
                if time.monotonic() > until:
                    return f"not over after {seconds:.0f} s"
            return ""
    finally:
        time.sleep(3 if has_gpu() else 0)  # until the driver has taken the memory back


def _name(arm: str) -> str:
    return arm.replace(":", "-").replace(".", "_")


def main(given: Sequence[str] | None = None) -> int:
    """Exit code 1 if an arm failed."""
    options = arguments(given)
    if options.make:
        make(options.make[0], Path(options.make[1]), options)
        return 0
    if options.compare:
        print(json.dumps(compare(*map(Path, options.compare))), flush=True)
        return 0
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-images-", dir=memory if os.access(memory, os.W_OK) else None))
    is_whole = True
    try:
        print(HEAD, flush=True)
        for arm in options.arms:
            row = run_arm(arm, options, scratch)
            is_whole &= "error" not in row
            print(line(row), flush=True)
            keep(row, options.json)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return int(not is_whole)


if __name__ == "__main__":
    sys.exit(main())
