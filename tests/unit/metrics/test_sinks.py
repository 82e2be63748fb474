"""Sinks besides metrics.jsonl and the console: TensorBoard read back, W&B tables and alerts, a user's own sink."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb

from asyncrl import config
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages.evaluation import FIRST_GROUP_ID
from asyncrl.metrics import tensorboard as tensorboard_sink
from asyncrl.metrics.port import ShowsSamples, TakesAlarms
from asyncrl.metrics.samples_text import COLUMNS, EVALUATION_COLUMNS
from asyncrl.metrics.sinks import OwnSink, check_logins, check_sinks, open_sinks
from asyncrl.metrics.wandb import WandB
from asyncrl.policies.groups.sample import Answer, GroupSample
from asyncrl.policies.metric import Histogram, Metric

ROW: dict[str, Metric] = {
    "reward/mean": 0.75,
    "loss": math.nan,
    "staleness/histogram": Histogram(edges=(0.0, 1.0, 2.0, 3.0), counts=(0, 3, 4)),
    "length/dropped": Histogram(edges=(0.0, 1.0), counts=(0,)),
}
ANSWERS = (
    Answer(
        reward=1.0, advantage=0.5, staleness=1, tokens=(1, 2), turns=(("policy", "```\n# 12"),), finish_reason="stop"
    ),
    Answer(reward=0.0, tokens=(3,), turns=(("policy", "13"),), versions=((0, 0, 4), (1, 0, 6)), finish_reason="length"),
)
EVALUATED = GroupSample(
    group_id=FIRST_GROUP_ID,
    place=3,
    fate="evaluated",
    step=20,
    prompt="7+5=",
    label="12",
    dataset="sums",
    answers=ANSWERS,
)
SAMPLE = GroupSample(group_id=7, fate="trained", step=3, worker="w0", prompt="7+5=", answers=ANSWERS)


def test_tensorboard_has_every_number_histogram_sample_and_alarm(tmp_path: Path) -> None:
    sink = tensorboard_sink.TensorBoard(tmp_path)
    for step in (1, 2):
        sink.write(step, ROW | {"reward/mean": 0.5 * step})
    sink.write_samples(2, [SAMPLE])
    sink.alarm(2, "mismatch", "trainer and engine disagree")
    sink.close()
    read = _read(tmp_path)
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]
    assert "loss" not in read.Tags()["scalars"]
    histogram = read.Histograms("staleness/histogram")[-1].histogram_value
    assert (list(histogram.bucket), list(histogram.bucket_limit)) == ([0.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    assert (histogram.min, histogram.max, histogram.num) == (1.0, 3.0, 7.0)
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert "trainer and engine disagree" in texts["alarms/mismatch/text_summary"]
    assert "    # 12" in texts["samples/trained/text_summary"]


def test_tensorboard_hides_steps_that_are_trained_again(tmp_path: Path) -> None:
    for steps, reward, purged in (((1, 2, 3), 0.1, None), ((2, 3), 0.9, 2)):
        sink = tensorboard_sink.TensorBoard(tmp_path, purge_step=purged)
        for step in steps:
            sink.write(step, {"reward/mean": reward})
        sink.close()
    values = [(event.step, round(event.value, 3)) for event in _read(tmp_path).Scalars("reward/mean")]
    assert values == [(1, 0.1), (2, 0.9), (3, 0.9)]


def _read(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory))
    found.Reload()
    return found


def test_missing_tensorboard_is_refused_in_one_line(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_sink, "_WRITERS", ("no_such_writer",))
    with pytest.raises(ConfigError, match="metrics.tensorboard: tensorboard is not installed; pip install tensorboard"):
        check_sinks(_with(run, tensorboard=True))


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return config.only_overrides([f'run.directory="{tmp_path}"', "run.name=r"])


def _with(run: RunConfig, **metrics: Any) -> RunConfig:
    import dataclasses

    return dataclasses.replace(run, metrics=dataclasses.replace(run.metrics, console=False, **metrics))


class Own:
    """A user's own sink."""

    made: list[Own] = []

    def __init__(self, run: RunConfig) -> None:
        self.name = run.run.name
        self.said: list[Any] = []
        self.made.append(self)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        if step == 13:
            raise ValueError("no thirteenth step")
        self.said.append(step)

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        self.said.append([sample.group_id for sample in samples])

    def close(self) -> None:
        self.said.append("closed")


class Deaf:
    def __init__(self, run: RunConfig) -> None: ...

    def close(self) -> None: ...


