"""Runs the `asyncrl` command in this process, and provides a run file for the demo's task."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.cli import main as cli

RUN_FILE = """
[run]
name = "tiny"
directory = "{directory}/runs"
[model]
path = "{directory}/model"
[data]
path = "{directory}/prompts.jsonl"
[engine]
kind = "inprocess"
[reward]
kind = "asyncrl.data.demo_task:reward"
[learner]
backend = "reference"
groups_per_batch = 4
[rollout]
max_new_tokens = 8
"""


def asyncrl(*arguments: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of the command."""
    code = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err
