"""One rank of machines.py: trains and reports each step, or serves the rank that does.  Argument: a task in JSON."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.backends import huggingface
from asyncrl.backends.megatron.rank_group import rank_from_environment
from benchmarks.gpu.learner_step import METRICS, TIMEOUT_SECONDS, Variant, backend, made, sequences, shares

SAVED_STEP: Final = 2
"""After this step two machines write a checkpoint."""
LEARNING_RATE: Final = 1e-4


def main(arguments: Sequence[str]) -> int:
    return run(json.loads(arguments[0]))


def run(task: Mapping[str, Any]) -> int:
    """Be one rank: train and print a JSON line for each step, or serve the rank that does.

    Machines of which one will be killed write a checkpoint, and train until then. The next ones continue from it.
    """
    variant, model, state = Variant(**task["variant"]), Path(task["model"]), Path(task["state"])
    info = rank_from_environment(ranks=variant.layout.ranks, timeout_seconds=TIMEOUT_SECONDS)
    settings: dict[str, Any] = {"device": task["device"], "dtype": task["dtype"], "info": info}
    tell({"rank": info.rank if info else 0})
    if info and info.rank:
        made(variant, model, **settings).serve()
        return 0
    vocabulary = huggingface.read_shape(model).vocabulary_size
    is_resumed = state.exists()
    with backend(variant, model, **settings) as learner:
        if is_resumed:
            learner.restore(state)
        is_first = bool(info and task["is_killed"] and not is_resumed)
        steps = range(SAVED_STEP + 1 if is_resumed else 1, task["steps"] + 1)
        for step in itertools.count(1) if is_first else steps:
            share = shares(variant, sequences(variant, vocabulary=vocabulary, seed=step))
            began = time.perf_counter()
            metrics = learner.step(share, learning_rate=LEARNING_RATE).metrics
            seconds = time.perf_counter() - began
            tell({"step": step, "seconds": seconds} | {name: metrics[name] for name in METRICS})
            if step == SAVED_STEP and is_first:
                learner.save(state)
    return 0


def tell(message: Mapping[str, Any]) -> None:
    """Print a line in one piece, also unbuffered: the ranks of a machine share a pipe."""
    sys.stdout.write(json.dumps({"pid": os.getpid(), **message}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
