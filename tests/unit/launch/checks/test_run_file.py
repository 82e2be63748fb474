"""`asyncrl check` refuses what the learner, an engine or a bus would refuse at its start, with the same functions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.adapters import registry
from asyncrl.config import RunConfig
from asyncrl.data import demo_task
from asyncrl.data.tiny_vision_model import make_tiny_vision_model
from asyncrl.engines.sglang import options as sglang_options
from asyncrl.environments.builtin import given
from asyncrl.environments.load import describe_rollout
from asyncrl.environments.port import Generate
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.summary import summarize
from asyncrl.messages import PromptGroup, Trajectory
from tests.harness.families import make_tiny_family

RUN_FILE = """
[run]
directory = "{folder}/runs"
[model]
path = "{folder}/model"
[data]
path = "{folder}/prompts.jsonl"
[engine]
kind = "inprocess"
device = "cpu"
[reward]
kind = "asyncrl.data.demo_task:reward"
[learner]
backend = "megatron"
device = "cpu"
groups_per_batch = 4
[rollout]
max_new_tokens = 8
"""

RunMaker = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's model and prompts."""
    path = tmp_path_factory.mktemp("task")
    demo_task.write(path)
    return path


@pytest.fixture
def make_run(folder: Path, tmp_path: Path) -> RunMaker:
    def made(*overrides: str) -> RunConfig:
        path = tmp_path / "run.toml"
        path.write_text(RUN_FILE.format(folder=folder))
        return config.load(path, overrides)

    return made


def changed_model(folder: Path, architecture: Any, **changes: Any) -> Path:
    make_tiny_family(folder, architecture=architecture)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
MODELS = {
    "sliding window": (
        "qwen2",
        {"use_sliding_window": True},
        "does not support Qwen2ForCausalLM with use_sliding_window",
    ),
    "attention bias": ("qwen3", {"attention_bias": True}, "does not support Qwen3ForCausalLM with attention_bias"),
    "mlp bias": ("llama", {"mlp_bias": True}, "does not support LlamaForCausalLM with mlp_bias"),
    "rope type": ("llama", {"rope_parameters": DYNAMIC}, "does not support LlamaForCausalLM with rope type 'dynamic'"),
}


@pytest.mark.parametrize("case", MODELS)
def test_refuses_a_model_that_the_backend_cannot_train(make_run: RunMaker, tmp_path: Path, case: str) -> None:
    architecture, changes, problem = MODELS[case]
    model = changed_model(tmp_path / "odd", architecture, **changes)
    run = make_run(f"model.path={json.dumps(str(model))}")
    with pytest.raises(ConfigError) as refused:
        check(run)
    assert problem in str(refused.value)
    with pytest.raises(ConfigError) as at_start:
        registry.backend(run).start()
    assert str(at_start.value) == str(refused.value)


def test_a_backend_that_cannot_reset_its_optimizer_is_refused(make_run: RunMaker) -> None:
    check(make_run("learner.reset_optimizer=true"))
    with pytest.raises(ConfigError, match=r'reset_optimizer: learner.backend = "none" cannot start its optimizer anew'):
        check(make_run("learner.reset_optimizer=true", "learner.backend=none"))


def test_own_routing_is_replayed_only_where_there_are_experts_and_several_steps(
    make_run: RunMaker, tmp_path: Path
) -> None:
    replay = "learner.options.replay_own_routing=true"
    with pytest.raises(ConfigError, match="replay_own_routing: several optimizer steps .* use learner.steps_per_batch"):
        check(make_run(replay))
    with pytest.raises(ConfigError, match="replay_own_routing: the model has no experts; remove it"):
        check(make_run(replay, "learner.steps_per_batch=2"))


def test_a_reference_that_is_not_loaded_is_not_refreshed(make_run: RunMaker) -> None:
    check(make_run("reference.refresh_steps=5", "reference.kl_coef=0.1"))
    with pytest.raises(ConfigError, match="refresh_steps refreshes a reference that kl_coef = 0 does not load"):
        make_run("reference.refresh_steps=5")


