"""Convert the evaluation YAML of slime and Miles to [evaluation]."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest
import yaml

from asyncrl.config.run_file import from_table
from asyncrl.contrib.importers import slime_evaluation
from asyncrl.errors import ConfigError

SLIME = """
eval:
  defaults:
    max_response_len: 16384
    top_p: 0.7
    n_samples_per_eval_prompt: 1
  datasets:
    - name: aime
      path: /data/aime-2024.jsonl@[0:10]
      rm_type: deepscaler
      n_samples_per_eval_prompt: 16
    - name: gpqa
      path: /data/gpqa.jsonl
      rm_type: gpqa
      input_key: question
      top_k: -1
      stop: "<end>"
      metadata_overrides: {choices: 4}
      custom_rm_path: my.module.score
"""


def test_a_file_of_slime_becomes_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(SLIME)
    assert slime_evaluation.run(argparse.Namespace(file=file)) == 0
    told = capsys.readouterr()
    table = tomllib.loads(told.out)
    run = from_table(table | {"model": {"path": ""}, "data": {"path": ""}}, where="run.toml")
    aime, gpqa = run.evaluation.datasets
    assert (aime.path, aime.samples) == ("/data/aime-2024.jsonl@[0:10]", 16)
    assert (aime.top_p, aime.max_new_tokens) == (0.7, 16384)
    assert aime.reward is not None and aime.reward.kind == "deepscaler"
    assert (gpqa.samples, gpqa.prompt_key, gpqa.top_k, gpqa.stop) == (1, "question", 0, ("<end>",))
    assert gpqa.reward is not None and gpqa.reward.kind == "gpqa"
    assert gpqa.metadata == {"choices": 4}
    assert "gpqa: custom_rm_path has no counterpart and is left out: it takes other arguments" in told.err


MILES = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6, top_k: -1, repetition_penalty: 1.05}
  datasets:
    - name: tools:0
      path: ${DATA_DIR}/tools.jsonl
      rm_type: boxed_math
      input_key: messages
      tool_key: functions
      apply_chat_template: true
      apply_chat_template_kwargs: {enable_thinking: false}
    - name: later
      path: /data/later.parquet@[64:]
      rm_type: boxed_dapo
  delegate:
    - {name: skills, url: "http://skills:9050/evaluate"}
"""


def test_templates_tools_and_slices_of_theirs_are_ours() -> None:
    said: list[str] = []
    table = tomllib.loads(slime_evaluation.toml(yaml.safe_load(MILES), say=said.append))
    run = from_table(table | {"model": {"path": ""}, "data": {"path": ""}}, where="run.toml")
    tools, later = run.evaluation.datasets
    assert (tools.name, tools.samples, tools.temperature, tools.top_k) == ("tools-0", 4, 0.6, 0)
    assert (tools.prompt_key, tools.tools_key, tools.chat_template) == ("messages", "functions", True)
    assert (tools.chat_template_options, tools.repetition_penalty) == ({"enable_thinking": False}, 1.05)
    assert (later.path, later.chat_template) == ("/data/later.parquet@[64:]", False)
    assert tools.reward is not None and tools.reward.kind == "math"
    assert later.reward is not None and (later.reward.kind, later.reward.options) == ("dapo", {"boxed": True})
    assert said == [
        "delegate has no counterpart and is left out",
        "tools:0: is called tools-0 here: the name is part of its metrics'",
        "tools:0: path has the variable ${DATA_DIR}; write its value in",
    ]


def test_instructions_of_ifeval_and_of_ifbench_have_a_reward_each() -> None:
    both = {kind: {"path": "a.jsonl", "rm_type": kind} for kind in ("ifeval", "ifbench")}
    sets = tomllib.loads(slime_evaluation.toml({"datasets": both}, say=pytest.fail))["evaluation"]["datasets"]
    assert [one["reward"] for one in sets] == [{"kind": "ifeval"}, {"kind": "ifbench"}]


