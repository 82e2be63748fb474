"""What a run starts: processes, their environment and constraints, and the delays of restarts."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.backends.megatron.rank_group import rank_from_environment
from asyncrl.bus.port import Bus
from asyncrl.cli import demo
from asyncrl.data import demo_task
from asyncrl.errors import ConfigError, NoRoom
from asyncrl.launch import colocated
from asyncrl.launch.processes import gpus, process_specs
from asyncrl.launch.processes.child_process import HEALTHY_SECONDS, RestartPolicy
from asyncrl.launch.processes.one_process import run_in_one_process
from asyncrl.launch.processes.process_specs import ProcessSpecs
from asyncrl.os_process import environment_of_child
from asyncrl.tensors.device import GpuMemory
from tests import ROOT
from tests.harness.fleet import Launcher
from tests.unit.launch.checks.test_run_file import RUN_FILE


def test_ranks_on_several_machines_have_placement_constraints(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    overrides = ("backend=megatron", "ranks=4", "pipeline_parallel=2", "machines=2")
    run = config.load(tmp_path / "run.toml", [f"learner.{override}" for override in overrides])
    made = ProcessSpecs(run, launcher=Launcher(), common=(), environment={}).initial(size=None, resume=False)
    ranks = [child.spec for child in made if child.name.startswith("learner")]
    assert [(spec.name, spec.beside, spec.apart, spec.meets) for spec in ranks] == [
        ("learner", "", ("learner-2",), "learner"),
        ("learner-1", "learner", (), "learner"),
        ("learner-2", "", ("learner",), "learner"),
        ("learner-3", "learner-2", (), "learner"),
    ]


def test_an_engine_of_several_machines_has_a_process_on_each_with_its_share_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    overrides = ["engine.kind=sglang", "engine.device=auto", "engine.options={tensor_parallel=4, machines=2}"]
    run = config.load(tmp_path / "run.toml", overrides)
    monkeypatch.setattr(gpus, "num_gpus", lambda: 4)
    specs = ProcessSpecs(run, launcher=Launcher(), common=("run.toml",), environment={})
    made = [child.spec for child in specs.initial(size=None, resume=False) if child.name.startswith("w")]
    assert [(spec.name, spec.role, spec.gpus, spec.num_gpus, spec.apart, spec.meets) for spec in made] == [
        ("w0", "rollout-worker", (0, 1), 2, ("w0-node1",), "w0"),
        ("w0-node1", "engine-node", (2, 3), 2, ("w0",), "w0"),
    ]
    assert made[1].arguments == ("engine-node", "run.toml", "--worker", "w0", "--name", "w0-node1")
    assert made[0].environment["MASTER_ADDR"] == "127.0.0.1"  # Ray sets that of the worker's machine
    assert made[0].environment["MASTER_PORT"] == made[1].environment["MASTER_PORT"]
    with pytest.raises(NoRoom, match="are started with the run"):
        specs.new_worker("w1", frozenset())


@pytest.mark.parametrize(
    ("num_gpus", "overrides", "beside"),
    [
        (1, ["rollout.workers=1"], ["1"]),  # one GPU is enough, and no key says so
        (1, ["rollout.workers=2"], ["2", "2"]),
        (2, ["rollout.workers=1"], [""]),
        (2, ["rollout.workers=2", "rollout.gpus=[0, 1]"], ["1", ""]),
        (1, ["rollout.workers=1", "run.colocated=true", "run.mode=sync"], [""]),  # in turns, each has the whole GPU
    ],
    ids=["one GPU", "two engines on one GPU", "a GPU each", "the learner's GPU samples too", "in turns"],
)
def test_an_engine_on_the_learners_gpu_takes_what_the_learner_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int, overrides: list[str], beside: list[str]
) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    run = config.load(tmp_path / "run.toml", ["learner.device=auto", "engine.device=auto", *overrides])
    monkeypatch.setattr(gpus, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(colocated, "limits_learner", lambda _, workers: bool(workers))
    made = ProcessSpecs(run, launcher=Launcher(), common=(), environment={}).initial(size=None, resume=False)
    words = [child.spec.arguments for child in made if child.name.startswith("w")]
    assert [one[one.index("--beside-learner") + 1] if "--beside-learner" in one else "" for one in words] == beside
    assert ("--beside-engines" in made[0].spec.arguments) == any(beside)


def test_a_new_worker_that_gets_a_name_again_is_beside_no_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    overrides = ["learner.device=auto", "engine.device=auto", "rollout.workers=2", "rollout.gpus=[1, 0, 2]"]
    run = config.load(tmp_path / "run.toml", overrides)
    for its in (gpus, process_specs):
        monkeypatch.setattr(its, "num_gpus", lambda: 3)
    specs = ProcessSpecs(run, launcher=Launcher(), common=(), environment={})
    (w1,) = [child.spec for child in specs.initial(size=None, resume=False) if child.name == "w1"]
    assert w1.gpus == (0,) and "--beside-learner" in w1.arguments
    again = specs.new_worker("w1", frozenset({0, 1})).spec
    assert again.gpus == (2,) and "--beside-learner" not in again.arguments


@pytest.mark.parametrize(
    ("gib", "overrides", "remedy"),
    [
        (80, ["rollout.workers=1"], ""),
        (48, ["rollout.workers=1"], "use learner.micro_batch_tokens = 4096 or another GPU"),
        (48, ["rollout.max_new_tokens=16384"], 'use learner.options.recompute = "full" or another GPU'),
        (24, ["rollout.workers=1"], 'learner.lora.rank = 32 and learner.lora.publish = "adapter" and learner'),
        (24, ["rollout.workers=1", "learner.lora.rank=32"], 'use learner.lora.publish = "adapter" and learner'),
        (24, ["rollout.workers=1", "weights.quantization=fp8"], "use another GPU"),
        (24, ["rollout.workers=1", "weights.channel=nccl"], "use another GPU"),
        (12, ["rollout.workers=1"], "use another GPU"),
        (80, ["rollout.workers=5"], "or fewer engines on this GPU"),
        (24, ["rollout.workers=1", "engine.options={server_arguments={mem-fraction-static=0.3}}"], ""),
        (24, ["rollout.workers=1", "run.colocated=true", "run.mode=sync"], ""),
        (
            12,
            ["rollout.workers=1", "run.colocated=true", "run.mode=sync", "run.offload=learner"],
            'run.offload = "both"',
        ),
    ],
)
def test_an_engine_that_finds_no_room_beside_the_learner_is_refused_with_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, overrides: list[str], remedy: str
) -> None:
    """Qwen3-0.6B: the learner may need 50 GiB, 26 in smaller rows, 10 with recomputation and adapters, an engine 13."""
    run = of_qwen(tmp_path, monkeypatch, *overrides, gib=gib)
    with contextlib.ExitStack() as stack:
        if remedy:
            stack.enter_context(pytest.raises(ConfigError, match=re.escape(remedy)))
        assert gpus.placement(run).workers == ((0,),)


@pytest.mark.parametrize("gib", [24, 30, 36, 48])
@pytest.mark.parametrize(
    "overrides",
    [[], ["learner.lora.rank=32"], ["rollout.max_new_tokens=8192"], ["learner.options={offload_optimizer=true}"]],
)
def test_the_settings_that_are_named_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, overrides: list[str]
) -> None:
    with pytest.raises(ConfigError, match="use") as refused:
        gpus.placement(of_qwen(tmp_path, monkeypatch, *overrides, gib=gib))
    remedy = str(refused.value).partition("; use ")[2].partition(" or ")[0]
    named = [item.replace(" = ", "=") for item in remedy.split(" and ")]
    assert gpus.placement(of_qwen(tmp_path, monkeypatch, *overrides, *named, gib=gib)).workers == ((0,),)


@pytest.mark.parametrize("adapters", [[], ["learner.lora.rank=32"]])
def test_adapters_are_offered_only_where_the_engine_finds_room_for_its_own_copies_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapters: list[str]
) -> None:
    """For its copies of adapters an engine reserves 0.3 GiB more than without."""
    remedies = ["learner.lora.rank=32", "learner.lora.publish=adapter", "learner.options.recompute=full"]
    remedies += ["learner.micro_batch_tokens=4096"]
    own = of_qwen(tmp_path, monkeypatch, *remedies, gib=80)
    learner = registry.backend_class(own).gpu_bytes(own, registry.algorithm(own), total=24 * 2**30)
    needed = learner + registry.engine_class(own).gpu_bytes(own)
    for total, is_offered in ((needed, True), (needed - 2**20, False)):
        run = of_qwen(tmp_path, monkeypatch, *adapters, gib=80)
        with pytest.raises(ConfigError, match="use") as refused:
            colocated.engine_share(run, num_engines=1, gpu_bytes=total)
        assert ('learner.lora.publish = "adapter"' in str(refused.value)) == is_offered


@pytest.mark.parametrize(
    ("gib", "overrides", "are_offered"),
    [
        (60, [], True),
        (48, [], False),  # the learner does not fit alone
        (60, ["engine.options={tensor_parallel=2}", "rollout.gpus=[0,1]"], True),
        (60, ["engine.options={tensor_parallel=2}"], False),  # the learner has one GPU
    ],
)
def test_turns_are_offered_where_they_are_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, overrides: list[str], are_offered: bool
) -> None:
    num_gpus = 2 if overrides else 1
    with pytest.raises(ConfigError, match="use") as refused:
        gpus.placement(of_qwen(tmp_path, monkeypatch, *overrides, gib=gib, num_gpus=num_gpus))
    assert ("turns (run.colocated" in str(refused.value)) == are_offered


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (["rollout.workers=2"], True),
        (["rollout.workers=2", "rollout.gpus=[0, 1]"], False),
        (["rollout.workers=2", "engine.options={server_arguments={mem-fraction-static=0.4}}"], False),
        (["rollout.workers=2", "rollout.gpus=[0]", "run.colocated=true", "run.mode=sync"], True),
        (["rollout.workers=2", "rollout.gpus=[0]"], False),  # beside the learner each has half of what it leaves
    ],
)
def test_engines_that_would_each_take_all_of_one_gpu_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], is_refused: bool
) -> None:
    """On two GPUs: the second server would find no memory, or start with what the first one left by chance."""
    run = of_qwen(tmp_path, monkeypatch, *overrides, gib=80, num_gpus=2)
    problem = pytest.raises(ConfigError, match="rollout.gpus: the engine of w0 would share GPU . with another")
    with problem if is_refused else contextlib.nullcontext():
        gpus.placement(run)


@pytest.mark.parametrize("num_gpus", [1, 2, 3])
def test_the_two_servers_of_the_demo_find_room_on_any_number_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: int
) -> None:
    monkeypatch.setattr(demo, "num_gpus", lambda: num_gpus)
    own = (*demo.ENGINES["sglang"](), "rollout.workers=2")
    placed = gpus.placement(of_qwen(tmp_path, monkeypatch, *own, gib=80, num_gpus=num_gpus))
    assert len(placed.workers) == 2


def test_an_engine_that_takes_all_that_the_learner_leaves_shares_its_gpu_with_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = [f"servers.judge.path={tmp_path / 'model'}", "servers.judge.gpus=[0]", "rollout.gpus=[0]"]
    with pytest.raises(ConfigError, match="judge.gpus: on GPU 0 the engine of w0 takes all that the learner leaves"):
        gpus.placement(of_qwen(tmp_path, monkeypatch, *judge, gib=141))
    own = "engine.options={server_arguments={mem-fraction-static=0.2}}"
    assert gpus.placement(of_qwen(tmp_path, monkeypatch, *judge, own, gib=141)).servers == {"judge": (0,)}


def test_an_engine_on_the_learners_gpu_reserves_its_weights_in_their_format_adapters_and_a_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """28 layers of 15.7M numbers, of which 8 bits save one byte each; a row of A and a column of B have 22,528 each."""

    def least(*overrides: str) -> int:
        run = of_qwen(tmp_path, monkeypatch, *overrides, gib=80)
        return registry.engine_class(run).gpu_bytes(run)

    adapters = "learner.lora={rank=16, publish='adapter'}"
    assert least() - least("weights.quantization=fp8") == pytest.approx(28 * 15.73e6, rel=1e-3)
    assert least(adapters) - least() == 2 * 16 * 8 * 28 * 22_528
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"0" * 5000)
    draft = f'{{speculative-algorithm="EAGLE3", speculative-draft-model-path="{tmp_path / "draft"}"}}'
    assert least(f"engine.options.server_arguments={draft}") - least() == 5000


def of_qwen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, gib: int, num_gpus: int = 1
) -> config.RunConfig:
    """Return a run of Qwen3-0.6B on GPUs of ``gib`` GiB."""
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    of_gpus = ["learner.device=auto", "engine.kind=sglang", "engine.device=auto", "learner.backend=megatron"]
    monkeypatch.setattr(gpus, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(colocated, "read_gpu_memory", lambda: GpuMemory(total=gib * 2**30, free=0))
    matrices = {"q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048)}
    matrices |= {"gate": (3072, 1024), "up": (3072, 1024), "down": (1024, 3072)}
    shapes = {f"model.layers.{n}.x.{name}_proj.weight": one for n in range(28) for name, one in matrices.items()}
    shapes["model.embed_tokens.weight"] = (151_936, 1024)
    monkeypatch.setattr("asyncrl.engines.sglang.engine.read_shapes", lambda _: shapes)
    monkeypatch.setattr("asyncrl.backends.gpu_memory.read_shapes", lambda _: shapes)
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151_936}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    monkeypatch.setattr("asyncrl.backends.gpu_memory.decoder_config", lambda _: sizes)
    return config.load(tmp_path / "run.toml", [*of_gpus, "rollout.workers=1", "model.dtype=bfloat16", *overrides])


def test_an_engine_of_ones_own_is_told_what_the_learner_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the least that it reserves."""

    class Engine:
        taken = 0

        def limit_memory(self, num_bytes: int) -> None:
            self.taken = num_bytes

    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    run = config.load(tmp_path / "run.toml")
    monkeypatch.setattr(colocated, "read_gpu_memory", lambda: GpuMemory(total=80 * 2**30, free=0))
    engine: Any = Engine()
    colocated.limit_memory(run, engine, num_engines=2)
    learner = registry.backend_class(run).gpu_bytes(run, registry.algorithm(run))
    assert engine.taken == (80 * 2**30 - learner) // 2


