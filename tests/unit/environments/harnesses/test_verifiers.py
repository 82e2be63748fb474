"""harness = "verifiers", on fake packages with the parts of its two interfaces that we use."""

from __future__ import annotations

import contextlib
import venv
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import tables
from asyncrl.environments.agent.harnesses.protocol import Task
from asyncrl.environments.agent.harnesses.verifiers import Options, VerifiersHarness
from asyncrl.errors import ConfigError, RolloutError
from tests.unit.environments.harnesses.tasks import ENDPOINT

CLASSIC = """
import os
class ClientConfig:
    def __init__(self, **settings): self.settings = settings
class Environment:
    def __init__(self, base): self.base = base
    def get_dataset(self): return [{"question": str(n), "answer": str(n + self.base)} for n in range(3)]
    async def run_rollout(self, row, client, model, sampling):
        if row["example_id"] == 2: return {"reward": None, "error": {"message": "no such tool"}}
        metrics = {"answer": float(row["answer"]), "key": len(os.environ[client.settings["api_key_var"]])}
        assert client.settings["api_base_url"] == "http://127.0.0.1:1234/v1" and model == "policy"
        return {"reward": 0.5, "metrics": metrics, "is_truncated": row["example_id"] == 1, "error": None}
def load_environment(name, base): return {"sums": Environment}[name](base)
"""

NEW = """
import contextlib, os, types
served = []
class ModelContext:
    def __init__(self, *, model, client): self.model, self.client = model, client
class EvalClientConfig:
    def __init__(self, **settings): self.settings = settings
class Environment:
    def __init__(self, settings):
        self.settings, self.taskset = settings, self
    def load(self): return (n for n in range(3))
    @contextlib.asynccontextmanager
    async def serving(self):
        served.append(1)
        yield
    async def run_episode(self, task, context):
        assert self.settings == {"taskset": {"id": "sums"}, "base": 7}
        error = types.SimpleNamespace(message="no such tool")
        trace = types.SimpleNamespace(reward=0.5, is_truncated=task == 1, errors=[error] if task == 2 else [],
            metrics={"served": len(served), "key": len(os.environ[context.client.settings["api_key_var"]])})
        return types.SimpleNamespace(ok=task != 2, errors=[], traces=[trace, trace])
def resolve_env_config(settings): return settings
def load_environment(settings): return Environment(settings)
"""


@contextlib.asynccontextmanager
async def harness(folder: Path, **files: str) -> AsyncIterator[VerifiersHarness]:
    install(folder, {"__init__": "", **files})
    table = {"environment": "sums", "venv": str(folder), "arguments": {"base": 7}, "processes": 1}
    made = VerifiersHarness(tables.build(Options, table, "rollout.options.harness_options"))
    try:
        yield made
    finally:
        await made.close()


def install(folder: Path, files: dict[str, str]) -> None:
    """Create a virtual environment with a package ``verifiers`` made of ``files``."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "verifiers").mkdir()
    for name, text in files.items():
        (site / "verifiers" / f"{name}.py").write_text(text)


def numbered(number: Any) -> Task:
    return Task(prompt="a task", metadata={"task": number})


@pytest.mark.parametrize("files", [{"__init__": CLASSIC}, {"v1": NEW}], ids=["0.2", "0.4"])
async def test_an_environment_plays_the_task_of_a_row(tmp_path: Path, files: dict[str, str]) -> None:
    async with harness(tmp_path, **files) as play:
        first, cut = [await play(numbered(number), ENDPOINT) for number in (0, 1)]
        assert (first.reward, first.finish_reason, cut.finish_reason) == (0.5, "", "length")
        assert first.metrics["key"] == len("key-of-this-sample")
        assert first.metrics.get("answer", 7.0) == 7.0 and cut.metrics.get("served", 1.0) == 1.0
        for number, problem in (
            (2, "raised RuntimeError: the environment failed: no such tool"),
            (3, "raised IndexError: the environment has 3 tasks, and the row asks for task 3"),
            ("0", "raised ValueError: the row does not say which task"),
        ):
            with pytest.raises(RolloutError, match=f"^harness verifiers: {problem}"):
                await play(numbered(number), ENDPOINT)


def test_a_venv_without_verifiers_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    for folder, problem in ((tmp_path, "has no verifiers"), (tmp_path / "none", "is not a virtual environment")):
        with pytest.raises(ConfigError, match=problem):
            Options(environment="sums", venv=str(folder))