def test_tensor_parallel_must_divide_the_key_value_heads(make_run: RunMaker) -> None:
    run = make_run("learner.ranks=4", "learner.tensor_parallel=4")
    problem = "learner.tensor_parallel: 4 does not divide the model's num_key_value_heads, 2"
    with pytest.raises(ConfigError, match=problem):
        check(run)
    with pytest.raises(ConfigError, match=problem):
        registry.backend(run).start()
    check(make_run("learner.ranks=2", "learner.tensor_parallel=2"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["learner.ranks=4", "learner.pipeline_parallel=4"], "4 does not divide the model's num_hidden_layers, 2"),
        (
            ["learner.ranks=2", "learner.pipeline_parallel=2", "learner.virtual_pipeline=2"],
            "learner.pipeline_parallel x virtual_pipeline: 4 does not divide the model's num_hidden_layers, 2",
        ),
        (["learner.ranks=2", "learner.expert_parallel=2"], "learner.expert_parallel: the model has no experts"),
        (["learner.ranks=6", "learner.context_parallel=4"], r"a multiple of context_parallel \(4\), got 6"),
    ],
    ids=["stages", "interleaved", "experts", "context"],
)
def test_refuses_layouts_that_do_not_fit_the_model(make_run: RunMaker, settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(make_run(*settings))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["learner.ranks=3", "learner.expert_parallel=3"],
            "learner.expert_parallel: 3 does not divide the model's exper",
        ),
        (
            ["learner.ranks=5", "learner.expert_tensor_parallel=5"],
            "learner.expert_tensor_parallel: 5 does not divide the model's size of an expert, ",
        ),
        (
            ["learner.ranks=2", "learner.expert_tensor_parallel=2", "learner.lora={rank=4}"],
            "learner.lora.modules: adapters of experts are not shared by the ranks of learner.expert_tensor_parallel",
        ),
        (
            ["learner.ranks=2", "learner.tensor_parallel=2", "learner.sequence_parallel=off"],
            'learner.sequence_parallel: a mixture of experts needs "on" or "auto"',
        ),
        (["learner.lora={rank=2}"], "learner.lora.rank: kernels for experts need a multiple of 4, got 2"),
        (
            ["learner.lora={rank=4}", "model.dtype=bfloat16"],
            "learner.lora.rank: kernels for experts need a multiple of 8, got 4",
        ),
    ],
    ids=["experts", "cut", "adapters of cut experts", "sequence", "adapters", "adapters in bfloat16"],
)
def test_refuses_layouts_that_do_not_fit_a_mixture_of_experts(
    make_run: RunMaker, tmp_path: Path, settings: list[str], problem: str
) -> None:
    model = changed_model(tmp_path / "odd", "qwen3_moe")
    with pytest.raises(ConfigError, match=problem):
        check(make_run(f"model.path={json.dumps(str(model))}", *settings))


def test_checks_the_models_beside_the_policy(make_run: RunMaker, folder: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(folder / "model", tmp_path / "odd"))
    settings = json.loads((odd / "config.json").read_text()) | {"attention_bias": True}
    (odd / "config.json").write_text(json.dumps(settings))
    reference = ["reference.kl_coef=0.1", f"reference.path={json.dumps(str(odd))}"]
    with pytest.raises(ConfigError, match="reference.path: .* does not support .* with attention_bias"):
        check(make_run(*reference))
    check(make_run(reference[1]))  # kl_coef is 0, so it is not loaded


