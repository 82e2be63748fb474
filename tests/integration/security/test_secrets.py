"""Secrets are never shown, and received data is never executed: neither unpickled nor evaluated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl import config
from asyncrl.bus.jetstream.credentials import Credentials
from asyncrl.config.addresses import without_secrets
from asyncrl.config.record import as_table
from asyncrl.data import demo_task
from asyncrl.launch.summary import summarize
from asyncrl.metrics.sinks import open_sinks
from asyncrl.metrics.wandb import WandB
from tests.harness.command import RUN_FILE
from tests.harness.forked import LAUNCHER, ForkServer
from tests.harness.roles import Server

PACKAGE = Path(asyncrl.__file__).parent
SECRET = "hunter2-hunter2"

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler"),
    *("torch.load", "np.load", "numpy.load", "yaml.load", "dist.broadcast_object_list", "dist.all_gather_object"),
    *("dist.gather_object", "dist.scatter_object_list", "dist.recv_object_list", "dist.send_object_list"),
}
"""torch.load is allowed with weights_only=True. np.load of plain arrays would also be safe, but is not needed."""


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            is_plain = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
            if called in FORBIDDEN_CALLS | FORBIDDEN_METHODS and not (called == "torch.load" and is_plain):
                yield called
            if any(word.arg == "trust_remote_code" and ast.unparse(word.value) != "False" for word in node.keywords):
                yield "trust_remote_code"
            if called.endswith("connection.recv"):  # multiprocessing's recv, which unpickles
                yield called


def test_nothing_is_unpickled_or_evaluated() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {offence}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for offence in offences(ast.parse(path.read_text()))
    ]
    # The first runs a model's code if the run file says so; one writes what SGLang reads; the last uses an unpickler
    # that only knows the classes of the format.
    assert found == [
        "data/tokenizer.py: trust_remote_code",
        "engines/sglang/loader.py: pickle",
        "tensors/torch_dist.py: pickle",
    ]


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from torch import x; torch.load(f)", "eval(x)", "connection.recv()", "a(trust_remote_code=1)"],
)
def test_the_look_for_it_finds_it(code: str) -> None:
    assert list(offences(ast.parse(code)))


# -- secrets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "left"),
    [
        (f"nats://user:{SECRET}@host:4222", "nats://host:4222"),
        (f"tls://{SECRET}@host", "tls://host"),
        (f"nats://user:a@{SECRET}@host", "nats://host"),
        (f"nats://user:{SECRET}#x@host", "nats://host"),
        ("nats://host:4222", "nats://host:4222"),
        (f"nats://user:{SECRET}@a:1,nats://u:{SECRET}@b:2", "nats://a:1,nats://b:2"),
        (f"nats://user:a,{SECRET}@a:1, tls://{SECRET},x@b:2", "nats://a:1,tls://b:2"),
    ],
)
def test_a_url_is_shown_without_user_and_password(url: str, left: str) -> None:
    assert without_secrets(url) == left


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


def written(folder: Path, *lines: str) -> Path:
    path, text = folder / "run.toml", RUN_FILE.format(directory=folder)
    if "[reward]" in lines:
        text = text.replace('[reward]\nkind = "asyncrl.data.demo_task:reward"\n', "")
    path.write_text(text + "\n".join(lines) + "\n")
    return path


WITH_SECRETS = (
    *("[bus]", f'url = "nats://user:{SECRET}@127.0.0.1:4222"', f'token = "{SECRET}"'),
    f'options = {{password = "{SECRET}"}}',
    *(
        "[reward]",
        'kind = "remote"',
        f'options.url = "https://user:{SECRET}@rewards.example.org/score?api_key={SECRET}"',
    ),
    f'options.headers = {{Authorization = "Bearer {SECRET}", X-Team = "{SECRET}"}}',
)
"""Secrets of a run file; bus.options belong to another kind of bus."""


def test_check_shows_no_secret(folder: Path) -> None:
    path = written(folder, *(line for line in WITH_SECRETS if "password" not in line))
    said = str(summarize(config.load(path)))
    assert SECRET not in said
    assert 'headers = {Authorization = "***", X-Team = "***"}' in said
    assert "https://rewards.example.org/score?api_key=***" in said


def test_what_is_recorded_of_a_run_has_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its history, on its bus, and in W&B."""
    noted: list[Any] = []
    monkeypatch.setattr(WandB, "__init__", lambda self, **named: noted.append(named))
    more = ("[metrics]", "wandb = true", "[learner.options]", f'apiKey = "{SECRET}"')
    run = config.load(written(folder, *WITH_SECRETS, *more))
    open_sinks(run, resume=False)[0].close()
    assert noted and noted[0]["config"]["reward"]["options"]["headers"]["X-Team"] == "***"
    assert SECRET not in repr((noted, as_table(run)))


def test_nothing_that_python_prints_of_a_run_has_a_secret(folder: Path) -> None:
    path = written(folder, *(line for line in WITH_SECRETS if "password" not in line))
    run = asyncrl.Run.from_file(path, overrides={"bus.address": f"nats://{SECRET}@127.0.0.1:4222"})
    checked = run.check()
    assert str(checked) == str(summarize(run.settings))
    for shown in (run, run.settings, run.settings.bus, checked, [checked]):
        assert SECRET not in f"{shown} {shown!r}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        f"bus.url=http://user:{SECRET}@host",
        f"bus.url=nats://user:{SECRET}@127.0.0.1:1",
        f"bus.url=nats://user:{SECRET}#@127.0.0.1:1",
        f"bus.token=['{SECRET}']",
        f"bus.url=['nats://user:{SECRET}@127.0.0.1:1']",
    ],
)
def test_no_mistake_is_answered_with_a_secret(folder: Path, override: str, forks: ForkServer) -> None:
    command = ["rollout-worker", str(written(folder)), "--set", override, "--set", "bus.connect_seconds=0.3"]
    code, said = forks.call(*command, environment={"ASYNCRL_BUS_TOKEN": SECRET})
    assert code in (1, 2)  # 1: nobody answers there
    assert said.startswith("asyncrl: ")
    assert SECRET not in said
    assert all(SECRET not in log.read_text() for log in folder.rglob("*.log"))


def test_who_we_are_is_written_without_our_token() -> None:
    assert SECRET not in repr(Credentials(token=SECRET))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_on_a_server_with_roles_writes_no_secret_anywhere(
    folder: Path, tmp_path: Path, forks: ForkServer
) -> None:
    server = Server(tmp_path / "server")
    path = written(folder, "[bus]", f'url = "nats://127.0.0.1:{server.port}"')
    try:
        code, shown = forks.call(
            *("run", str(path), "--set", "run.name=mine", "--set", "run.steps=2", "--set", LAUNCHER),
            *("--set", f"bus.credentials={server.directory}/mine/{{role}}"),
            environment={"OMP_NUM_THREADS": "1"} | forks.environment,
        )
    finally:
        server.close()
    assert code == 0, shown
    assert "done: 2 steps" in shown
    files = [file for file in (folder / "runs" / "mine").rglob("*") if file.is_file()]
    said = [shown, *(file.read_bytes().decode(errors="replace") for file in files)]
    passwords = [
        (server.directory / "mine" / role).read_text().split(":")[1].strip() for role in ("learner", "workers/w0")
    ]
    assert {"learner.log", "w0.log"} <= {file.name for file in files}
    assert not any(password in text for password in passwords for text in said)