@pytest.mark.parametrize(
    ("overrides", "workers", "is_limited"),
    [
        ((), ("w0",), True),
        ((), (), False),
        (("engine.options.server_arguments.mem-fraction-static=0.3",), ("w0",), False),  # the user's own share
        ((), ("long-0",), False),  # the pool's
        ((), ("w0", "long-0"), True),
        (("run.mode=sync", "run.colocated=true", "run.offload=engines"), ("w0",), False),  # gone during the steps
        (("run.mode=sync", "run.colocated=true", "run.offload=learner"), ("w0",), True),
    ],
)
def test_a_learner_is_limited_where_engines_take_what_it_is_estimated_to_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    workers: tuple[str, ...],
    is_limited: bool,
) -> None:
    monkeypatch.setattr("asyncrl.engines.sglang.engine.SGLangEngine.num_gpus", lambda _: 1)
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    pool = "rollout.pools.long={options={server_arguments={mem-fraction-static=0.3}}}"
    run = config.load(tmp_path / "run.toml", ["engine.kind=sglang", pool, *overrides])
    assert colocated.limits_learner(run, workers) == is_limited


def test_a_limited_learner_keeps_little_more_than_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        kept = 0

        def limit_memory(self, num_bytes: int) -> None:
            self.kept = num_bytes

    backend: Any = Backend()
    run: Any = None
    monkeypatch.setattr(colocated, "_learner_bytes", lambda _: 20 * 2**30)
    colocated.limit_learner(run, backend)
    assert backend.kept == 20 * 2**30 + colocated.KEPT_BYTES


