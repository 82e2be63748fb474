"""docs/develop/extending.md: its code is the code that runs, and a change takes no more files than it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.cli import main as cli
from asyncrl.metrics import schema
from tests import ROOT
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness.metric_names import is_known
from tests.integration.extending import toy_topic, toy_verb

PAGE = ROOT / "docs" / "develop" / "extending.md"
TOYS = sorted(Path(__file__).parent.glob("toy_*.py"))


def python_blocks() -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text())


def test_every_example_of_the_page_is_part_of_a_toy_that_the_tests_run() -> None:
    toys = "\n".join(path.read_text() for path in TOYS)
    assert len(python_blocks()) >= 7
    for block in python_blocks():
        assert block.strip("\n") in toys, block


async def test_a_topic_is_a_message_and_a_row() -> None:
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    await bus.publish(toy_topic.NOTES, toy_topic.Note(policy_version=3, text="good"), key="1")
    async with bus.read(toy_topic.NOTES) as records:
        assert (await anext(records)).message == toy_topic.Note(policy_version=3, text="good")


def test_a_verb_is_a_file_and_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(cli.VERBS, "greet", "Greet somebody.")
    monkeypatch.setitem(sys.modules, "asyncrl.cli.greet", toy_verb)
    assert cli.main(["greet", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"


def test_a_metric_is_a_row_and_a_part_of_a_reward_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_known("learner/mood")
    monkeypatch.setitem(schema.SCHEMA, "learner/mood", "how it feels")
    assert is_known("learner/mood")
    assert is_known("reward/digits")
