"""Settings from the bus cannot make a joining machine do anything that its own command does not allow."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.cli import foreign_settings
from asyncrl.config.record import worker_table
from asyncrl.errors import ConfigError
from tests import ROOT
from tests.harness.joining import Joins, joins_by

DEMO = ROOT / "examples" / "demo.toml"


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> Joins:
    return joins_by(monkeypatch)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module ``trap``, importable here, that creates the file ``sprung`` when it is imported."""
    (tmp_path / "trap.py").write_text(
        "import pathlib\n(pathlib.Path(__file__).parent / 'sprung').touch()\n"
        "def reward(sample):\n    return 1.0\n"
        "async def play(prompt, generate, *, index):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "sprung"
    sys.modules.pop("trap", None)


def forged(**sections: dict[str, Any]) -> dict[str, Any]:
    """A run's settings with keys that an attacker chose."""
    table, _ = worker_table(config.load(DEMO))
    for name, keys in sections.items():
        table[name] = table.get(name, {}) | keys
    return table


@pytest.mark.parametrize(
    ("section", "key"),
    [("reward", "kind"), ("rollout", "function"), ("engine", "kind"), ("weights", "channel"), ("bus", "kind")],
)
def test_code_is_not_imported_unless_the_command_allows_it(joins: Joins, trap: Path, section: str, key: str) -> None:
    said = re.escape(f"{section}.{key}: the run's settings name 'trap:reward', code that this machine's command does")
    with pytest.raises(ConfigError, match=f"^{said} not allow; if you trust it: --allow trap$"):
        joins(forged(**{section: {key: "trap:reward"}}))
    assert not trap.exists() and "trap" not in sys.modules


@pytest.mark.parametrize(
    "allow", ["tra", "trap2", "trap.reward", "trapdoor", "other"], ids=lambda name: f"--allow {name}"
)
def test_a_module_is_allowed_by_its_whole_name(joins: Joins, trap: Path, allow: str) -> None:
    with pytest.raises(ConfigError, match="--allow trap$"):
        joins(forged(reward={"kind": "trap:reward"}), allow=[allow])
    assert not trap.exists()


def test_what_the_command_allows_is_taken(joins: Joins, trap: Path) -> None:
    assert joins(forged(reward={"kind": "trap:reward"}), allow=["other", "trap"]).reward.kind == "trap:reward"
    assert joins(forged(reward={"kind": "trap.sub:f"}), allow=["trap"]).reward.kind == "trap.sub:f"


def test_which_program_an_agent_is_only_the_command_says(joins: Joins) -> None:
    agent = {"function": "agent", "options": {"harness": "command", "harness_options": {"command": ["rm"]}}}
    with pytest.raises(ConfigError, match=r"^rollout\.options: the run's settings say which programs to run"):
        joins(forged(rollout=agent))


def test_what_the_command_names_itself_needs_no_allowing(joins: Joins) -> None:
    made = joins(forged(reward={"kind": "trap:reward"}), "reward.kind=mine:score")
    assert made.reward.kind == "mine:score"


def test_code_that_a_worker_does_not_run_is_left_out(joins: Joins) -> None:
    table = forged(
        learner={"backend": "trap:a"},
        algorithm={"name": "trap:b", "loss": "trap:c", "filters": ["trap:d"]},
        launcher={"kind": "trap:e"},
    )
    assert "trap" not in repr(joins(table))


def test_files_and_secrets_of_this_machine_are_its_own(joins: Joins) -> None:
    table = forged(
        run={"directory": "/etc"},
        bus={"credentials": "/home/me/.netrc", "tls_ca": "/tmp/ca", "address": "nats://evil:1", "token": "t"},
        metrics={"wandb": True},
        weights={"channel": "objects", "directory": "/home/me/.ssh"},
    )
    made = joins(table)
    assert made.run.directory == "runs" and made.weights.directory == "" and not made.metrics.wandb
    assert (made.bus.credentials, made.bus.tls_ca, made.bus.address, made.bus.token) == ("", "", "", "")


def test_a_folder_that_is_only_read_is_taken(joins: Joins) -> None:
    assert joins(forged(weights={"channel": "files", "directory": "/shared/w"})).weights.directory == "/shared/w"


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:8000/score", "http://10.0.0.1:8001", "https://allowed:8000", "http://allowed:80@evil/"]
)
def test_a_server_is_not_asked_unless_the_command_allows_it(joins: Joins, url: str) -> None:
    table = forged(reward={"kind": "remote", "options": {"url": url}})
    with pytest.raises(
        ConfigError, match=r"^reward.options.url: the run's settings name .*: --(allow http|set reward)"
    ):
        joins(table, allow=["http://allowed:8000"])
    table = forged(engine={"kind": "sglang", "options": {"url": url}})
    with pytest.raises(ConfigError, match=r"^engine.options.url: the run's settings name "):
        joins(table, allow=["http://allowed:8000"])


