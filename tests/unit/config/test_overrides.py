"""Overrides of a run file, and secrets in what is shown of it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import config
from asyncrl.config import only_overrides, override, override_items, record, secret_values, tables
from asyncrl.config.secret_values import HIDDEN, hide_credentials, hide_secrets
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError
from asyncrl.rewards.remote import Options
from tests import ROOT

TEXT = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)


def table_of(*items: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for item in items:
        override(table, item)
    return table


@given(value=VALUES)
def test_override_value_is_parsed_as_toml(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_text(value)}")["value"] == value
    assert table_of(*override_items({"engine.options": value})) == {"engine": {"options": value}}


@pytest.mark.parametrize(
    "overrides",
    [
        ['algorithm.options."geo_mask.low"=0.9'],
        ["algorithm.options.geo_mask.low=0.9"],  # the line above after a shell removed its quotes
        ["algorithm.options={geo_mask.low = 0.9}"],
        {"algorithm.options": {"geo_mask.low": 0.9}},
        {"algorithm.options.geo_mask.low": 0.9},
    ],
)
def test_an_option_of_one_part_of_an_algorithm_can_be_set(overrides: Any) -> None:
    made = only_overrides(override_items(overrides))
    assert made.algorithm.options == {"geo_mask.low": 0.9}
    again = only_overrides([f"algorithm.options={toml_text(made.algorithm.options)}"])
    assert again == made


@pytest.mark.parametrize("text", ['"\\ud83d\\ude00"', "'half", "[1, 2", "{a = }", ' "x'])
def test_invalid_toml_value_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set bus\.token: its value begins as a TOML value and is none") as error:
        table_of(f"bus.token={text}")
    assert text not in str(error.value)
    assert "\n" not in str(error.value)


def test_bare_word_is_a_string() -> None:
    assert table_of("engine.kind=sglang", "run.directory=runs/😀") == {
        "engine": {"kind": "sglang"},
        "run": {"directory": "runs/😀"},
    }


@pytest.mark.parametrize("item", ["steps=1", "run.steps", "run..steps=1", "run.=1", '"run.steps"=1', "=1"])
def test_an_override_without_section_and_key_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.key=value"):
        table_of(item)


def test_path_override_becomes_a_string() -> None:
    assert override_items({"run.directory": Path("runs/a b"), "x.y": [Path("c")]}) == (
        'run.directory="runs/a b"',
        'x.y=["c"]',
    )


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
        {"command": ["agent.py", "--api-key", "x", "--token=x", "-v"]},
        {"harness_options": {"command": "agent.py --n 3 --password x --secret=12345"}},
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
        {"command": ["agent.py", "--max-tokens", "200", "--key", "--n=3"], "stop": "a --tokens 20 b"},
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


def test_secrets_of_the_engine_of_a_pool_are_in_no_record() -> None:
    pools = 'rollout.pools={long = {options = {server_arguments = {api-key = "hush"}}}}'
    run = config.load(ROOT / "examples" / "demo.toml", [pools])
    assert run.rollout.pools["long"].options["server_arguments"] == {"api-key": "hush"}
    assert "hush" not in str(record.as_table(run))
    assert "hush" not in repr(secret_values.settings_without_secrets(run))
