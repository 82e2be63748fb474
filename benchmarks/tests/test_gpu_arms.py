"""Every arm of the GPU benchmark is a run file, and its result is a row with the command that repeats it."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from benchmarks.gpu import arm, lengths, machines_rank, plans, shapes
from benchmarks.gpu.machines import message_in
from benchmarks.gpu.modes import arguments, assignments
from benchmarks.gpu.rows import command
from benchmarks.gpu.sweep import RUN_FILE, Scene
from tests import ROOT


def scene(directory: Path) -> Scene:
    options = arguments(["--set", "learner.micro_batch_tokens=1024"])
    return Scene(
        shape="0.6B",
        model=directory,
        data=directory / "prompts.jsonl",
        dtype="bfloat16",
        lengths=lengths.Lengths(mean=100.0, sigma=1.0, maximum=800, seed=3),
        gpus=4,
        groups_per_batch=64,
        group_size=8,
        max_staleness=4,
        running=256,
        channel="nccl",
        window_seconds=20.0,
        warmup=0,
        max_steps=60,
        limit_seconds=100.0,
        seed=0,
        settings=options.set,
        out=directory,
        scratch=directory,
        command="",
    )


@pytest.mark.parametrize("text", ["async@2+2", "async_drain@1+3", "one_step_off@2+2", "sync@3+1", "sync_colocated"])
def test_every_arm_is_a_run_file(text: str, tmp_path: Path) -> None:
    plan = plans.parse_arm(text, gpus=4)
    run = config.load(RUN_FILE, arm.settings(scene(tmp_path).overrides(plan)))
    assert run.max_staleness == {"async": 4, "one_step_off": 1, "sync": 0}[run.run.mode]
    assert run.load == {"async": "in_flight", "async_drain": "drain"}.get(plan.arm, "on_demand")
    assert run.weights.channel == ("files" if plan.is_colocated else "nccl")
    assert run.learner.micro_batch_tokens == 1024
    assert run.rollout.max_running * plan.workers >= 512


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_the_bus_has_room_for_every_group_and_the_experts_of_a_mixture(shape: str, tmp_path: Path) -> None:
    shapes.make_model(shapes.SHAPES[shape], tmp_path)
    overrides = scene(tmp_path).overrides(plans.parse_arm("async@2+2", gpus=4))
    room = arm.room_for_groups(config.load(RUN_FILE, arm.settings(overrides)), least_message_bytes=2**20)
    run = config.load(RUN_FILE, arm.settings(overrides | room))
    replay = registry.routing_replay(run)
    assert replay.is_on == (shape == "tiny-moe")
    group = registry.largest_group_bytes(run)
    assert group == run.largest_group_bytes + replay.num_bytes <= run.bus.max_message_bytes
    assert run.bus.max_log_bytes >= (run.window + run.run.steps * run.learner.groups_per_batch) * group


def test_an_arm_says_what_becomes_of_answers_that_get_too_old(tmp_path: Path) -> None:
    def run_of(text: str) -> config.RunConfig:
        return config.load(RUN_FILE, arm.settings(scene(tmp_path).overrides(plans.parse_arm(text, gpus=4))))

    plain, drop = run_of("async@1+3"), run_of("async_drop@1+3")
    assert (plain.staleness.waits, drop.staleness.waits) == (True, False)
    assert {plain.load, drop.load} == {"in_flight"}


def test_settings_reach_the_run_file_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[data]\npath = "d"\n')
    given = {"model.path": tmp_path, "learner.betas": [0.5, 0.9], "engine.options": {"a-b": True}, "run.steps": 7}
    run = config.load(file, arm.settings(given))
    assert (run.model.path, run.learner.betas, run.run.steps) == (str(tmp_path), (0.5, 0.9), 7)
    assert run.engine.options == {"a-b": True}


def test_options_of_the_command_line_are_toml() -> None:
    assert assignments(["a.b=3", "c=true", "d=word", 'e="3"']) == {"a.b": 3, "c": True, "d": "word", "e": "3"}
    with pytest.raises(ValueError, match="not KEY=VALUE"):
        assignments(["nonsense"])


def test_a_row_says_the_command_that_repeats_it_and_no_place_of_this_machine() -> None:
    given = ["--gpus", "4", "--json", "/there/rows.jsonl", "--arms", "async@1+3", "--out=/there", "--window", "15"]
    assert command("benchmarks.gpu.modes", given) == (
        "python -m benchmarks.gpu.modes --gpus 4 --arms async@1+3 --window 15"
    )


@pytest.mark.parametrize("rehearses", ["", "1"], ids=["gpus", "rehearsal"])
def test_every_arm_on_eight_gpus_is_a_command_that_its_benchmark_knows(
    rehearses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\nfor word in "$@" END; do echo "$word"; done >> {tmp_path}/words\n')
    stub.chmod(0o755)
    words = ["bash", "benchmarks/gpu/eight.sh", str(tmp_path / "out"), "9999", "peer"]
    environment = {**os.environ, "PYTHON": str(stub), "REHEARSE": rehearses, "ARMS": ""}
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    commands = [text.splitlines() for text in (tmp_path / "words").read_text().split("END\n")][:-1]
    assert len(commands) == (11 if rehearses else 12)
    for _, module, *given in commands:  # the first word is -m
        monkeypatch.setattr("sys.argv", [module, *given, "--unknown"])
        found = importlib.import_module(module)
        found = importlib.import_module(f"{module}.__main__") if hasattr(found, "__path__") else found
        with pytest.raises(SystemExit) as ended:
            found.main()
        assert (ended.value.code, capsys.readouterr().err.rpartition("error: ")[2]) == (
            2,
            "unrecognized arguments: --unknown\n",
        ), (module, given)


def test_a_rank_tells_in_one_write_as_the_ranks_of_a_machine_share_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    machines_rank.tell({"rank": 3})
    assert written == [f'{{"pid": {os.getpid()}, "rank": 3}}\n']
    assert message_in(f"unfinished{written[0]}") == {"pid": os.getpid(), "rank": 3}


def test_an_arm_that_fails_is_a_result_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = arm.run_arm(
        [],
        run_file=tmp_path / "missing.toml",
        overrides={},
        name="broken",
        learner_gpus=[],
        directory=tmp_path,
        limit_seconds=60.0,
        bus=arm.BusAddress(url="nats://127.0.0.1:1", token="secret"),
    )
    assert (result.ended, result.exit_code, result.rows) == ("failed", 2, [])
    assert result.problem.startswith("learner ended with exit code 2: asyncrl: ")
    assert "no such run file" in result.problem
    assert result.problem in capfd.readouterr().out


def test_a_half_written_row_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert arm.read_rows(file) == []
    file.write_text('{"step": 1}\n{"step": 2')
    assert arm.read_rows(file) == [{"step": 1}]