def test_an_allowed_server_is_asked_at_any_path(joins: Joins) -> None:
    url = "http://allowed:8000/v1/score"
    made = joins(forged(reward={"kind": "remote", "options": {"url": url}}), allow=["http://allowed:8000/"])
    assert made.reward.options["url"] == url


@pytest.mark.parametrize(
    "arguments",
    [
        {"custom-weight-loader": ["trap.load"]},
        {"trust-remote-code": True},
        {"trust_remote_code": True},
        {"--trust-remote-code": True},
        {"trust-remote": True},  # argparse takes abbreviations
        {"tool-server": "x"},
        {"config": "x"},
        {"model-path": "x"},
        {"host": "0.0.0.0"},
        {"dtype": "--trust-remote-code"},
        {"cuda-graph-bs": [1, "--trust-remote-code"]},
        {"quantization": "/tmp/x"},
        {"dtype": {"a": 1}},
        {"enable custom": True},
    ],
    ids=str,
)
def test_arguments_of_an_engines_server_cannot_load_code(joins: Joins, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="^engine.options.server_arguments: the run's settings set '"):
        joins(forged(engine={"kind": "sglang", "options": {"server_arguments": arguments}}))


def test_sizes_and_methods_of_an_engines_server_are_taken(joins: Joins) -> None:
    arguments = {
        "mem-fraction-static": 0.8,
        "attention_backend": "fa3",
        "disable-radix-cache": True,
        "cuda-graph-bs": [1],
    }
    made = joins(forged(engine={"kind": "sglang", "options": {"server_arguments": arguments}}))
    assert made.engine.options["server_arguments"] == arguments


def test_this_machines_own_arguments_are_taken(joins: Joins) -> None:
    table = forged(engine={"kind": "sglang", "options": {"server_arguments": {"trust-remote-code": True}}})
    made = joins(table, "engine.options.server_arguments.trust-remote-code=false")
    assert made.engine.options["server_arguments"] == {"trust-remote-code": False}


@pytest.mark.parametrize("name", ["", "a b", "a/b", "http://a b", "ftp://a", "http://u:p@a", "a..b", "http://a:99999"])
def test_an_unclear_permission_is_refused(joins: Joins, name: str) -> None:
    with pytest.raises(ConfigError, match="^--allow .*: write a package or a module"):
        joins(forged(), allow=[name])


@pytest.mark.parametrize("section", ["reward", "engine", "weights", "bus", "rollout"])
def test_a_section_that_is_no_table_is_refused_in_one_line(joins: Joins, section: str) -> None:
    with pytest.raises(ConfigError, match=f"^the run.s settings: {section} must be a table"):
        joins(forged() | {section: "trap:reward"})


def test_every_key_that_a_worker_loads_code_by_is_looked_at() -> None:
    """Whoever adds a key that names code adds it here, or checks that joined workers do not use it."""
    used = set()
    for file in (ROOT / "asyncrl").rglob("*.py"):
        text = file.read_text()
        if "plugins.load(" in text or "_adapter(" in text:
            used |= set(re.findall(r'where=f?"([a-z_.{}]+)"', text))
    left_out = {"learner.backend", "launcher.kind", "metrics.sinks", "data.source"}
    left_out |= {"algorithm.name", "algorithm.filters", "algorithm.{where}"}
    left_out |= {"{where}.harness"}  # a key of rollout.options, which is refused as a whole
    assert used - left_out == set(foreign_settings._CODE)
    assert not {key.partition(".")[0] for key in left_out} & (set(foreign_settings._TAKEN) - {"learner", "data"})
    assert "backend" not in foreign_settings._TAKEN["learner"]


