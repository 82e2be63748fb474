"""How long a learner's rank 0 takes to give every rank its share of a batch, with the routing of the engine.

    python -m benchmarks.feeding --json docs/results/feeding.jsonl      512 answers of 8k tokens, 128 ranks
    python -m benchmarks.feeding --models 30b --answers 64              less memory (a share of 235B takes 0.8 GB)

The ranks are simulated: rank 0's work is done and timed for all of them, and what it makes is sent to nobody. One share
travels over gloo on this machine's loopback to a process that passes nothing on, which gives the speed of one stream.
"before" is what asyncrl did until this command existed: it encoded a share for each rank, with all layers, and sent
them one after the other. It is timed for one rank and multiplied.

make       seconds of rank 0 to encode shares and copy experts, for all blocks of ranks, in four threads
cpu        CPU seconds of the same, which other programs on the machine do not lengthen as much
GB sent    bytes that leave rank 0
link       seconds for these bytes at --gigabytes (default 12.5, a NIC of 100 Gbit/s): a given speed, not a measured one
total      make + link. They overlap here and did not before, so it is an upper bound
unpack     seconds of a rank to read its share, measured for one
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from asyncrl.backends.megatron import feeding
from asyncrl.backends.megatron.feeding import Shares
from asyncrl.backends.megatron.job import Command
from asyncrl.backends.megatron.rank_group import COMMAND, PART, RankGroup, RankInfo, open_store
from asyncrl.config.layout import Layout
from asyncrl.messages import codec
from asyncrl.messages.routing import NO_EXPERTS
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks
from benchmarks.gpu.rows import command, keep

_HEAD: Final = "model   way      B/token    make s     cpu s   GB sent   link s   total s  unpack s"
_SAMPLE_TOKENS: Final = 2**16
"""Tokens that the way before is timed with."""
_ROW_TOKENS: Final = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A mixture, and how its learner's ranks share it. layers: with experts; the dense ones carry a choice as well."""

    layers: int
    choices: int
    dtype: Any
    layout: Layout
    dense: int = 0


MODELS: Final = {
    "dense": Model(layers=0, choices=0, dtype=np.uint8, layout=Layout(ranks=128, tensor=4, pipeline=4, context=2)),
    "30b": Model(layers=48, choices=8, dtype=np.uint8, layout=Layout(ranks=128, tensor=4, context=2, expert=8)),
    "235b": Model(
        layers=94, choices=8, dtype=np.uint8, layout=Layout(ranks=128, tensor=4, pipeline=4, context=2, expert=16)
    ),
    "671b": Model(
        layers=61,
        dense=3,
        choices=8,
        dtype=np.uint16,
        layout=Layout(ranks=128, tensor=8, pipeline=8, context=1, expert=16),
    ),
}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of an answer (default 8192)")
    parser.add_argument("--gigabytes", type=float, default=12.5, help="that rank 0's link carries a second")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows are added there")
    options = parser.parse_args(given)
    speed = loopback()
    print(
        f"one gloo stream over loopback: {speed / 1e9:.2f} GB/s, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}"
    )
    print(_HEAD)
    for name in options.models:
        for row in measure(name, MODELS[name], answers=options.answers, tokens=options.tokens):
            row |= {"link_seconds": row["sent_bytes"] / (1e9 * options.gigabytes), "loopback_bytes_per_second": speed}
            row |= {"total_seconds": row["make_seconds"] + row["link_seconds"], "link_gigabytes": options.gigabytes}
            row |= {"cores": os.cpu_count(), "load": os.getloadavg()[0], "command": command("benchmarks.feeding")}
            print(line(row), flush=True)
            keep(row, options.json)
    return 0


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:6s}  {row['way']:6s}  {row['bytes_per_token']:8.0f}  {row['make_seconds']:8.2f}"
        f"  {row['make_cpu_seconds']:8.2f}  {row['sent_bytes'] / 1e9:8.2f}  {row['link_seconds']:7.2f}"
        f"  {row['total_seconds']:8.2f}  {row['unpack_seconds']:8.2f}"
    )