def test_servers_and_pools_of_workers_are_processes_of_their_own_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    overrides = [
        "learner.device=auto",
        "engine.kind=sglang",
        "engine.device=auto",
        "run.mode=sync",
        "run.colocated=true",
        f"servers.judge.path={tmp_path / 'model'}",
        "servers.judge.options={tensor_parallel=2}",
        "servers.far.url=http://h/v1",
        "rollout.pools.long={options={tensor_parallel=2}}",
    ]
    run = config.load(tmp_path / "run.toml", overrides)
    monkeypatch.setattr(gpus, "num_gpus", lambda: 8)
    made = ProcessSpecs(run, launcher=Launcher(), common=("run.toml",), environment={}).initial(size=None, resume=False)
    specs = {child.name: child.spec for child in made}
    assert list(specs)[:2] == ["learner", "judge"] and "far" not in specs
    assert specs["judge"].arguments == ("model-server", "run.toml", "--name", "judge")
    assert (specs["judge"].gpus, specs["judge"].num_gpus) == ((1, 2), 2)
    assert specs["w0"].gpus == (0,) and "--own-gpus" not in specs["w0"].arguments
    assert (specs["long-0"].gpus, specs["long-0"].num_gpus) == ((3, 4), 2)
    assert specs["long-0"].arguments[2:] == ("--pool", "long", "--own-gpus", "--name", "long-0")
    assert [child.name for child in made if child.spec.role == "rollout-worker" and child.is_scaled] == ["w0"]


