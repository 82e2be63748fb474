"""What a learner of several ranks exports: each exporting rank holds a part of the model, and no rank holds all of it.

A part is whole tensors, under names that no other part has. Who wants something done with the weights (a weight
channel) has it done where each part is, beside the training there: it sends an order, and gets a short answer.
Tests: tests/contracts/test_weights.py, tests/unit/backends/megatron/test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncrl.tensors.snapshot import PartWorker, Snapshot


def on_every_part(snapshot: Snapshot, worker: PartWorker, orders: Sequence[bytes]) -> list[bytes]:
    """The answers of ``worker`` for our own part and of its like for the others, side by side.

    orders  one for each part, our own first. Raises what the first of them raises, once all have ended.
    """
    assert len(orders) == 1 + len(snapshot.others)
    with ThreadPoolExecutor(max(1, len(snapshot.others)), thread_name_prefix="weights-part") as threads:
        others = [
            threads.submit(part.run, type(worker), order)
            for part, order in zip(snapshot.others, orders[1:], strict=True)
        ]
        own = worker(snapshot, orders[0])
    return [own, *(answer.result() for answer in others)]
