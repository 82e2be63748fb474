"""The meaning of `--set` and of override tables: every value arrives as given, or is refused in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import only_overrides, override, override_items
from asyncrl.config.toml_text import toml_text
from asyncrl.errors import ConfigError

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


def test_quoted_key_may_contain_dots() -> None:
    for quoted in ('"geo_mask.low"', "'geo_mask.low'"):
        assert table_of(f"algorithm.options.{quoted}=0.9") == {"algorithm": {"options": {"geo_mask.low": 0.9}}}
    assert table_of('engine.options."a=b"=1') == {"engine": {"options": {"a=b": 1}}}


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


@pytest.mark.parametrize("more", ["run.seed=3", "seed = 3", "[data]\npath = 'a'"])
def test_a_setting_after_a_line_break_is_refused_not_dropped(more: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set run\.steps: another setting follows after a line break") as error:
        table_of(f"run.steps=5\n{more}")
    assert "\n" not in str(error.value)
    assert table_of("run.steps=5  # a comment\n") == {"run": {"steps": 5}}


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


@pytest.mark.parametrize("overrides", ["run.steps=10", b"run.steps=10", None, 7, [("run.steps", 10)]])
def test_overrides_must_be_a_table_or_a_list(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r'^overrides: give a table, \{"run.steps": 10\}, or a list of texts'):
        override_items(overrides)


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), ({"a": [object()]}, "object"), ({1}, "set")])
def test_value_that_toml_cannot_hold_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^overrides: engine\.options\S* is a {kind}, which a run file cannot hold"):
        override_items({"engine.options": value})


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ("data.chat_template_options={today = 2024-07-26}", "chat_template_options.today is a date or a time"),
        ("rollout.options={a = [{b = 07:32:00}]}", "options.a.b is a date or a time, .*; write it in quotes"),
        ("learner.megatron={since = 1979-05-27T07:32:00Z}", "megatron.since is a date or a time"),
        ("engine.options={n = 99999999999999999999}", "options.n must be a whole number of 64 bits"),
    ],
)
def test_dates_and_huge_integers_are_refused(item: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        only_overrides(["data.chat_template=true", item])
    assert "\n" not in str(error.value)
