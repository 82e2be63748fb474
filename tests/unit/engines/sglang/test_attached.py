"""Which weights a server has, and whose: a server that served another run, or another server at our port."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.engines.sglang import server as sglang_server
from asyncrl.engines.sglang.reply import EXPERTS_OPTION
from asyncrl.errors import ConfigError, EngineDied
from tests.harness.engines import PROMPT, Model
from tests.unit.engines.sglang.fake_server import SHORT, FakeServer, make_engine
from tests.unit.engines.sglang.test_reply import finished

UPDATE = "/update_weights_from_disk"


@pytest.mark.parametrize("left", ["0:12", "0:12:another0run"])
async def test_weights_of_another_run_are_replaced_before_anything_is_sampled(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path, left: str
) -> None:
    """Every run counts from 0:0, and announces no weights before its first step."""
    server, url = fake
    server.weight_version = left
    engine = make_engine(model, tmp_path / "log", url=url)
    await engine.start()
    assert engine.version == (0, 3)
    assert server.bodies(UPDATE)[0]["model_path"] == str(model.folder)
    assert server.paths.index(UPDATE) < server.paths.index("/generate")
    assert finished(await engine.generate(PROMPT, SHORT, seed=0))[1] == [(0, 3)]
    await engine.close()


async def test_a_server_started_on_another_model_loads_ours_first(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stamp says nothing: "default", or its owner's --weight-version."""
    server, url = fake
    for served in ("/models/another", ""):
        server.weight_version, server.model_path = "default", served
        engine = make_engine(model, tmp_path / "log", url=url)
        await engine.start()
        assert server.bodies(UPDATE)[-1]["model_path"] == server.model_path == str(model.folder)
        assert server.paths.index(UPDATE) < server.paths.index("/generate")
        await engine.close()
    assert len(server.bodies(UPDATE)) == 2
    assert "has the weights of /models/another; it loads model.path" in caplog.text


async def test_a_server_that_keeps_the_weights_of_another_run_is_not_used(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path
) -> None:
    server, url = fake
    server.weight_version, server.update_status = "0:12", 400
    with pytest.raises(EngineDied, match=r"another run or worker \(0:12\), and cannot load model.path; restart it"):
        await make_engine(model, tmp_path / "log", url=url).start()
    assert "/generate" not in server.paths


async def test_another_worker_that_loads_weights_into_the_server_is_noticed(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, url = fake
    one, other = (make_engine(model, tmp_path / name / "log", url=url) for name in ("one", "other"))
    await one.start()
    await one.load(model.version(5))
    stamp = server.weight_version
    await other.start()
    assert f"the server at {url} has weights of another run or worker ({stamp}); it loads model.path" in caplog.text
    assert other.version == (0, 3)
    with pytest.raises(EngineDied, match=f"SGLang server at {url}: `asyncrl evaluate`, .* Give each worker a server"):
        await one.generate(PROMPT, SHORT, seed=0)
    await one.close()
    await other.close()


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "exit('address already in use')"])
async def test_another_server_at_our_port_is_not_ours(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """It answers while ours still imports torch, or after ours has ended because the port was taken."""
    server, url = fake
    monkeypatch.setattr(sglang_server, "find_free_port", lambda: int(url.rpartition(":")[2]))
    monkeypatch.setattr(sglang_server, "server_command", lambda *_, **__: [sys.executable, "-c", program])
    with pytest.raises(EngineDied, match="not the one started here|has ended"):
        await make_engine(model, tmp_path / "log").start()
    assert "/generate" not in server.paths


async def test_a_server_that_does_not_say_what_it_sampled_from_is_refused_at_the_start_if_the_run_cuts_tokens(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path
) -> None:
    server, url = fake
    server.weight_version = "default"
    with pytest.raises(ConfigError, match="rollout.top_p, top_k: this SGLang does not say"):
        await make_engine(model, tmp_path / "log", url=url, others={"reports_support": True}).start()
    (asked,) = server.bodies("/generate")
    assert asked["return_sampling_mask"] is True
    assert asked["sampling_params"]["top_k"] == 2


async def test_an_old_server_is_refused_before_it_is_asked_for_experts_that_it_cannot_report(
    fake: tuple[FakeServer, str], tmp_path: Path
) -> None:
    server, url = fake
    server.info = {EXPERTS_OPTION.replace("-", "_"): True}
    mixture = Model(tmp_path / "model", seed=0, architecture="mixtral")
    with pytest.raises(ConfigError, match=rf"{url}: SGLang 0.5.16 cannot report .* install 0.5.22 or later; or use"):
        await make_engine(mixture, tmp_path / "log", url=url, others={"reports_experts": True}).start()
    assert "/generate" not in server.paths


async def test_a_server_with_a_draft_model_is_refused_and_says_that_versions_have_none(
    fake: tuple[FakeServer, str], model: Model, tmp_path: Path
) -> None:
    server, url = fake
    server.info = {"speculative_algorithm": "EAGLE"}
    with pytest.raises(ConfigError, match=rf"{url} samples with a draft model \(EAGLE\), which versions do not have"):
        await make_engine(model, tmp_path / "log", url=url).start()
    assert UPDATE not in server.paths
