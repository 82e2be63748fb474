"""Which values of a run file are secrets: one rule for whatever prints, logs, records or sends settings. Pure.

In tables of options, whose keys asyncrl does not choose, a secret is a text under a key with a word such as "token",
"api-key" or "headers", itself or anything below. In any text, it is what an address says of who asks: user, password,
and such words in its query.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.config.addresses import without_secrets

HIDDEN: Final = "***"
_OF_TEXT: Final = {"key", "keys", "token", "tokens", "apikey"}
"""Words that other settings have, too: "bytes_per_token" is a number."""
_OF_ANYTHING: Final = {
    *("password", "passwords", "passwd", "secret", "secrets", "header", "headers", "auth", "authorization", "bearer"),
    *("credential", "credentials", "cookie", "cookies"),
}
_OWN: Final = ("token",)
"""Secret keys of asyncrl's own; others of them, such as data.prompt_key, only sound like it."""
_SERVERS: Final = ("url", "address")
_ADDRESS: Final = re.compile(r"(?<=://)[^/\s]*@")
_QUERY: Final = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]*")


def shown(settings: Any) -> dict[str, dict[str, Any]]:
    """Every section of a RunConfig as JSON has it, secrets hidden; sections that it does not have are left out."""
    table = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    return {
        section: {key: _own_shown(key, value) for key, value in its.items()}
        for section, its in table.items()
        if its is not None
    }


def hidden(value: Any, *, key: str = "") -> Any:
    """A copy of an option's value without its secrets; equal to it if there are none."""
    words = _words(key)
    if isinstance(value, Mapping):
        below = {name: f"{key} {name}" if words & (_OF_TEXT | _OF_ANYTHING) else str(name) for name in value}
        return {name: hidden(one, key=below[name]) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(one, key=key) for one in value]
    is_text = isinstance(value, str)
    if value in ("", None) or isinstance(value, bool):
        return value
    if words & _OF_ANYTHING or (is_text and words & _OF_TEXT):
        return HIDDEN
    return address_hidden(value) if is_text else value


def address_hidden(text: str) -> str:
    """The text without what addresses in it say of who asks."""
    if "://" not in text:
        return text

    def query(found: re.Match[str]) -> str:
        return f"{found[1]}={HIDDEN}" if _words(found[1]) & (_OF_TEXT | _OF_ANYTHING) else found[0]

    return _QUERY.sub(query, _ADDRESS.sub("", text))


def _own_shown(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return hidden(value)
    if isinstance(value, list):  # of tables, each with keys of asyncrl's own
        return [_table_shown(one) if isinstance(one, Mapping) else _own_shown(key, one) for one in value]
    if key in _OWN and value:
        return HIDDEN
    if key in _SERVERS:
        return without_secrets(value)
    return address_hidden(value) if isinstance(value, str) else value


def _table_shown(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _own_shown(key, value) for key, value in table.items() if value is not None}


def _words(key: str) -> set[str]:
    return set(re.split("[-_ .]", re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()))
