"""Which settings are secret: one rule for everything that shows settings."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config import tables
from asyncrl.config.secret_values import HIDDEN, hide_credentials, hide_secrets
from asyncrl.errors import ConfigError
from asyncrl.rewards.remote import Options


@pytest.mark.parametrize(
    "options",
    [
        {"token": "x"},
        {"api-key": "x"},
        {"apiKey": "x"},
        {"judge": {"password": "x"}},
        {"password": 12345},
        {"headers": {"X-Team": "x"}},
        {"servers": [{"auth": ["x"]}]},
        {"url": "https://user:x@host/y"},
        {"url": "https://host/y?key=x&n=1"},
    ],
)
def test_a_secret_is_hidden_wherever_it_is(options: dict[str, Any]) -> None:
    assert "x" not in str(hide_secrets(options)).replace("X-", "") and "12345" not in str(hide_secrets(options))


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 100, "bytes_per_token": 9.5, "use_key": True, "token": ""},
        {"url": "http://host:8000/score?n=1"},
        {"server_arguments": {"mem-fraction-static": 0.8, "list": [1, "two"]}},
    ],
)
def test_values_that_are_not_secret_are_shown(options: dict[str, Any]) -> None:
    assert hide_secrets(options) == options


def test_address_keeps_all_but_its_credentials() -> None:
    said = "cannot reach https://user:pass@host:1/a?api_key=x&n=1 now"
    assert hide_credentials(said) == f"cannot reach https://host:1/a?api_key={HIDDEN}&n=1 now"


def test_error_about_an_option_hides_its_secret() -> None:
    with pytest.raises(ConfigError, match=r"reward.options: headers must be a table, got \*\*\*"):
        tables.build(Options, {"url": "http://a", "headers": "Bearer hunter2"}, "reward.options")
    with pytest.raises(ConfigError, match="url must start with http:// or https://, got 'ftp://host'"):
        tables.build(Options, {"url": "ftp://me:hunter2@host"}, "reward.options")
    assert "hunter2" not in repr(Options(url="http://me:hunter2@a", headers={"a": "hunter2"}))
