"""What an engine and the learner say to each other before weights go from memory to memory (service ``transfers``)."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.message_checks import counts, require


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """An engine asks for the newest weights.  Service ``transfers``: weight follower -> weight sender.

    group       names the collective of the learner (rank 0) and this engine's processes; another life, another name
    num_ranks   processes of the engine
    has_joined  False asks where to meet; True asks for the weights, which follow at once
    """

    engine: str
    group: str
    num_ranks: int
    has_joined: bool = False

    def __post_init__(self) -> None:
        require(bool(self.group), "group is empty")
        require(self.num_ranks >= 1, f"num_ranks must be >= 1, got {self.num_ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Tensors that come end to end in one collective, as bytes; of each its name, dtype and shape."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        require(len(self.names) == len(self.dtypes) == len(self.shapes), "names, dtypes and shapes differ in number")
        require(all(length >= 0 for shape in self.shapes for length in shape), "a shape has a negative length")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOffer:
    """The learner's answer: where to meet, and what it sends now, bucket by bucket.

    host, port, collective  the rendezvous of the group, and its kind: nccl or gloo
    problem                 why there is nothing to send; the rest is empty then
    """

    host: str = ""
    port: int = 0
    collective: str = ""
    run_epoch: int = 0
    policy_version: int = 0
    buckets: tuple[BucketLayout, ...] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        counts(self, "run_epoch", "policy_version")
        require(0 <= self.port < 65536, f"port must be in 0..65535, got {self.port}")

    @property
    def order(self) -> tuple[int, int]:
        return (self.run_epoch, self.policy_version)
