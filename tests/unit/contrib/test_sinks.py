"""Sinks for MLflow, SwanLab and Trackio, against stand-ins with the functions of these packages that are called."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import config
from asyncrl.contrib import sinks
from asyncrl.errors import ConfigError
from asyncrl.policies.metric import Histogram, Metric
from tests import ROOT

ROW: dict[str, Metric] = {
    "reward/pass@4": 0.75,
    "loss": math.nan,
    "staleness/histogram": Histogram(edges=(0.0, 1.0), counts=(1,)),
}


class Recorder:
    """Notes calls by name, and returns itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.entities: Any = None

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments, options))
            if name == "get_experiment_by_name":
                return None
            return SimpleNamespace(info=SimpleNamespace(run_id="r1")) if name == "create_run" else self

        return call


@pytest.fixture
def run() -> config.RunConfig:
    return config.load(ROOT / "examples" / "demo.toml", ["run.name=mine", "metrics.wandb_project=project"])


@pytest.mark.parametrize(("kind", "package"), [(sinks.SwanLab, "swanlab"), (sinks.Trackio, "trackio")])
def test_a_run_of_the_package_gets_the_numbers_of_each_step(
    kind: Any, package: str, run: config.RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Recorder()
    monkeypatch.setitem(sys.modules, package, made)
    sink = kind(run)
    sink.write(3, ROW)
    sink.close()
    (name, _, options), *rest = made.calls
    assert (name, options["project"], options["name"]) == ("init", "project", "mine")
    assert rest == [("log", ({"reward/pass@4": 0.75},), {"step": 3}), ("finish", (), {})]


def test_mlflow_gets_them_in_one_request_under_names_that_it_takes(
    run: config.RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Recorder()
    made.entities = SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))
    monkeypatch.setitem(sys.modules, "mlflow", made)
    sink = sinks.MLflow(run)
    sink.write(3, ROW | {"entropy": 0.5})
    sink.close()
    assert [name for name, _, _ in made.calls] == [
        *("MlflowClient", "get_experiment_by_name", "create_experiment", "create_run", "log_batch", "set_terminated")
    ]
    assert made.calls[-2][1:] == (("r1",), {"metrics": [("reward/pass_4", 0.75, 3), ("entropy", 0.5, 3)]})


@pytest.mark.parametrize("kind", [sinks.MLflow, sinks.SwanLab, sinks.Trackio])
def test_a_package_that_is_missing_is_named_in_one_line(
    kind: Any, run: config.RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("mlflow", "swanlab", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"metrics.sinks: \w+ is not installed; pip install \w+"):
        kind(run)
