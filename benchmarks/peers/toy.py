"""A minimal peer to test the code that all peers share: a queue without a bound on staleness."""

from __future__ import annotations

import json
import queue
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from benchmarks.peers.learner import TimedLearner, jobs_of, prompt_of
from benchmarks.peers.scene import Job

REQUIREMENTS: Final = ()
ADAPTATIONS: Final = ("not a framework",)


def main() -> None:
    for job in jobs_of(sys.argv):
        drive(job)


def drive(job: Job) -> None:
    scene, learner = job.scene, TimedLearner(job)
    groups: queue.Queue[list[list[int]]] = queue.Queue(maxsize=scene.max_staleness * scene.groups_per_batch)
    ended = threading.Event()

    def ask(group: int) -> list[int]:
        body = json.dumps({"input_ids": prompt_of(group)}).encode()
        request = urllib.request.Request(job.engine + "/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            tokens: list[int] = json.loads(answer.read())["output_ids"]
        return tokens

    def sample(first: int) -> None:
        with ThreadPoolExecutor(scene.group_size) as pool:
            for group in range(first, 2**20, scene.groups_at_once):
                if ended.is_set():
                    return
                groups.put(list(pool.map(ask, [group] * scene.group_size)))

    threads = [threading.Thread(target=sample, args=(i,), daemon=True) for i in range(scene.groups_at_once)]
    for thread in threads:
        thread.start()
    while not learner.is_done:
        learner.waits()
        batch = [groups.get() for _ in range(scene.groups_per_batch)]
        learner.train([answer for group in batch for answer in group])
        learner.load()
    learner.write({"versions": {}, "adaptations": ADAPTATIONS})
    ended.set()


if __name__ == "__main__":
    main()
