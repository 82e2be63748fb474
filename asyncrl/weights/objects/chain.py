"""Tracks which objects hold which weight versions, and finds the cheapest route from a worker's version to the newest.
Pure.

A version is stored as a delta from the previous one (NAME.delta), in full (NAME.full), or both. Every version's
description lists the chain of links from a full version on, so a worker that missed versions knows what to fetch.

Tests: tests/unit/weights/objects/test_chain.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from asyncrl.errors import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version of a weight file.

    sha256       hash of the file
    full, delta  bytes of its objects; 0 if the object does not exist
    part         number of the part of the model, from 1; 0: the whole model
    """

    incarnation: int
    policy_version: int
    sha256: str
    full: int = 0
    delta: int = 0
    part: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return (self.incarnation, self.policy_version)

    @property
    def name(self) -> str:
        return f"{self.incarnation}-{self.policy_version}" + (f".{self.part}" if self.part else "")

    @property
    def full_name(self) -> str:
        return f"{self.name}.full"

    @property
    def delta_name(self) -> str:
        return f"{self.name}.delta"

    @property
    def uri(self) -> str:
        """Name of the object that describes this version."""
        return self.delta_name if self.delta else self.full_name

    @property
    def objects(self) -> set[str]:
        return ({self.full_name} if self.full else set()) | ({self.delta_name} if self.delta else set())


Chain = tuple[Link, ...]
"""Consecutively published versions of one incarnation, the newest last. If the first version is only a delta, only
workers that already have its weights can start there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Starts at ``base``, available locally or fetched in full, then applies the deltas of ``links``."""

    base: Link
    is_at_hand: bool
    links: Chain

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch."""
        return (0 if self.is_at_hand else self.base.full) + sum(link.delta for link in self.links)

    @property
    def objects(self) -> set[str]:
        return {link.delta_name for link in self.links} | (set() if self.is_at_hand else {self.base.full_name})


def grown(chain: Chain, link: Link, *, keep: int, behind: int) -> Chain:
    """Add a newer link and drop links that are not needed. Keep a full version from which each of the newest ``keep``
    versions can be reached. Also keep all deltas of the last ``behind`` versions, even across a full version, which may
    be far larger."""
    chain = (*chain, link)
    oldest = max(0, len(chain) - keep)
    start = max(index for index in range(oldest + 1) if chain[index].full)
    while start > max(0, len(chain) - 1 - behind) and chain[start].delta:
        start -= 1
    return chain[start:]


def is_full_due(chain: Chain, *, every: int) -> bool:
    """Whether the next version is the ``every``-th since a full one."""
    since = chain[1 - every :] if every > 1 else ()
    return not any(link.full for link in since)


def route(chain: Chain, *, at_hand: Collection[Link], lost: Collection[str]) -> Route | None:
    """Return the route to the last link with the fewest bytes to fetch, or None. ``lost``: names of missing objects"""
    found: list[Route] = []
    for index, base in enumerate(chain):
        links = chain[index + 1 :]
        if base in at_hand:
            found.append(Route(base=base, is_at_hand=True, links=links))
        if base.full:
            found.append(Route(base=base, is_at_hand=False, links=links))
    possible = [way for way in found if all(link.delta for link in way.links) and not way.objects & set(lost)]
    return min(possible, key=lambda way: (way.num_bytes, len(way.links)), default=None)


def to_text(chain: Chain) -> str:
    return json.dumps([asdict(link) for link in chain], separators=(",", ":"))


def from_text(text: str) -> Chain:
    """Parse a chain. Raises WeightsError."""
    try:
        return tuple(Link(**fields) for fields in json.loads(text))
    except (ValueError, TypeError) as error:
        raise WeightsError(f"cannot parse the description of a weight version: {error}") from error


def part_of(name: str) -> int | None:
    """Number of the part that an object belongs to; None for an index over the parts."""
    _, *part, kind = name.split(".")
    return None if kind == "index" else int(part[0]) if part and part[0].isdigit() else 0


def index_name(incarnation: int, policy_version: int) -> str:
    """Name of the object that lists the parts of a version."""
    return f"{incarnation}-{policy_version}.index"


def names(chain: Sequence[Link]) -> set[str]:
    """Names of the objects that the chain needs."""
    return set[str]().union(*(link.objects for link in chain))
