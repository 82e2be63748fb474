"""How an engine and the learner agree on a transfer of weights from memory to memory (service ``transfers``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.messages.validation import counts, require


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """An engine asks for the newest weights.  Service ``transfers``: weight follower -> weight sender.

    group       names what the learner and the engine have met for; each start has a new name
    num_ranks   processes of the engine
    has_joined  False asks where to meet; True asks for the weights, which follow at once
    payload     what else the channel's receiver tells its sender: nobody else reads it
    nonce       another one in each request, so that the signed answer to an earlier one is none to this
    """

    engine: str
    group: str
    num_ranks: int
    has_joined: bool = False
    payload: bytes = b""
    nonce: bytes = b""

    def __post_init__(self) -> None:
        require(bool(self.group), "group is empty")
        require(self.num_ranks >= 1, f"num_ranks must be >= 1, got {self.num_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Name, dtype and shape of each tensor in one bucket, which has them end to end as bytes (in payloads)."""

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

    payload  what the channel's sender tells its receiver: nobody else reads it
    problem  why there is nothing to send; the other fields are empty then
    """

    incarnation: int = 0
    policy_version: int = 0
    payload: bytes = b""
    problem: str = ""

    def __post_init__(self) -> None:
        counts(self, "incarnation", "policy_version")

    @property
    def order(self) -> tuple[int, int]:
        return (self.incarnation, self.policy_version)
