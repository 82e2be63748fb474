"""Agreement of an engine and the learner on a transfer of weights from memory to memory (service ``transfers``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.messages.validation import check_counts, require


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """An engine asks for the newest weights.  Service ``transfers``: weight follower -> weight sender.

    group       names the connection of learner and engine, such as a process group; each start has a new name
    num_ranks   processes of the engine
    has_joined  False asks where to meet; True asks for the weights, which are sent immediately
    payload     message from the channel's receiver to its sender; opaque to everything else
    by_folder   asks for the newest version's folder instead, or that of the next: the engine could not receive it
    """

    engine: str
    group: str
    num_ranks: int
    has_joined: bool = False
    payload: bytes = b""
    by_folder: bool = False

    def __post_init__(self) -> None:
        require(bool(self.group), "group is empty")
        require(self.num_ranks >= 1, f"num_ranks must be >= 1, got {self.num_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Name, dtype and shape of each tensor in one bucket, which holds the tensors' bytes end to end (in payloads)."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def num_elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    def __post_init__(self) -> None:
        require(len(self.names) == len(self.dtypes) == len(self.shapes), "names, dtypes and shapes differ in number")
        require(all(length >= 0 for shape in self.shapes for length in shape), "a shape has a negative length")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOffer:
    """The learner's answer: where to meet, or how to take the version that it sends now.

    payload  message from the channel's sender to its receiver; opaque to everything else
    problem  why nothing can be sent; the other fields are then empty
    """

    incarnation: int = 0
    policy_version: int = 0
    payload: bytes = b""
    problem: str = ""

    def __post_init__(self) -> None:
        check_counts(self, "incarnation", "policy_version")

    @property
    def version(self) -> tuple[int, int]:
        return (self.incarnation, self.policy_version)
