"""Compares a stream or consumer with an earlier observation: what was lost, and which settings changed. Pure.

Tests: tests/unit/bus/test_stream_state.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

_OTHERS: Final = ("metadata", "description", "placement")
"""Settings that asyncrl does not depend on: notes of the server and of an operator."""
_UNSET: Final[tuple[Any, ...]] = (None, False, 0, "", -1, [], {})
"""Values of unset settings. Servers of different versions leave out different unset settings."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream or consumer at one time. For a consumer, ``first``, ``last``, ``messages`` and ``began`` are 0.

    created      creation time, which identifies it
    first, last  sequences of its first and last entry
    messages     number of its entries
    began, time  when its first entry was stored, and when this was observed; Unix seconds of the server's clock; 0 if
                 the server does not say
    """

    created: str
    config: Mapping[str, Any]
    first: int = 0
    last: int = 0
    messages: int = 0
    began: float = 0.0
    time: float = 0.0

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> StreamState:
        """``info``: the server's answer to CREATE, UPDATE or INFO."""
        state = info.get("state", {})
        first, last, messages = (int(state.get(name, 0)) for name in ("first_seq", "last_seq", "messages"))
        began, time = _seconds(state.get("first_ts")), _seconds(info.get("ts"))
        return cls(str(info["created"]), info["config"], first, last, messages, began, time)

    @property
    def holes(self) -> int:
        return max(0, self.last - self.first + 1) - self.messages


def lost(before: StreamState, now: StreamState, *, kind: str, trimmed: int = 0) -> str:
    """Describe what the stream lost, other than by trimming or expiry; "" if no loss is known.

    kind     "log": only we trim, up to ``trimmed``
             "aged": nobody trims, but entries expire
             "state": a key stays once it is put
             "": messages may leave by themselves
    """
    if now.created != before.created:
        return "was deleted and recreated"
    if now.last < before.last:
        return f"went back from entry {before.last} to {now.last}"
    is_log = kind == "log" or (kind == "aged" and _is_young(before, now))
    is_log = is_log and now.config.get("num_replicas", 1) == 1  # a cluster may leave out sequences
    if is_log and now.first > max(before.first, trimmed + 1):
        return f"lost its entries up to {now.first - 1}"
    if is_log and now.holes > before.holes:
        return f"lost {now.holes - before.holes} of its entries"
    if kind == "state" and now.messages < before.messages:
        return f"lost {before.messages - now.messages} of its {before.messages} states"
    return ""


def _is_young(before: StreamState, now: StreamState) -> bool:
    """Whether none of the earlier entries of a log can have expired yet."""
    max_age = now.config.get("max_age", 0) / 10**9
    return before.messages > 0 and before.began > 0 and 0 <= now.time - before.began < max_age


def altered(before: StreamState, now: StreamState) -> str:
    """Describe the settings that changed; "" if none."""
    names = sorted((before.config.keys() | now.config.keys()) - set(_OTHERS))
    pairs = {name: (before.config.get(name), now.config.get(name)) for name in names}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and not _are_unset(*pair)}
    if not changed:
        return ""
    return "was altered: " + ", ".join(f"{name} {_text(old)} -> {_text(new)}" for name, (old, new) in changed.items())


def _seconds(text: Any) -> float:
    """Parse a server's date and time to Unix seconds; 0 if it is not valid."""
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _are_unset(*values: Any) -> bool:
    return all(value in _UNSET for value in values)


def _text(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
