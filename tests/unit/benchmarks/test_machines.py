"""Two machines of benchmarks/gpu/machines.py: what their agents print, and how they end."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu.learner_step import Variant
from benchmarks.gpu.machines import Agents, compared, message_in

VARIANT = Variant(shape="tiny", tokens=512)


def test_a_message_is_found_wherever_other_processes_have_written_to_the_line() -> None:
    message = {"pid": 5, "step": 1, "loss": -0.5}
    assert message_in('{"pid": 5, "step": 1, "loss": -0.5}\n') == message
    assert message_in('[W1127] a warning without an end {"pid": 5, "step": 1, "loss": -0.5}NCCL INFO\n') == message
    for other in (
        '{"pid": 5, "step": 1, "lo\n',
        '{"a": 1}\n',
        '{"pid": 5, "of": "an agent"}\n',
        '{"\n',
        "text\n",
        "\n",
    ):
        assert message_in(other) is None


def test_agents_that_print_what_is_no_message_are_heard_to_the_end(tmp_path: Path) -> None:
    prints = r"""
import sys
sys.stdout.buffer.write(b'{"torn\n\xff\n{"pid": 7, "step": 1}\n')
sys.exit(3)
"""
    agents = Agents([([sys.executable, "-c", prints], {})], tmp_path / "agent", limit=60.0)
    assert list(agents.messages()) == [{"pid": 7, "step": 1}]
    assert agents.end() == 3
    assert (tmp_path / "agent.0.log").read_text() == '{"torn\n�\n'


def test_a_tree_that_ends_with_an_error_fails_its_row() -> None:
    steps = [{"step": step, "seconds": 1.0, "loss": 0.5, "grad_norm": 1.0, "entropy": 1.0} for step in (1, 2)]
    steps = [one | {"offpolicy/ess": 1.0} for one in steps]
    machines = {"steps": steps, "exit_code": 0}
    assert "failed" not in compared(VARIANT, machines, machines)
    assert compared(VARIANT, machines | {"exit_code": 1}, machines)["failed"]
    assert compared(VARIANT, machines, machines | {"exit_code": 1})["failed"]
    assert compared(VARIANT, {"steps": steps[:1], "exit_code": 0}, machines)["failed"]
