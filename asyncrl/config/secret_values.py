"""Decides which values of a run file are secrets. All code that prints, logs, records or sends settings uses it. Pure.

Tables of options have keys that asyncrl does not choose. There, a value is a secret if its key, or a key above it,
contains a word such as "password" or "headers"; under "token" or "api-key" only texts are. So is what follows such a
word in a command ("--api-key", "sk-1"). In any text, the credentials of an address are secrets: user, password, and
query parameters with such words.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.config.addresses import without_secrets

HIDDEN: Final = "***"
_OF_TEXT: Final = {"key", "keys", "token", "tokens", "apikey"}
"""Words that also occur in keys of numbers, such as "bytes_per_token"; only texts under them are secrets."""
_OF_ANYTHING: Final = {"passwd", "auth", "authorization", "bearer"} | {
    word + ending for word in ("password", "secret", "header", "credential", "cookie") for ending in ("", "s")
}
_OWN: Final = ("token",)
"""Keys of asyncrl that hold secrets. Others, such as data.prompt_key, only sound like it."""
_SERVERS: Final = ("url", "address")
_ADDRESS: Final = re.compile(r"(?<=://)[^/\s]*@")
_QUERY: Final = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]*")
_FLAG: Final = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]*)([= ])(\S+)")


def settings_without_secrets(settings: Any) -> dict[str, dict[str, Any]]:
    """Return every section of a RunConfig as JSON values with secrets hidden. Absent sections are left out."""
    table = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    return {
        section: {key: _hide_own(key, value) for key, value in its.items()}
        for section, its in table.items()
        if its is not None  # also [servers], whose keys are names
    }


def hide_secrets(value: Any, *, key: str = "") -> Any:
    """Return a copy of an option's value without its secrets; equal to ``value`` if it has none."""
    words = _words(key)
    if isinstance(value, Mapping):
        below = {name: f"{key} {name}" if words & (_OF_TEXT | _OF_ANYTHING) else str(name) for name in value}
        return {name: hide_secrets(one, key=below[name]) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [
            HIDDEN if _is_secret_argument(before, one) else hide_secrets(one, key=key)
            for before, one in itertools.pairwise(("", *value))
        ]
    is_text = isinstance(value, str)
    if value in ("", None) or isinstance(value, bool):
        return value
    if words & _OF_ANYTHING or (is_text and words & _OF_TEXT):
        return HIDDEN
    return _FLAG.sub(_hide_argument, hide_credentials(value)) if is_text else value


def _is_secret_argument(flag: Any, value: Any) -> bool:
    """Whether ``value`` follows a word of a command such as --api-key; --max-tokens 200 is none."""
    if not (isinstance(flag, str) and flag.startswith("-") and isinstance(value, str)) or value.startswith("-"):
        return False
    words = _words(flag)
    return bool(words & _OF_ANYTHING or (words & _OF_TEXT and not value.isdecimal()))


def _hide_argument(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}" if _is_secret_argument(found[1], found[3]) else found[0]


def hide_credentials(text: str) -> str:
    """Remove the credentials from addresses in a text."""
    if "://" not in text:
        return text

    def query(found: re.Match[str]) -> str:
        return f"{found[1]}={HIDDEN}" if _words(found[1]) & (_OF_TEXT | _OF_ANYTHING) else found[0]

    return _QUERY.sub(query, _ADDRESS.sub("", text))


def _hide_own(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return hide_secrets(value)
    if isinstance(value, list):  # tables with asyncrl's own keys
        return [_hide_in_table(one) if isinstance(one, Mapping) else _hide_own(key, one) for one in value]
    if key in _OWN and value:
        return HIDDEN
    if key in _SERVERS:
        return without_secrets(value)
    return hide_credentials(value) if isinstance(value, str) else value


def _hide_in_table(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _hide_own(key, value) for key, value in table.items() if value is not None}


def _words(key: str) -> set[str]:
    return set(re.split("[-_ .]", re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()))