def test_code_that_rows_name_is_looked_at_too() -> None:
    table = {"reward": {"kind": "exact", "rows": {"a": "math", "b": "evil.module:reward"}}}
    with pytest.raises(ConfigError, match=r"reward.rows: the run's settings name 'evil.module:reward'"):
        foreign_settings.check_code(table, foreign_settings.Allowed())
    foreign_settings.check_code(table, foreign_settings.Allowed(modules=("evil",)))


@pytest.mark.parametrize("reward", [{"kind": "trap:reward"}, {"kind": "exact", "rows": {"a": "trap:reward"}}], ids=str)
def test_code_of_an_evaluations_rewards_is_not_imported_unless_the_command_allows_it(
    joins: Joins, trap: Path, reward: dict[str, Any]
) -> None:
    datasets = [{"name": "fine", "path": ""}, {"name": "sums", "path": "", "reward": reward}]
    table = forged(evaluation={"place": "shared", "datasets": datasets})
    with pytest.raises(ConfigError, match=r"^evaluation.datasets.reward.(kind|rows): .*'trap:reward'.* --allow trap$"):
        joins(table)
    assert "trap" not in sys.modules
    assert joins(table, allow=["trap"]).evaluation.datasets[1].name == "sums"


@pytest.mark.parametrize(
    ("option", "value"), [("sandbox", "none"), ("python", "/tmp/python"), ("readable", ["/home"]), ("network", True)]
)
def test_what_programs_may_do_on_a_machine_its_own_command_says(joins: Joins, option: str, value: Any) -> None:
    reward = {"kind": "code", "options": {"seconds": 1.0, option: value}}
    with pytest.raises(
        ConfigError, match=rf"^reward.options.{option}: the run's settings say .*: --set reward.options"
    ):
        joins(forged(reward=reward))
    datasets = [{"name": "sums", "path": "", "reward": reward}]
    with pytest.raises(ConfigError, match=rf"^evaluation.datasets.reward.options.{option}: the run's settings say "):
        joins(forged(evaluation={"place": "shared", "datasets": datasets}))
    made = joins(forged(reward={"kind": "code", "options": {"sandbox": "none"}}), "reward.options.sandbox=bwrap")
    assert made.reward.options == {"sandbox": "bwrap"}


def test_the_parts_of_a_reward_are_looked_at_as_the_reward_is(joins: Joins, trap: Path) -> None:
    """The parts of a data set's reward are checked as well."""

    def parts(**part: Any) -> dict[str, Any]:
        return {"kind": "parts", "parts": {"right": {"kind": "exact"}, "other": part}}

    for part, said in (
        ({"kind": "trap:reward"}, "kind: .*'trap:reward'.* --allow trap$"),
        (
            {"kind": "remote", "options": {"url": "http://10.0.0.1:8000/"}},
            "options.url: .* --allow http://10.0.0.1:8000$",
        ),
        (
            {"kind": "code", "options": {"sandbox": "none"}},
            "options.sandbox: .* --set reward.parts.other.options.sandbox=",
        ),
    ):
        with pytest.raises(ConfigError, match=rf"^reward.parts.other.{said}"):
            joins(forged(reward=parts(**part)))
        datasets = [{"name": "sums", "path": "", "reward": parts(**part)}]
        with pytest.raises(ConfigError, match=rf"^evaluation.datasets.reward.parts.other.{said}"):
            joins(forged(evaluation={"place": "shared", "datasets": datasets}))
    assert "trap" not in sys.modules
    made = joins(forged(reward=parts(kind="trap:reward")), allow=["trap"])
    assert made.reward.parts["other"].kind == "trap:reward"


def test_a_server_of_an_evaluations_reward_is_not_asked_unless_the_command_allows_it(joins: Joins) -> None:
    reward = {"kind": "remote", "options": {"url": "http://10.0.0.1:8000/score"}}
    table = forged(evaluation={"place": "shared", "datasets": [{"name": "sums", "path": "", "reward": reward}]})
    with pytest.raises(ConfigError, match=r"^evaluation.datasets.reward.options.url: .*--allow http://10.0.0.1:8000$"):
        joins(table)
    assert joins(table, allow=["http://10.0.0.1:8000"]).evaluation.is_on
