"""How weight versions are stored as objects: full, as a delta from the version before, or both. Pure.

    1.full   2.delta   3.delta   4.delta 4.full   5.delta
       └──────── chain of 3 ┘       └─── chain of 5 ─┘

A version is made from a base, that is a full version or one that a worker has, and all deltas after it. The object that
names a version (``Link.uri``) describes its chain: the versions since the last full one, and the one before that, so
that a worker which has it fetches one more delta instead of the full version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from asyncrl.errors import WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version.  sha256: as announced.  full, delta: bytes of its objects; 0 if it is not stored like this"""

    incarnation: int
    policy_version: int
    sha256: str
    full: int = 0
    delta: int = 0

    @property
    def name(self) -> str:
        return f"{self.incarnation}-{self.policy_version}"

    @property
    def delta_name(self) -> str:
        return f"{self.name}.delta"

    def full_name(self, number: int) -> str:
        """Name of the object of weight file ``number``, from 0."""
        return f"{self.name}.full" if not number else f"{self.name}.{number}.full"

    def precedes(self, order: tuple[int, int]) -> bool:
        """Whether this is an earlier version of the same incarnation."""
        return self.incarnation == order[0] and self.policy_version < order[1]

    @property
    def uri(self) -> str:
        return self.delta_name if self.delta else self.full_name(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a worker must know to make a version.

    files  name and size of each weight file, in the order in which deltas count their bytes
    links  the chain, this version last
    """

    files: tuple[tuple[str, int], ...]
    links: tuple[Link, ...]

    @property
    def newest(self) -> Link:
        return self.links[-1]

    @property
    def objects(self) -> set[str]:
        """Names of all objects of the chain."""
        numbers = range(len(self.files))
        full = {link.full_name(number) for link in self.links if link.full for number in numbers}
        return full | {link.delta_name for link in self.links if link.delta}

    def is_full_due(self, *, every: int) -> bool:
        """Whether the next version is the ``every``-th since a full one."""
        return not any(link.full for link in (self.links[1 - every :] if every > 1 else ()))

    def grown(self, link: Link) -> Description:
        """Return the description of the next version. A full version begins a new chain."""
        if not link.full:
            return replace(self, links=(*self.links, link))
        before = (replace(self.newest, full=0, delta=0),) if link.delta else ()
        return replace(self, links=(*before, link))


def to_text(description: Description) -> str:
    return json.dumps(asdict(description), separators=(",", ":"))


def from_text(text: str) -> Description:
    """Raises WeightsError."""
    try:
        found = json.loads(text)
        files = tuple((str(name), int(size)) for name, size in found["files"])
        links: Sequence[Link] = tuple(Link(**fields) for fields in found["links"])
        if not files or not links or any("/" in name or name.startswith(".") for name, _ in files):
            raise ValueError("no files, no versions, or the name of a file is a path")
        return Description(files=files, links=tuple(links))
    except (ValueError, TypeError, KeyError) as error:
        raise WeightsError(f"cannot parse the description of a weight version: {error}") from error
