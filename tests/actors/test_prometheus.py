"""Each process serves Prometheus metrics of its actors; the learner also serves those of the newest step."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.actors.base import Actor
from asyncrl.actors.prometheus import PrometheusEndpoint, exposition
from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.config.metrics import MetricsSection
from asyncrl.errors import ConfigError
from asyncrl.metrics import schema
from tests.conftest import BUS_SIZES


class Worker(Actor):
    async def run(self) -> None: ...

    def numbers(self) -> dict[str, float]:
        return {"rollout/running": 3.0, "alarm/drop": 1.0}


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(**(BUS_SIZES | {"max_message_bytes": 2**20}))


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        found = listening.getsockname()[1]
    yield found


@asynccontextmanager
async def endpoint(bus: MemoryBus, port: int, directory: Path, name: str, **options: Any) -> AsyncIterator[Any]:
    made = PrometheusEndpoint(
        bus, Worker(name, bus), run="r", address=f"127.0.0.1:{port}", directory=directory, **options
    )
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def test_what_the_engines_server_serves_is_served_with_it(bus: MemoryBus, port: int, tmp_path: Path) -> None:
    async def server_metrics() -> str:
        return "sglang:num_running_reqs 7.0\n"

    async with endpoint(bus, port, tmp_path, "w0") as made:
        made._actors[0].server_metrics = server_metrics
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{made.port}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    assert "sglang:num_running_reqs 7.0" in lines
    assert any(line.startswith("asyncrl_rollout_running{") for line in lines)


async def test_learner_and_workers_of_a_machine_answer_side_by_side(bus: MemoryBus, port: int, tmp_path: Path) -> None:
    numbers = {"reward/mean": 0.5, "weights/w0/version": 3.0}
    async with (
        endpoint(bus, port, tmp_path, "learner", step_numbers=lambda: numbers) as learner,
        endpoint(bus, port, tmp_path, "w0") as first,
        endpoint(bus, port, tmp_path, "w1") as second,
        aiohttp.ClientSession() as session,
    ):
        assert learner.port == port < first.port < second.port
        targets = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "prometheus").glob("*.json")}
        assert targets["w1"] == [{"targets": [f"127.0.0.1:{second.port}"], "labels": {"run": "r", "actor": "w1"}}]
        texts = {}
        for one in (learner, first):
            async with session.get(f"http://127.0.0.1:{one.port}/metrics") as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                texts[one] = await answer.text()
        assert 'asyncrl_reward_mean{run="r",actor="learner"} 0.5\n' in texts[learner]
        assert "asyncrl_weights_w0_version" not in texts[learner]
        assert 'asyncrl_rollout_running{run="r",actor="w0"} 3.0\n' in texts[first]
        assert "asyncrl_reward_mean" not in texts[first]
    assert list((tmp_path / "prometheus").glob("*")) == []


async def test_a_port_in_use_is_said_and_ends_no_run(
    bus: MemoryBus, port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        async with endpoint(bus, port, tmp_path, "learner", step_numbers=dict) as learner:
            assert learner.port == 0
    assert f"metrics.prometheus: port {port} of 127.0.0.1 cannot be used" in caplog.text
    assert "learner serves no metrics" in caplog.text


def test_data_sets_tags_and_metrics_of_an_evaluation_are_labels() -> None:
    numbers = {
        "evaluation/aime/mean@8": 0.5,
        "evaluation/aime[number theory]/pass^2/low": 0.25,
        "evaluation/seconds": 3.0,
    }
    lines = exposition("r", (), numbers).splitlines()
    assert lines == [
        "# TYPE asyncrl_evaluation gauge",
        'asyncrl_evaluation{run="r",actor="learner",dataset="aime",tag="",metric="mean@8"} 0.5',
        'asyncrl_evaluation{run="r",actor="learner",dataset="aime",tag="number theory",metric="pass^2/low"} 0.25',
        f"# HELP asyncrl_evaluation_seconds {schema.SCHEMA['evaluation/seconds']}",
        "# TYPE asyncrl_evaluation_seconds gauge",
        'asyncrl_evaluation_seconds{run="r",actor="learner"} 3.0',
    ]


def test_categories_of_answers_are_labels() -> None:
    numbers = {"reward/category/no box": 0.5, "reward/category/日本": 0.25, "reward/style.category/late": 1.0}
    assert exposition("r", (), numbers).splitlines() == [
        "# TYPE asyncrl_reward_category gauge",
        'asyncrl_reward_category{run="r",actor="learner",part="",category="no box"} 0.5',
        'asyncrl_reward_category{run="r",actor="learner",part="",category="日本"} 0.25',
        'asyncrl_reward_category{run="r",actor="learner",part="style",category="late"} 1.0',
    ]


@pytest.mark.parametrize("address", ["9400", ":9400", "host", "host:0", "host:70000", "http://host:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="prometheus must be HOST:PORT"):
        MetricsSection(prometheus=address)
    assert MetricsSection(prometheus="[::1]:9400").prometheus
