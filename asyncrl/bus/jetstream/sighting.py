"""What a stream or a consumer is now, and what has become of it since it was seen last. Pure.

Tests: tests/unit/bus/test_sighting.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_OTHERS: Final = ("metadata", "description", "placement")
"""Settings that nothing of ours depends on: the server's own notes, and an operator's."""
_UNSET: Final[tuple[Any, ...]] = (None, False, 0, "", -1, [], {})
"""Servers of different versions leave out different settings that are not set."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """created: its identity;  first, last: sequences of its entries;  messages: how many there are;  both 0 for a
    consumer"""

    created: str
    config: Mapping[str, Any]
    first: int = 0
    last: int = 0
    messages: int = 0

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Sighting:
        """``info``: the server's answer to CREATE, UPDATE or INFO."""
        state = info.get("state", {})
        first, last, messages = (int(state.get(name, 0)) for name in ("first_seq", "last_seq", "messages"))
        return cls(str(info["created"]), info["config"], first, last, messages)

    @property
    def holes(self) -> int:
        return max(0, self.last - self.first + 1) - self.messages


def lost(before: Sighting, now: Sighting, *, kind: str, trimmed: int = 0) -> str:
    """What of its messages somebody else took; "" if nothing, as far as it can be told.

    kind     "log": trimmed by us up to ``trimmed``, and by nobody else; "state": a key that is put stays;
             "" where messages may leave by themselves
    """
    if now.created != before.created:
        return "was deleted and made anew"
    if now.last < before.last:
        return f"went back from entry {before.last} to {now.last}"
    is_log = kind == "log" and now.config.get("num_replicas", 1) == 1  # a cluster may leave out sequences
    if is_log and now.first > max(before.first, trimmed + 1):
        return f"lost its entries up to {now.first - 1}"
    if is_log and now.holes > before.holes:
        return f"lost {now.holes - before.holes} of its entries"
    if kind == "state" and now.messages < before.messages:
        return f"lost {before.messages - now.messages} of its {before.messages} states"
    return ""


def altered(before: Sighting, now: Sighting) -> str:
    """Which settings somebody changed; "" if none."""
    names = sorted((before.config.keys() | now.config.keys()) - set(_OTHERS))
    pairs = {name: (before.config.get(name), now.config.get(name)) for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not _are_unset(*pair)}
    if not changed:
        return ""
    return "was altered: " + ", ".join(f"{name} {_text(old)} -> {_text(new)}" for name, (old, new) in changed.items())


def _are_unset(*values: Any) -> bool:
    return all(value in _UNSET for value in values)


def _text(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