def measure(name: str, model: Model, *, answers: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a row of the way before, and one of now."""
    layout = model.layout
    of_share = share(model, answers // layout.data_parallel, tokens)
    common = {"model": name, "ranks": layout.ranks, "answers": answers, "tokens": tokens}
    common |= {"layout": {key: size for key, size in dataclasses.asdict(layout).items() if size > 1}}
    num_tokens = answers * tokens
    yield common | {"way": "before"} | before(of_share, layout, num_tokens)
    yield common | {"way": "now"} | now(of_share, model, num_tokens)


def share(model: Model, answers: int, tokens: int) -> list[MicroBatch]:
    """Return a share of random tokens. All shares are the same arrays: only their size matters."""
    generator = np.random.default_rng(0)
    most = np.iinfo(model.dtype).max
    experts = NO_EXPERTS
    if model.layers:
        shape = (tokens, model.layers, model.choices)
        experts = generator.integers(0, most, shape, model.dtype)
    one = TrainingSequence(
        tokens=generator.integers(0, 150_000, tokens).astype(np.int32),
        response_mask=np.arange(tokens) >= 100,
        behavior_logprobs=np.zeros(tokens, np.float32),
        advantages=np.zeros(tokens, np.float32),
        loss_weights=np.full(tokens, 1e-6, np.float32),
        staleness=np.zeros(tokens, np.int32),
        experts=experts,
    )
    (found,) = pack_for_ranks([one] * answers, ranks=1, max_tokens=_ROW_TOKENS)
    return found


def before(rows: Sequence[MicroBatch], layout: Layout, num_tokens: int) -> dict[str, Any]:
    sample = rows[: max(1, _SAMPLE_TOKENS // _ROW_TOKENS)]
    of_sample = sum(row.num_tokens for row in sample)
    began, cpu = time.perf_counter(), time.process_time()
    data = codec.encode(Command(name="step", micro_batches=tuple(sample)))
    bytearray(data)  # what was sent
    made, busy = time.perf_counter() - began, time.process_time() - cpu
    began = time.perf_counter()
    codec.decode(data, Command)
    read = time.perf_counter() - began
    of_rank = num_tokens / layout.data_parallel / of_sample
    return {
        "bytes_per_token": len(data) / of_sample,
        "make_seconds": made * of_rank * (layout.ranks - 1),
        "make_cpu_seconds": busy * of_rank * (layout.ranks - 1),
        "sent_bytes": len(data) * of_rank * (layout.ranks - 1),
        "unpack_seconds": read * of_rank,
    }


def now(rows: Sequence[MicroBatch], model: Model, num_tokens: int) -> dict[str, Any]:
    layout, layers = model.layout, stages(model)
    began, cpu = time.perf_counter(), time.process_time()
    shares = Shares([rows] * layout.data_parallel, layout, layers)
    firsts = range(0, layout.ranks, layout.tensor * layout.context)
    with ThreadPoolExecutor(feeding._AT_ONCE) as threads:
        sizes = list(threads.map(lambda first: sum(map(len, shares.pieces(first))), firsts))
    made, busy = time.perf_counter() - began, time.process_time() - cpu
    data = np.concatenate([piece.copy() for piece in shares.pieces(firsts[-1])])
    feed = shares.feed(firsts[-1])
    began = time.perf_counter()
    feeding.unpack(data, feed)
    read = time.perf_counter() - began
    own = len(feeding.receivers_of(layout, 0, of_machine=layout.ranks))
    return {
        "bytes_per_token": sum(sizes) / num_tokens,
        "make_seconds": made,
        "make_cpu_seconds": busy,
        "sent_bytes": sum(sizes[1:]) + own * sizes[0],
        "unpack_seconds": read,
    }


def stages(model: Model) -> list[feeding.Layers]:
    """Return the layers with experts of each stage, as even as they can be."""
    if model.layout.pipeline == 1 or not model.layers:
        return [None] * model.layout.pipeline
    edges = np.linspace(0, model.layers, model.layout.pipeline + 1).round().astype(int).tolist()
    return [
        tuple(layer for layer in range(first, last) if layer >= model.dense)
        for first, last in zip(edges, edges[1:], strict=False)
    ]


_LOOPBACK_BYTES: Final = 2**28


def loopback() -> float:
    """Return the bytes a second of one stream between two processes of this machine."""
    context = multiprocessing.get_context("spawn")
    store = open_store(RankInfo(ranks=2))
    child = context.Process(target=_receive, args=(store.port,), daemon=True)
    child.start()
    group = RankGroup(store, RankInfo(ranks=2))
    data = torch.zeros(_LOOPBACK_BYTES, dtype=torch.uint8)
    began = time.perf_counter()
    for piece in torch.split(data, feeding._PIECE_BYTES):
        group.begin_feed(piece, 1)()
    group.receive_feed(torch.empty(1, dtype=torch.uint8), 1)
    seconds = time.perf_counter() - began
    group.close()
    child.join()
    return _LOOPBACK_BYTES / seconds


def _receive(port: int) -> None:
    info = RankInfo(rank=1, ranks=2, port=port)
    group = RankGroup(open_store(info), info)
    for piece in torch.split(torch.empty(_LOOPBACK_BYTES, dtype=torch.uint8), feeding._PIECE_BYTES):
        group.receive_feed(piece, 0)
    group.begin_feed(torch.zeros(1, dtype=torch.uint8), 0)()
    for kind in (COMMAND, PART):  # until it says goodbye
        group.receive(0, kind)
    group.close()


if __name__ == "__main__":
    raise SystemExit(main())
