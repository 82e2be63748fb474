"""The parameters that all arms of a comparison share, the upper bound of throughput, and the measured scenes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROMPT_TOKENS: Final = 16
TOKEN_BASE: Final = 1000
"""Token ids below this are prompt tokens."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One engine and one learner. A step takes two seconds; a step of a small real model takes about ten.

    capacity              number of sequences that the engine decodes at once; others queue
    seconds_per_token, seconds_per_sequence   a decode step of n sequences takes a + b x n
    load_seconds          how long decoding stops to load new weights
    speed                 real seconds per simulated second; a peer's constant waits at an update are divided by it
    """

    name: str
    groups_per_batch: int = 16
    group_size: int = 4
    max_staleness: int = 4
    length_kind: str = "lognormal"
    length_mean: int = 250
    length_max: int = 1000
    capacity: int = 48
    seconds_per_token: float = 3e-3
    seconds_per_sequence: float = 6.25e-5
    load_seconds: float = 0.1
    speed: float = 5.0
    train_tokens_per_second: float = 10_000.0
    train_seconds: float = 0.3
    warmup: int = 8
    steps: int = 12
    seed: int = 0

    @property
    def samples(self) -> int:
        return self.groups_per_batch * self.group_size

    @property
    def groups_at_once(self) -> int:
        """Number of groups whose samples fill the engine."""
        return self.capacity // self.group_size

    @property
    def whole_groups_at_once(self) -> int:
        """The same if a group keeps its slots until its last sample ends; half of its samples have ended by then."""
        return 2 * self.groups_at_once

    def train_step_seconds(self, tokens: float) -> float:
        return tokens / self.train_tokens_per_second + self.train_seconds

    def ideal_tokens_per_second(self, length_mean: float) -> float:
        """Return the throughput of the slower part if it never waits: engine always full, learner always busy."""
        tokens = self.samples * length_mean
        step = (self.seconds_per_token + self.seconds_per_sequence * self.capacity) / self.capacity
        learner = self.train_step_seconds(tokens + self.samples * PROMPT_TOKENS)
        return tokens / max(tokens * step + self.load_seconds, learner)


SCENES: Final = {
    scene.name: scene
    for scene in (
        Scene(name="balanced"),
        Scene(name="engine-bound", train_tokens_per_second=30_000),
        Scene(name="learner-bound", train_tokens_per_second=5_000),
        Scene(name="long tail", length_max=2000),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The input of a peer's driver. Only JSON values, because its process has the peer's packages, perhaps not ours."""

    scene: Scene
    engine: str
    out: Path

    def write(self, path: Path) -> None:
        given = {"scene": dataclasses.asdict(self.scene), "engine": self.engine, "out": str(self.out)}
        path.write_text(json.dumps(given))

    @classmethod
    def read(cls, path: Path) -> Job:
        given: Mapping[str, Any] = json.loads(path.read_text())
        return cls(scene=Scene(**given["scene"]), engine=given["engine"], out=Path(given["out"]))


def index_and_version(token: int, *, group_size: int) -> tuple[int, int]:
    """Decode a sampled token: the index of its sample in the group, and the version of the weights that sampled it."""
    version, index = divmod(token - TOKEN_BASE, group_size)
    return index, version


def sampled_token(index: int, version: int, *, group_size: int) -> int:
    return TOKEN_BASE + version * group_size + index
