"""slime's and Miles' evaluation YAML as [evaluation]."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

from asyncrl.cli import import_eval
from asyncrl.config import slime_evaluation
from asyncrl.config.run_file import from_table
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
"""


def test_a_file_of_slime_becomes_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(SLIME)
    import argparse

    assert import_eval.run(argparse.Namespace(file=file)) == 0
    told = capsys.readouterr()
    table = tomllib.loads(told.out)
    run = from_table(table | {"model": {"path": ""}, "data": {"path": ""}}, where="run.toml")
    aime, gpqa = run.evaluation.datasets
    assert (aime.path, aime.limit, aime.samples) == ("/data/aime-2024.jsonl", 10, 16)
    assert (aime.top_p, aime.max_new_tokens) == (0.7, 16384)
    assert aime.reward is not None and aime.reward.kind == "math"
    assert (gpqa.samples, gpqa.prompt_key, gpqa.top_k, gpqa.stop) == (1, "question", 0, ("<end>",))
    assert gpqa.reward is None
    assert "gpqa: rm_type 'gpqa' has no counterpart" in told.err
    assert "gpqa: metadata_overrides has no counterpart" in told.err


def test_a_table_of_data_sets_names_them_by_its_keys() -> None:
    document = yaml.safe_load("eval:\n  datasets:\n    math500:\n      path: /data/math500.jsonl\n")
    assert 'name = "math500"' in slime_evaluation.toml(document, say=pytest.fail)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("a: 1", "no evaluation file"),
        ("[1, 2]", "no evaluation file"),
        ("eval: {datasets: 3}", "must be a list or a table"),
        ("eval: {datasets: [{name: a}]}", "a has no path"),
        ("eval: {datasets: [3]}", "must be a table"),
    ],
)
def test_what_is_none_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        slime_evaluation.toml(yaml.safe_load(text), say=lambda line: None)


def test_no_yaml_is_refused_in_one_line(tmp_path: Path) -> None:
    import argparse

    file = tmp_path / "eval.yaml"
    file.write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError) as error:
        import_eval.run(argparse.Namespace(file=file))
    assert "\n" not in str(error.value)