def test_every_key_of_theirs_is_taken_or_said() -> None:
    text = """{datasets: {a: {path: b, rm_type: math, max_context_len: 900, max_prompt_len: 70,
    skip_special_tokens: true, no_stop_trim: true, custom_generate_function_path: mine.go,
    eval_task_timeout: 60, multimodal_keys: {image: i}}}}"""
    said: list[str] = []
    one = tomllib.loads(slime_evaluation.toml(yaml.safe_load(text), say=said.append))["evaluation"]["datasets"][0]
    assert (one["max_context_tokens"], one["max_prompt_tokens"]) == (900, 70)
    assert one["reward"] == {"kind": "math", "keep_special_tokens": False}
    assert [line.split(" has ")[0] for line in said] == [
        "a: custom_generate_function_path",
        "a: eval_task_timeout",
        "a: multimodal_keys",
    ]
    said.clear()
    slime_evaluation.toml({"datasets": {"a": {"path": "b", "no_stop_trim": False}}}, say=said.append)
    assert said == ["a: no_stop_trim = false is left out: an answer is every token that was sampled"]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("a: 1", "no evaluation file"),
        ("[1, 2]", "no evaluation file"),
        ("eval: {datasets: 3}", "must be a list or a table"),
        ("eval: {datasets: []}", "no evaluation file"),
        ("eval: {delegate: [{name: a}]}", "no evaluation file"),
        ("eval: {datasets: [{name: a}]}", "a has no path"),
        ("eval: {datasets: [3]}", "must be a table"),
        ("eval: {default: {top_p: 0.7}, datasets: {a: {path: b}}}", "eval: unknown key 'default'; did you mean 'defau"),
        ("{every: 3, datasets: {a: {path: b}}}", "unknown key 'every'; slime and Miles have datasets, defaults"),
        ("eval: {datasets: {a: {path: b, top_pp: 0.7}}}", "datasets: a: unknown key 'top_pp'; did you mean 'top_p'"),
        ("eval: {defaults: {temprature: 0}, datasets: {a: {path: b}}}", "unknown key 'temprature'; did you mean 'tem"),
        ("eval: {datasets: {'': {path: b}}}", "one has no name"),
        ("eval: {datasets: {a b: {path: b}, a-b: {path: c}}}", "a-b: 'a-b' is the name of another data set"),
        ("eval: {datasets: {a: {path: b, metadata_overrides: {1: 2}}}}", "metadata: must be of texts.*got {1: 2}"),
        ("eval: {datasets: {a: {path: b, stop: 2020-01-01}}}", "datasets: a: stop: must be of texts"),
    ],
)
def test_invalid_weights_and_slices_are_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        slime_evaluation.toml(yaml.safe_load(text), say=lambda line: None)


@pytest.mark.parametrize(
    "yaml_text, problem",
    [
        ("eval: [", "eval.yaml: is not YAML: "),
        ("learning_rate: 1", "eval.yaml: no evaluation file"),
        ("eval: {datasets: [{name: a}]}", "eval.yaml: datasets: a has no path"),
        (None, "eval.yaml: cannot be read"),
    ],
)
def test_mistake_in_their_file_is_refused_in_one_line(tmp_path: Path, yaml_text: str | None, problem: str) -> None:
    file = tmp_path / "eval.yaml"
    if yaml_text is not None:
        file.write_text(yaml_text)
    with pytest.raises(ConfigError) as error:
        slime_evaluation.read(file, say=pytest.fail)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_reward_that_is_left_out_is_named_also_beside_special_tokens() -> None:
    said: list[str] = []
    table = {"name": "a", "path": "b", "rm_type": "ours", "skip_special_tokens": True}
    slime_evaluation.toml({"eval": {"datasets": [table]}}, say=said.append)
    assert [line.split(":")[1].split()[0] for line in said] == ["skip_special_tokens", "rm_type"]
