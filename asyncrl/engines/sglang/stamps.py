"""The strings by which a server knows its weights: "INCARNATION:VERSION:OWNER".

Each run counts from 0:0, so the version alone does not tell whose weights a server has. The owner is one worker of one
run, which keeps its owner when it restarts. A server with another owner's stamp has unknown weights.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrl.engines.version_spans import Version, format_version
from asyncrl.errors import EngineDied
from asyncrl.tensors import weight_files

_STAMP: Final = re.compile(r"(\d+):(\d+)(?::(\w+))?")


def new_owner() -> str:
    """Return a new owner, for a server that starts with this worker and ends with it."""
    return uuid.uuid4().hex[:16]


def kept_owner(file: Path, *, model: Path) -> str:
    """Return the owner of a server that outlives the worker: always the same for this file and these weights.

    The file is created if it does not exist. A new run in the same folder removes it (launch/processes/launch.py).
    model: folder of version 0:0. Raises WeightsError if its weights cannot be read
    """
    try:
        kept = file.read_text()
    except FileNotFoundError:
        kept = ""
    if not kept:
        kept = new_owner()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(kept)
    return hashlib.sha256(f"{kept} {weight_files.fingerprint(model)}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """The stamps of one owner.

    first_version  version for strings that asyncrl did not set, such as the "default" of a fresh server
    owner          empty: versions without an owner
    url            the server's, for messages; empty if it is not known
    """

    first_version: Version
    owner: str = ""
    url: str = ""

    def of(self, version: Version) -> str:
        return ":".join(filter(None, (format_version(version), self.owner)))

    def is_foreign(self, stamp: str) -> bool:
        """Whether another owner loaded the server's weights."""
        found = _STAMP.fullmatch(stamp)
        return found is not None and (found[3] or "") != self.owner

    def is_ours(self, stamp: str) -> bool:
        """Whether this owner loaded the server's weights."""
        found = _STAMP.fullmatch(stamp)
        return found is not None and (found[3] or "") == self.owner

    def read(self, stamp: str) -> Version:
        """Return the version. Raises EngineDied for another owner's stamp."""
        if self.is_foreign(stamp):
            raise EngineDied(
                f"another run or worker loaded its weights ({stamp}) into this worker's SGLang server"
                f"{self.url and f' at {self.url}'}: `asyncrl evaluate`, or a worker that joined with the same url? "
                "Give each worker a server of its own (engine.options.url)"
            )
        found = _STAMP.fullmatch(stamp)
        return (int(found[1]), int(found[2])) if found else self.first_version
