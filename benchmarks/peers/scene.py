"""What all arms of a comparison have in common, the bound that nothing can beat, and the scenes that are measured."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROMPT_TOKENS: Final = 16
TOKEN_BASE: Final = 1000
"""Token ids below are the prompts'."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One engine and one learner. A step takes two seconds where one of a small real model takes about ten.

    capacity              sequences that the engine decodes at once; more of them queue
    seconds_per_token, seconds_per_sequence   a decode step of n sequences takes a + b x n
    load_seconds          decoding stands still for new weights
    speed                 seconds that one of ours stands for: a peer's constant waits at an update are divided by it
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
        """Groups whose samples fill the engine."""
        return self.capacity // self.group_size

    @property
    def whole_groups_at_once(self) -> int:
        """The same where a group keeps its place until its last sample ends: half of them have ended by then."""
        return 2 * self.groups_at_once

    def train_step_seconds(self, tokens: float) -> float:
        return tokens / self.train_tokens_per_second + self.train_seconds

    def ideal_tokens_per_second(self, length_mean: float) -> float:
        """Of the slower of the two if it never waited: the engine always full, the learner always busy."""
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
    """What a peer's driver is told. Its process has the peer's packages, perhaps not ours: only what json can say."""

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
    """What a sampled token says: which sample of its group it belongs to, and the weights that sampled it."""
    version, index = divmod(token - TOKEN_BASE, group_size)
    return index, version


def sampled_token(index: int, version: int, *, group_size: int) -> int:
    return TOKEN_BASE + version * group_size + index
