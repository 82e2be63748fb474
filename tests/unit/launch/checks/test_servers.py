"""What is refused of [servers.NAME], of what asks them by name, and of pools of workers, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tiny_model
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import summarize
from asyncrl.planning.plan import plan
from tests.unit.launch.checks.test_run_file import RUN_FILE

OPD = ("algorithm.name=opd", "rollout.group_size=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    demo_task.write(path)
    (path / "run.toml").write_text(RUN_FILE.format(folder=path).replace('"megatron"', '"reference"'))
    make_tiny_model(path / "other", architecture="qwen3", seed=0)
    return path


def load(folder: Path, *overrides: str) -> config.RunConfig:
    return config.load(folder / "run.toml", [item.replace("FOLDER", str(folder)) for item in overrides])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["servers.judge={}"], "servers: judge: set either path, .* or url"),
        (["servers.judge={path='a', url='http://h/v1'}"], "set either path"),
        (["servers.judge={kind='openai', path='a'}"], 'kind = "openai" needs the url'),
        (["servers.judge={url='h:1'}"], "url must start with http"),
        (["servers.judge={url='http://me:hunter2@h:99999/v1'}"], "url must be http://HOST:PORT, got 'http://h:9"),
        (["servers.judge={url='http:///v1'}"], "url must be http://HOST:PORT"),
        (["servers.learner-swap1={path='a'}"], "'learner-swap1' is the name of another process"),
        (["servers.judge={url='http://h/v1', gpus=[1]}"], "gpus is of a server that the run starts"),
        (["servers.w0={path='a'}"], "servers: 'w0' is the name of another process"),
        (["servers.long-0={path='a'}", "rollout.pools.long={}"], "servers: 'long-0' is the name of another process"),
        (["servers.'a b'={path='a'}"], "servers: a name must be letters"),
        (["rollout.pools.long={workers=0}"], "workers must be >= 1"),
        (["rollout.pools.learner={}"], "rollout.pools: 'learner' is the name of another process"),
        (["teacher.path=a", "teacher.server=b"], "set either path, .* or server"),
        (["teacher.server="], "set either path, .* or server"),
    ],
)
def test_a_section_that_means_nothing_is_refused(folder: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(folder, *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["servers.judge.path=FOLDER/none"], "servers.judge.path: "),
        (
            ["servers.judge={path='FOLDER/model', kind='sglan'}"],
            "servers.judge.kind: 'sglan' is unknown; did you mean 'sglang'",
        ),
        (["servers.judge={path='FOLDER/model', kind='json:dumps'}"], "servers.judge.kind: 'json:dumps' is no server"),
        (
            ["servers.judge={path='FOLDER/model', options={server_arguments={port=1}}}"],
            "servers.judge.options: server_arguments: 'port' is set by asyncrl",
        ),
        (
            ["servers.judge={path='FOLDER/model', options={server_arguments={api-key='k'}}}"],
            "servers.judge.options: server_arguments: 'api-key' is set by asyncrl",
        ),
        (
            ["servers.judge={path='FOLDER/model', options={server_arguments={disaggregation-mode='prefill'}}}"],
            "name its router in servers.NAME.url",
        ),
        (
            [
                "servers.judge={path='FOLDER/model', device='cpu'}",
                "servers.judge.options.server_arguments={enable-hierarchical-cache=true}",
            ],
            "servers.judge.options: server_arguments: enable-hierarchical-cache keeps",
        ),
        (
            ["servers.judge={path='FOLDER/model', options={tensor_parallel=0}}"],
            "servers.judge.options: tensor_parallel",
        ),
        (
            ["reward.kind=llm_judge", "reward.options={server='jugde'}", "servers.judge.url=http://h/v1"],
            "no .servers.jugde.; there is judge",
        ),
        (
            ["rollout.function=agent", "rollout.options={harness='json:dumps', servers=['user']}", "reward.kind=none"],
            r"^rollout.options.servers: there is no \[servers.user\]$",
        ),
        ([*OPD, "teacher.server=big"], r"teacher.server: there is no \[servers.big\]"),
        ([*OPD, "teacher.server=big", "servers.big.url=http://h/v1", "rollout.temperature=0.7"], "at temperature 1"),
        (
            [*OPD, "teacher.server=big", "servers.big.url=http://h/v1", "rollout.top_p=0.9"],
            "gives logprobs over all tokens",
        ),
        (
            [*OPD, "teacher.server=big", "servers.big.path=FOLDER/other"],
            "servers.big.path: the tokenizer in .*other is not",
        ),
        (["rollout.pools.long.options={nothing=1}"], "rollout.pools.long: engine.options: unknown key 'nothing'"),
    ],
)
def test_a_server_that_cannot_work_is_refused_in_one_line(folder: Path, overrides: list[str], says: str) -> None:
    run = load(folder, *overrides)
    with pytest.raises(ConfigError, match=says) as refused:
        check(run)
    assert "\n" not in str(refused.value)


def test_check_shows_the_servers_and_no_key_of_theirs(folder: Path) -> None:
    run = load(folder, "servers.far={url='http://user:pass@h/v1', api_key='hush'}", *OPD, "teacher.server=far")
    shown = str(summarize(run))
    assert "[servers.far]" in shown and 'url = "http://h/v1"' in shown
    assert "hush" not in shown and "pass@" not in shown


def test_plan_leaves_the_gpus_of_servers_to_them(folder: Path) -> None:
    stub = "servers.judge={kind='tests.harness.stub_server:StubServer', path='FOLDER/model', gpus=[0]}"
    with pytest.raises(ConfigError, match=r"--gpus 2: learner and engine share the GPUs, .* Give --gpus 3 at least"):
        plan(load(folder, stub), gpus=2, seconds=1.0, tells=lambda line: None)