def test_users_sink_gets_numbers_and_samples_and_never_ends_the_run(
    run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    Own.made.clear()
    sinks = open_sinks(_with(run, sinks=(f"{__name__}:Own",)), resume=False)
    own = sinks[-1]
    own.write(1, ROW)
    assert isinstance(own, ShowsSamples) and isinstance(own, TakesAlarms)
    own.write_samples(1, [SAMPLE])
    own.alarm(1, "drop", "it has no method for it")
    own.write(13, ROW)
    sinks[0].close()
    own.close()
    assert "metrics.sinks: tests.unit.metrics.test_sinks:Own.write raised ValueError: no thirteenth step" in caplog.text
    assert Own.made[0].name == "r"
    assert Own.made[0].said == [1, [7], "closed"]


class Unreachable(Own):
    def __init__(self, run: RunConfig) -> None:
        raise ConnectionRefusedError("nobody listens")


def test_a_users_sink_that_cannot_be_made_never_ends_the_run(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    sinks = open_sinks(_with(run, sinks=(f"{__name__}:Unreachable",)), resume=True)
    for step in range(3):
        sinks[-1].write(step, ROW)
    for sink in sinks:
        sink.close()
    assert caplog.text.count("raised ConnectionRefusedError: nobody listens (") == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:Sink", "metrics.sinks: cannot import 'nowhere'"),
        (f"{__name__}:Deaf", "has no write()"),
        (f"{__name__}:_read", "is a function, not a type"),
        ("prometheus", "write package.module:object"),
    ],
)
def test_class_that_is_no_sink_is_refused_before_the_run(name: str, problem: str, run: RunConfig) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sinks(_with(run, sinks=(name,)))
    assert problem in str(refused.value) and str(refused.value).startswith("metrics.sinks: ")
    assert isinstance(OwnSink, type)


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.alerts: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}
        self.id = "id"

    def log(self, row: dict[str, Any]) -> None:
        self.logged.append(row)

    def alert(self, **fields: Any) -> None:
        self.alerts.append(fields)

    def define_metric(self, name: str, *, step_metric: str = "", hidden: bool = False) -> None:
        self.axes[name] = step_metric

    def finish(self) -> None: ...


def test_wandb_gets_tables_of_samples_and_alarms_as_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    monkeypatch.setattr("asyncrl.metrics.wandb._reach", lambda settings: None)
    sink = WandB(project="p", name="n", directory=tmp_path, config={}, resume=False)
    for step in range(40):
        sink.write_samples(step, [SAMPLE])
    sink.alarm(5, "mismatch", "trainer and engine disagree")
    assert [row["step"] for row in fake.logged] == [31]
    sink.close()
    assert [row["step"] for row in fake.logged] == [31, 3]  # the row of the last group
    table = fake.logged[0]["samples"]
    assert table.columns == list(COLUMNS) and len(table.data) == 64
    assert fake.alerts == [{"title": "mismatch at step 5", "text": "trainer and engine disagree", "level": "WARN"}]


def test_wandb_draws_evaluations_over_their_own_steps_with_a_table_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun()
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    monkeypatch.setattr("asyncrl.metrics.wandb._reach", lambda settings: None)
    sink = WandB(project="p", name="n", directory=tmp_path, config={}, resume=False)
    sink.write_samples(25, [EVALUATED])
    sink.write(20, {"evaluation/sums/mean@2": 0.5, "evaluation/complete": 1.0})
    sink.write(30, {"evaluation/sums/mean@2": 0.5, "evaluation/complete": 1.0})
    sink.close()
    first, second = fake.logged
    assert fake.axes["evaluation/*"] == "evaluation/step"
    assert (first["evaluation/step"], second["evaluation/step"]) == (20, 30)
    table = first["evaluation/sums/samples"]
    assert table.columns == list(EVALUATION_COLUMNS)
    assert table.data == [[20, "7+5=", "12", "```\n# 12", 1.0, 2, "stop"], [20, "7+5=", "12", "13", 0.0, 1, "length"]]
    assert "evaluation/sums/samples" not in second


def test_a_variable_that_wandb_does_not_understand_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "of-line")
    with pytest.raises(
        ConfigError, match="a WANDB_ variable is wrong: mode Input should be 'online'.*of-line"
    ) as caught:
        check_sinks(config.only_overrides(["metrics.wandb=true"]))
    assert "\n" not in str(caught.value)


def test_without_wandb_its_sink_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed; pip install"):
        check_sinks(config.only_overrides(["metrics.wandb=true"]))


@pytest.mark.parametrize(
    ("mode", "login", "problem"),
    [
        ("online", True, ""),
        ("online", False, "metrics.wandb: this machine has no login; run `wandb login`, or set WANDB_API_KEY"),
        ("online", ValueError("API key must be\nlonger"), "metrics.wandb: API key must be longer; run `wandb login`"),
        ("offline", False, ""),
        ("disabled", False, ""),
    ],
)
def test_a_missing_login_of_wandb_is_refused_before_the_run(
    mode: str, login: bool | Exception, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(**_: Any) -> bool:
        if isinstance(login, Exception):
            raise login
        return login

    settings = type("Settings", (), {"mode": mode})
    monkeypatch.setattr(wandb, "setup", lambda: type("Setup", (), {"settings": settings}))
    monkeypatch.setattr(wandb, "login", find)
    run = config.only_overrides(["metrics.wandb=true"])
    if not problem:
        check_logins(run)
        return
    with pytest.raises(ConfigError) as refused:
        check_logins(run)
    assert str(refused.value).startswith(problem) and "\n" not in str(refused.value)


def test_rows_are_kept_while_wandb_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake, modes = FakeRun(), []

    def init(*, mode: str = "", **_: Any) -> FakeRun:
        modes.append(mode)
        return fake

    settings = type("Settings", (), {"mode": "online", "base_url": "http://127.0.0.1:9"})
    monkeypatch.setattr(wandb, "setup", lambda: type("Setup", (), {"settings": settings}))
    monkeypatch.setattr(wandb, "init", init)
    sink = WandB(project="p", name="n", directory=tmp_path, config={}, resume=False)
    assert modes == []  # nothing is asked before the first row
    for step in (1, 2):
        sink.write(step, ROW)
    sink.close()
    assert modes == ["offline"] and [row["step"] for row in fake.logged] == [1, 2]
    (line,) = caplog.messages
    assert line.startswith(
        "metrics.wandb: W&B gets nothing now (http://127.0.0.1:9: [Errno 111] Connection refused); run `wandb login`"
    )
    assert f"`wandb sync {tmp_path}/wandb/offline-run-*id` uploads them" in line