@pytest.fixture
def installed_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named sglang whose import fails: the check may only read it."""
    package = tmp_path / "packages" / "sglang"
    (package / "srt" / "arg_groups" / "fields").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "srt" / "server_args.py").write_text(
        "class ServerArgs:\n    model_path: str\n    dtype: str = 'auto'\n\n"
        "def add(parser):\n    parser.add_argument('--disable-cuda-graph')\n"
    )
    fields = "class Memory:\n    mem_fraction_static: float = 0.9\n"
    (package / "srt" / "arg_groups" / "fields" / "memory.py").write_text(fields)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(__import__("sys").modules, "sglang", raising=False)
    sglang_options.known_arguments.cache_clear()
    monkeypatch.setattr(sglang_options, "known_arguments", sglang_options.known_arguments.__wrapped__)
    return package


@pytest.mark.usefixtures("installed_sglang")
def test_refuses_an_argument_that_the_installed_sglang_does_not_know(make_run: RunMaker) -> None:
    def run(table: str) -> RunConfig:
        return make_run("engine.kind=sglang", f"engine.options={{server_arguments = {{{table}}}}}")

    with pytest.raises(ConfigError, match=r"no option 'mem-fraction'.*did you mean|no option 'mem-fractoin-static'"):
        check(run("mem-fractoin-static = 0.8"))
    check(run("mem_fraction_static = 0.8, disable-cuda-graph = true"))
    check(run("mem-frac = 0.8"))  # a server accepts abbreviations


@pytest.mark.parametrize("name", ["port", "--model_path", "weight-version"])
def test_refuses_an_argument_of_sglang_that_asyncrl_sets(name: str, make_run: RunMaker) -> None:
    with pytest.raises(ConfigError, match=r"server_arguments: '(port|model-path|weight-version)' is set by asyncrl"):
        check(make_run("engine.kind=sglang", f"engine.options={{server_arguments = {{{name} = 1}}}}"))


def test_run_in_one_process_refuses_what_needs_others(make_run: RunMaker) -> None:
    memory = "bus.kind=memory"
    check(make_run(memory))
    for override, key in (
        ("launcher.kind=ray", "launcher: "),
        ("learner.gpus=[0]", "learner.gpus: "),
        ("rollout.workers=0", "rollout.workers: "),
        ("bus.url=nats://127.0.0.1:4222", "bus.url: "),
    ):
        with pytest.raises(ConfigError, match=f'^{key}with bus.kind = "memory" a run is one process'):
            check(make_run(memory, override))


def test_bus_refuses_the_address_of_another_kind(make_run: RunMaker) -> None:
    with pytest.raises(ConfigError, match=r"^bus: url must start with nats:// or tls://, got http:\.\.\.$"):
        check(make_run("bus.url=http://127.0.0.1:4222"))


def test_memory_bus_of_another_process_cannot_be_observed(make_run: RunMaker) -> None:
    with pytest.raises(ConfigError, match='^bus.kind: "memory" is inside the process of `asyncrl run`'):
        registry.bus_address(make_run("bus.kind=memory"), token="")


def test_prompt_and_answer_must_fit_the_context_of_the_model(make_run: RunMaker) -> None:
    assert summarize(make_run("data.max_prompt_tokens=5000")).most_prompt_tokens == 64 - 8
    assert summarize(make_run("data.max_prompt_tokens=20")).most_prompt_tokens == 20


SERVER = ("engine.kind=sglang", "engine.options={url='http://127.0.0.1:1'}", "data.max_prompt_tokens=5000")


def test_prompt_and_answer_must_fit_the_context_of_sglang(make_run: RunMaker) -> None:
    assert summarize(make_run(*SERVER)).most_prompt_tokens == 58 - 8


@pytest.mark.parametrize(
    ("settings", "most"),
    [(SERVER[1:2], 58), (["engine.options={server_arguments={context-length=32}}"], 26)],
)
def test_refuses_an_answer_that_leaves_no_room_for_a_prompt(make_run: RunMaker, settings: list[str], most: int) -> None:
    with pytest.raises(ConfigError, match=f"^rollout.max_new_tokens: 58 .* no room for a prompt in the {most} tokens"):
        check(make_run("engine.kind=sglang", *settings, "rollout.max_new_tokens=58"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["bus.tls_ca=/none/ca.pem"], "bus.tls_ca: cannot read /none/ca.pem: .*No such file"),
        (["bus.tls_ca={folder}/prompts.jsonl"], "bus.tls_ca: cannot read .*no certificate"),
        (["bus.tls_certificate=/none/{{role}}.pem"], "bus.tls_certificate: cannot read /none/learner.pem or its key"),
        (["bus.tls_key=/none/key.pem"], "bus: tls_key is of tls_certificate, which is empty"),
        (["bus.credentials=/none/{{role}}"], "bus.credentials: cannot read /none/learner: No such file"),
        (['bus.url="nats://"'], "bus: url nats://: names no host"),
        (["weights.directory={folder}/prompts.jsonl"], "weights.directory: .*/prompts.jsonl is a file"),
        (["rollout.workers=1000000"], "rollout: workers must be >= 0 and <= 65,536"),
        (["rollout.workers=65536"], "rollout.workers: 65,536 processes, and this machine's"),
        (["learner.ranks=1000000"], "learner.ranks: 1,000,000 processes, and this machine's"),
        (["learner.threads=5000"], "learner: threads must be >= 0 and <= 4,096"),
        (["engine.options.threads=-1"], "engine.options: threads must be >= 0"),
        (
            ["metrics.prometheus=192.0.2.1:9400"],
            "metrics.prometheus: cannot listen at 192.0.2.1 .*; it must",
        ),
        (["reference.kl_coef=0.1", "reference.path=/none"], "reference.path: /none: no such model folder"),
    ],
)
def test_refuses_a_missing_file_and_an_impossible_count(
    make_run: RunMaker, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], problem: str
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * 2**30 // 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    with pytest.raises(ConfigError, match=problem):
        check(make_run('bus.url="tls://127.0.0.1:4222"', *(one.format(folder=folder) for one in settings)))


def test_machine_needs_the_credentials_of_one_role_only(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run("bus.url=nats://127.0.0.1:4222", f'bus.credentials="{tmp_path}/{{role}}"')
    with pytest.raises(ConfigError, match=r"bus\.credentials"):
        check(run)
    (tmp_path / "rollout-worker").write_text("worker:secret")
    check(run)


def test_refuses_a_class_that_is_no_adapter(make_run: RunMaker) -> None:
    with pytest.raises(ConfigError, match="derive its class from asyncrl.engines.adapter.EngineAdapter"):
        check(make_run("engine.kind=pathlib:Path"))


@pytest.mark.parametrize(
    ("lines", "keys", "problem"),
    [
        (['{"prompt": '], "", r"evaluation.datasets: held_out: .*rows.jsonl"),
        (
            ['{"prompt": "1"}', '{"prompt": "12"}'],
            "max_prompt_tokens = 1",
            "held_out: prompt 2 has 2 tokens, more than max_prompt_tokens = 1",
        ),
        (['{"prompt": "12", "label": "3"}'], "max_new_tokens = 10000", "held_out: 10,000 new tokens leave no room"),
        (['{"prompt": "12", "label": "3"}'], 'reward = {kind = "nope"}', "evaluation.datasets: held_out: reward.kind"),
    ],
)
def test_reads_the_data_sets_of_an_evaluation(
    make_run: RunMaker, tmp_path: Path, lines: list[str], keys: str, problem: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    make_run()
    path = tmp_path / "run.toml"
    table = f'[[evaluation.datasets]]\nname = "held_out"\npath = "{tmp_path}/rows.jsonl"\n{keys}\n'
    path.write_text(path.read_text() + table)
    with pytest.raises(ConfigError, match=problem):
        summarize(config.load(path))


def test_evaluation_must_fit_the_context_of_sglang(make_run: RunMaker, tmp_path: Path) -> None:
    make_run()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12", "label": "3"}\n')
    table = f'[[evaluation.datasets]]\nname = "held_out"\npath = "{tmp_path}/rows.jsonl"\nmax_new_tokens = 58\n'
    path = tmp_path / "run.toml"
    path.write_text(path.read_text() + table)
    summarize(config.load(path))
    with pytest.raises(ConfigError, match="held_out: 58 new tokens leave no room .* the engine's context of 58 tokens"):
        summarize(config.load(path, SERVER))


def test_versions_are_published_before_tokens_get_too_old(make_run: RunMaker) -> None:
    check(make_run("weights.every_steps=4", "staleness.max_staleness=3"))
    for keys, most in ((("staleness.max_staleness=3",), 4), (("run.mode=sync",), 1), (("run.mode=one_step_off",), 2)):
        with pytest.raises(ConfigError, match="^weights: every_steps 5: the last step before a new version") as refused:
            check(make_run("weights.every_steps=5", *keys))
        assert str(refused.value).endswith(f"use at most {most}")


@pytest.mark.parametrize(("is_kept", "key"), [("true", "run.steps"), ("false", "checkpoint.every_steps")])
def test_a_log_that_would_be_full_says_what_makes_it_shorter(is_kept: str, key: str, make_run: RunMaker) -> None:
    with pytest.raises(ConfigError, match=f"over bus.max_log_bytes .* raise it or lower {key}$"):
        check(make_run(f"checkpoint.keep_log={is_kept}", "run.steps=10000000", "checkpoint.every_steps=5000000"))


def test_own_rollout_function_may_sample_nothing(make_run: RunMaker) -> None:
    """It is checked like "given"."""
    name = "tests.unit.launch.checks.test_run_file:copied"
    own = (f"rollout.function={name}", "weights.every_steps=1000")
    with pytest.raises(ConfigError, match=f'^rollout.function: "{name}" takes the answers'):
        check(make_run(*own))
    sft = (*own, "data.response_key=label", "algorithm.name=sft", "rollout.group_size=1", "engine.kind=none")
    check(make_run(*sft, "algorithm.correction=none", "reward.kind=none"))


@describe_rollout(samples=False, gives_one=True)
async def copied(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    return await given(prompt, generate, index=index)


def test_images_need_a_model_and_an_engine_that_read_them(make_run: RunMaker, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.image_key: the model at .* reads text alone"):
        check(make_run('data.image_key="images"'))
    folder = make_tiny_vision_model(tmp_path / "model", num_layers=1, vision_layers=1)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json is missing"):
        check(make_run(f"model.path={json.dumps(str(folder))}"))
