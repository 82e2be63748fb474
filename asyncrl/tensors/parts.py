"""Run work on a snapshot that is spread over several learner ranks.

Each exporting rank holds a part of the model, and no rank holds the whole model. A part consists of whole tensors, and
no tensor is in two parts. A weight channel processes the parts where they are, while training goes on there: it sends
an order to each rank and gets a short answer.
Tests: tests/contracts/test_weights.py, tests/unit/backends/megatron/test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncrl.tensors.snapshot import PartWorker, Snapshot


def on_every_part(snapshot: Snapshot, worker: PartWorker, orders: Sequence[bytes]) -> list[bytes]:
    """Run ``worker`` on our part and on all other parts in parallel. Returns their answers, our own first.

    orders  one per part, our own first

    If parts fail, raises the error of the first of them after all have ended.
    """
    assert len(orders) == 1 + len(snapshot.others)
    with ThreadPoolExecutor(max(1, len(snapshot.others)), thread_name_prefix="weights-part") as threads:
        others = [
            threads.submit(part.run, type(worker), order)
            for part, order in zip(snapshot.others, orders[1:], strict=True)
        ]
        own = worker(snapshot, orders[0])
    return [own, *(answer.result() for answer in others)]
