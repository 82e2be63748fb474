"""The learner of every peer: it takes the time of a batch, and records the samples it was given.

Drivers import this file in the peer's own environment, so it uses only the standard library.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.scene import PROMPT_TOKENS, TOKEN_BASE, Job, Row, index_and_version


class TimedLearner:
    """A learner that only takes time. ``version`` is the number of finished steps; ``is_done`` after the last one."""

    def __init__(self, job: Job) -> None:
        self._scene, self._engine, self._out = job.scene, job.engine, job.out
        self.version = 0
        self._moments: list[dict[str, float]] = []
        self._train_seconds = 0.0
        self._wait_seconds = 0.0
        self._ended = time.monotonic()
        self._samples = 0
        self._tokens = 0
        self._staleness_sum = 0
        self._staleness_max = 0
        self._over_bound = 0
        self._thrown = 0
        self._waited_from: float | None = None

    @property
    def is_done(self) -> bool:
        return self.version >= self._scene.warmup + self._scene.steps

    @property
    def _counts(self) -> bool:
        return self.version >= self._scene.warmup

    def waits(self) -> None:
        """Mark the start of waiting, which ends with the next ``train``."""
        self._waited_from = time.monotonic()

    def throw_away(self, answers: Sequence[Sequence[int]]) -> None:
        """Record samples that are never trained."""
        if self._counts:
            self._thrown += sum(map(len, answers))

    def train(self, answers: Sequence[Sequence[int]]) -> None:
        """Do one optimizer step on the response tokens of these samples."""
        started = time.monotonic()
        tokens = sum(map(len, answers))
        if self._counts:
            if self._waited_from is not None:
                self._wait_seconds += started - self._waited_from
            self._samples += len(answers)
            self._tokens += tokens
            for answer in answers:
                self._count_staleness(answer)
        seconds = self._scene.train_step_seconds(tokens + len(answers) * PROMPT_TOKENS)
        time.sleep(max(0.0, started + seconds - time.monotonic()))
        if self._counts:
            self._train_seconds += time.monotonic() - started
        self._waited_from = None
        self.version += 1
        if self.version in (self._scene.warmup, self._scene.warmup + self._scene.steps):
            self._moments.append(self._moment())

    def load(self) -> None:
        """Let the engine load this version, and wait for it."""
        self.post("/load", {"version": self.version})

    def post(self, path: str, body: object) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._engine + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answer.read()

    def row(self, more: Row) -> Row:
        first, last = self._moments
        seconds = last["at"] - first["at"]
        sampled = last["sampled_tokens"] - first["sampled_tokens"]
        thrown = self._thrown + last["abandoned_tokens"] - first["abandoned_tokens"]
        waiting, busy = self._wait_seconds / seconds, self._train_seconds / seconds
        return {
            "samples_per_second": self._samples / seconds,
            "tokens_per_second": self._tokens / seconds,
            "learner_idle": waiting,
            "learner_overhead": 1 - waiting - busy,
            "engine_busy": (last["busy_seconds"] - first["busy_seconds"]) / seconds,
            "sampled_tokens": sampled,
            "trained_tokens": self._tokens,
            "thrown_away_share": thrown / sampled,
            "staleness_mean": self._staleness_sum / self._tokens,
            "staleness_max": self._staleness_max,
            "tokens_over_bound_share": self._over_bound / self._tokens,
            "length_mean": self._tokens / self._samples,
            "steps": self._scene.steps,
            "step_seconds": seconds / self._scene.steps,
            "cpu_share": (last["own_cpu_seconds"] - first["own_cpu_seconds"]) / seconds,
            "engine_cpu_share": (last["cpu_seconds"] - first["cpu_seconds"]) / seconds,
            "starved_share": (last["own_starved_seconds"] - first["own_starved_seconds"]) / seconds,
            "engine_starved_share": (last["starved_seconds"] - first["starved_seconds"]) / seconds,
            "load_average": os.getloadavg()[0],
            **more,
        }

    def write(self, more: Row) -> None:
        self._out.write_text(json.dumps(self.row(more)))

    def _moment(self) -> dict[str, float]:
        with urllib.request.urlopen(self._engine + "/stats") as answer:
            stats: dict[str, float] = json.loads(answer.read())
        own = {"own_cpu_seconds": time.process_time(), "own_starved_seconds": starved_seconds()}
        return stats | own | {"at": time.monotonic()}

    def _count_staleness(self, answer: Sequence[int]) -> None:
        for token in answer:
            _, version = index_and_version(token, group_size=self._scene.group_size)
            staleness = self.version - version
            self._staleness_sum += staleness
            self._staleness_max = max(self._staleness_max, staleness)
            self._over_bound += staleness > self._scene.max_staleness


def response_of(tokens: Sequence[int]) -> list[int]:
    """Return the sampled tokens of a padded or whole sequence. Ids of prompts and padding are lower."""
    return [token for token in tokens if token >= TOKEN_BASE]


def starved_seconds() -> float:
    """Return how long this process's threads were ready to run but had no processor, summed (Linux only)."""
    return sum(int(task.read_text().split()[1]) for task in Path("/proc/self/task").glob("*/schedstat")) / 1e9


def versions_of(*distributions: str) -> dict[str, str]:
    """Return the versions of installed distributions."""
    return {name: version(name) for name in distributions}


def jobs_of(arguments: Sequence[str]) -> list[Job]:
    """Return one job per scene. One process does all of them, because some peers take a minute to import."""
    return [Job.read(Path(path)) for path in arguments[1:]]


def prompt_of(group: int) -> list[int]:
    return [group] * PROMPT_TOKENS


def as_ints(values: Any) -> list[int]:
    """Convert a row of a tensor or an array."""
    return [int(value) for value in values]