@pytest.mark.parametrize("machines", [1, 2])
def test_learner_does_not_join_the_job_of_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machines: int
) -> None:
    """The surroundings are those of the first of 16 processes under torchrun."""
    demo_task.write(tmp_path)
    (tmp_path / "run.toml").write_text(RUN_FILE.format(folder=tmp_path))
    surroundings = {"WORLD_SIZE": "16", "RANK": "0", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}
    for name, value in (surroundings | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    run = config.load(
        tmp_path / "run.toml", ["learner.backend=megatron", "learner.ranks=2", f"learner.machines={machines}"]
    )
    made = ProcessSpecs(run, launcher=Launcher(), common=(), environment={}).initial(size=None, resume=False)
    ranks = [environment_of_child(child.spec.environment) for child in made if child.name.startswith("learner")]
    infos = [rank_from_environment(one, ranks=2, timeout_seconds=60.0) for one in ranks]
    assert [one and (one.host, one.has_agent) for one in infos] == (
        [None] if machines == 1 else [("127.0.0.1", False)] * 2
    )


async def test_sets_the_environment_of_the_weight_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it uses a GPU: NCCL reads its settings once."""
    run = config.load(ROOT / "examples" / "demo.toml", ["weights.channel=nccl", f"run.directory={tmp_path}"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("NCCL_CUMEM_ENABLE", None)
    found: list[str | None] = []

    async def no_bus(run: config.RunConfig) -> Bus:
        found.append(os.environ.get("NCCL_CUMEM_ENABLE"))
        raise ConfigError("no bus")

    monkeypatch.setattr(registry, "own_bus", no_bus)
    with pytest.raises(ConfigError, match="no bus"):
        await run_in_one_process(run, resume=False, owns_process=False)
    assert found == ["0"]


@pytest.mark.parametrize(
    ("restarts", "uptimes", "delays"),
    [
        (2, [1.0] * 3, [0.0, 1.0, None]),
        (100, [1.0] * 8, [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (2, [20.0] * 3, [0.0, 0.0, None]),
        (9, [*[1.0] * 3, 20.0, 1.0], [0.0, 1.0, 2.0, 0.0, 0.0]),
        # it was up for long and has all its restarts again
        (1, [20.0, HEALTHY_SECONDS, 20.0], [0.0, 0.0, None]),
    ],
    ids=["budget", "back-off", "works and dies", "starts again", "healthy"],
)
def test_delays_of_restarts(restarts: int, uptimes: list[float], delays: list[float | None]) -> None:
    policy = RestartPolicy(restarts)
    assert [policy.next_delay(uptime) for uptime in uptimes] == delays


def test_free_restarts_back_off_and_are_not_counted() -> None:
    policy = RestartPolicy(1)
    assert [policy.next_delay(1.0, is_free=True) for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]
    assert [policy.next_delay(1.0) for _ in range(2)] == [8.0, None]


def test_a_process_that_hangs_in_every_start_uses_up_its_restarts() -> None:
    policy = RestartPolicy(2)
    delays = [policy.next_delay(2 * HEALTHY_SECONDS, has_worked=False) for _ in range(3)]
    assert delays == [0.0, 1.0, None]
