"""The weights benchmark's engine records the time of each request of a load; only the server is fake."""

from __future__ import annotations

from pathlib import Path

from aiohttp import test_utils

from asyncrl.engines.sglang.engine import Options
from benchmarks.gpu.timed_engine import TimedEngine
from tests.harness.engines import Model
from tests.unit.engines.sglang.test_engine import FakeServer


async def test_a_load_takes_the_seconds_of_its_control_requests(tmp_path: Path) -> None:
    model = Model(tmp_path / "model", seed=0)
    async with test_utils.TestServer(FakeServer().application) as running:
        options = Options(url=str(running.make_url("")).rstrip("/"))
        engine = TimedEngine(
            model.folder, device="cpu", dtype="float32", version=(0, 0), options=options, log_path=tmp_path / "log"
        )
        await engine.start()
        engine.stages()
        await engine.load(model.version(1))
        stages = engine.stages()
        assert list(stages) == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert all(0 < median <= worst for median, worst in stages.values())
        assert engine.stages() == {}
        assert engine.version == (0, 1)
        await engine.close()
