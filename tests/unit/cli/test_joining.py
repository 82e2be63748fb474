"""What a worker that joins with a bus and a name receives of the run file, and what it must set itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.cli.main import main
from asyncrl.config import RunConfig
from asyncrl.config.record import worker_table
from asyncrl.errors import ConfigError
from tests import ROOT
from tests.harness.joining import URL, joins_by

DEMO = ROOT / "examples" / "demo.toml"


def joined(monkeypatch: pytest.MonkeyPatch, run: RunConfig, *overrides: str) -> RunConfig:
    """The settings of a worker that joins ``run``."""
    sections, withheld = worker_table(run)
    return joins_by(monkeypatch)(sections, *overrides, withheld=withheld, allow=("examples",))


def test_it_samples_as_the_run_file_says_and_keeps_its_files_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load(DEMO, ["run.directory=/shared/runs", "run.seed=7", "rollout.max_running=5", "bus.token=hidden"])
    made = joined(monkeypatch, run)
    assert (made.bus.url, made.bus.token) == (URL, "")
    assert made.run_directory == Path("runs/demo")
    assert made.model.path == str(Path("runs/demo/model").absolute())
    for name in ("engine", "reward", "rollout", "staleness", "weights"):
        assert getattr(made, name) == getattr(run, name)
    assert (made.run.seed, made.window, made.load) == (7, run.window, run.load)


def test_what_it_has_elsewhere_it_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made = joined(monkeypatch, config.load(DEMO), "model.path=/models/mine", "engine.device=cuda")
    assert (made.model.path, made.engine.device) == ("/models/mine", "cuda")


@pytest.mark.parametrize(
    "override",
    [
        'reward.options={headers={Authorization="Bearer hidden"}}',
        'reward.options={url="https://user:hidden@host/"}',
        'reward.options={anything="hidden"}',  # options of a foreign reward may hold anything
        'engine.options={server_arguments={api-key="hidden"}}',
        'rollout.options={anything="hidden"}',
    ],
)
def test_what_may_be_a_secret_is_not_on_the_bus(monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    key = override.partition("=")[0]
    own = ["reward.kind=remote"] if key == "reward.options" and "anything" not in override else []
    own += ['rollout.function="examples.calculator:Calculator"'] if key == "rollout.options" else []
    run = config.load(DEMO, [*own, override])
    assert "hidden" not in str(worker_table(run))
    with pytest.raises(ConfigError, match=f"its {key} may hold secrets, .* --set {key}.KEY=VALUE"):
        joined(monkeypatch, run)
    assert getattr(joined(monkeypatch, run, f"{key}={{}}"), key.split(".")[0]).options == {}


@pytest.mark.parametrize(
    "part", ['{kind = "remote", options = {headers = {X = "hidden"}}}', '{kind = "my:own", options = {any = "hidden"}}']
)
def test_parts_of_a_reward_that_may_hold_a_secret_are_not_on_the_bus(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    table = f'{{right = {{kind = "exact"}}, other = {part}}}'
    run = config.load(DEMO, ["reward.kind=parts", f"reward.parts={table}"])
    assert "hidden" not in str(worker_table(run))
    with pytest.raises(ConfigError, match="its reward.parts may hold secrets, .* --set reward.parts.KEY=VALUE"):
        joined(monkeypatch, run)
    own = joined(monkeypatch, run, 'reward.parts={right = {kind = "exact"}}')
    assert list(own.reward.parts) == ["right"]
    dataset = f'{{name = "sums", path = "sums.jsonl", reward = {{kind = "parts", parts = {table}}}}}'
    run = config.load(DEMO, [f"evaluation.datasets=[{dataset}]"])
    assert "hidden" not in str(worker_table(run)) and not joined(monkeypatch, run).evaluation.is_on


def test_options_of_our_own_parts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config.load(DEMO, ["engine.kind=sglang", "engine.options={tensor_parallel=4}"])
    assert joined(monkeypatch, run).engine.options == {"tensor_parallel": 4}


@pytest.mark.parametrize("words", ["", f"--join {URL}", "--run demo", f"run.toml --join {URL} --run demo"])
def test_a_worker_has_a_run_file_or_a_bus_and_a_name(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout-worker", *words.split()]) == 2
    assert "name a run file, or a bus and a run: --join nats://HOST:PORT --run NAME" in capsys.readouterr().err


def test_a_run_file_needs_no_permission(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout-worker", str(DEMO), "--allow", "mine"]) == 2
    assert "--allow: a run file of this machine may name any code; it is for --join" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--join localhost:9 --run demo", "--join: bus: url must start with nats:// or tls://, got localhost:..."),
        (f"--join {URL} --run a/b", "--run: run: name must be letters, digits, - and _, got 'a/b'"),
    ],
)
def test_a_mistake_is_named_as_the_user_wrote_it(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout-worker", *words.split()]) == 2
    assert capsys.readouterr().err == f"asyncrl: {message}\n"


def evaluated(reward: str, place: str = "shared") -> RunConfig:
    dataset = f'{{name = "sums", path = "sums.jsonl", samples = 8, reward = {reward}}}'
    return config.load(DEMO, [f"evaluation.datasets=[{dataset}]", f"evaluation.place={place}"])


def test_it_evaluates_where_rollout_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = joined(monkeypatch, evaluated('{kind = "exact"}')).evaluation
    assert (made.is_on, made.place, [one.name for one in made.datasets]) == (True, "shared", ["sums"])
    assert made.datasets[0].reward is not None and made.datasets[0].reward.kind == "exact"
    for place in ("dedicated", "folder"):
        assert not joined(monkeypatch, evaluated('{kind = "exact"}', place)).evaluation.is_on
    assert not joined(monkeypatch, evaluated('{kind = "exact"}'), 'evaluation.place="folder"').evaluation.is_on


def test_it_only_trains_where_a_data_sets_reward_has_what_may_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    run = evaluated('{kind = "remote", options = {url = "http://judge", headers = {x-api-key = "hidden"}}}')
    assert "hidden" not in str(worker_table(run))
    assert not joined(monkeypatch, run).evaluation.is_on
