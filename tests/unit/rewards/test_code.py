"""The code reward: a program is right when its tests pass, and it cannot claim so itself."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import DataSection, RewardSection
from asyncrl.config.reward import RewardPart
from asyncrl.data.prompts import open_checked
from asyncrl.data.row_check import RowLimits
from asyncrl.errors import ConfigError, RewardError
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.load import label_check
from asyncrl.rewards.port import Sample
from asyncrl.rewards.sandboxed_program import Limits, Outcome, Stopped
from tests.harness.rewards import load, rewards, sample, values

PLAIN = {"sandbox": "none", "seconds": 100.0, "total_seconds": 100.0, "processes": 64}
"""No test depends on these times. test_sandbox.py tests the sandboxes."""
SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
RIGHT = "Let me add.\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."


def code(**options: Any) -> GuardedReward:
    return load("code", timeout_seconds=200.0, **(PLAIN | options))


def written(source: str, label: Any, **metadata: Any) -> Sample:
    return sample(f"```python\n{source}\n```", label=label, metadata=metadata)


@pytest.mark.parametrize(
    "label",
    [
        SUMS,
        json.dumps(SUMS),
        [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7\n\n"}],
        {"inputs": [["1 2"], "3 4"], "outputs": [["3"], 7]},
    ],
)
async def test_output_is_compared_word_by_word_with_what_every_test_expects(label: Any) -> None:
    wrong = RIGHT.replace("+", "*")
    assert await values(code(), sample(RIGHT, label=label), sample(wrong, label=label)) == [1.0, 0.0]


async def test_the_share_of_tests_is_a_reward_or_a_metric() -> None:
    half = sample("print(3)", label=SUMS)
    (reward,) = await rewards(code(score="share"), [half])
    assert (reward.value, reward.parts) == (0.5, {"tests": 0.5})
    assert await values(code(), half) == [0.0]


async def test_statements_functions_and_methods_are_called() -> None:
    add = "def add(a, b):\n    return a + b"
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    calls = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
    asserts = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
    human = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    cases = [
        (written(add, calls), 1.0),
        (written(method, calls), 1.0),
        (written(add, {**calls, "outputs": [3, 8]}), 0.0),
        (written(add, asserts), 1.0),
        (written(add, "\n".join(asserts)), 1.0),
        (written(add.replace("+", "-"), asserts), 0.0),
        (written(add, human, entry_point="add"), 1.0),
        (written(add.replace("+", "-"), human, entry_point="add"), 0.0),
    ]
    assert await values(code(), *(one for one, _ in cases)) == [value for _, value in cases]


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads = lambda text: [0, 0]\ndef add(a, b): return None",
        "import json\njson.dumps = lambda value: 'true'\ndef add(a, b): return None",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "def add(a, b): return object()",
        "def add(a, b): return 10 ** 5000",
        "def add(a, b):\n    value = []\n    for _ in range(900): value = [value]\n    return value",
        "def add(a, b): print('\\n3\\n', flush=True); import os; os._exit(0)",
    ],
)
async def test_a_call_is_judged_by_what_it_returns_not_by_what_the_program_changes(source: str) -> None:
    call = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert await values(code(), written(source, call)) == [0.0]


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import sys\nprint(sys.stdin.read())\nimport os\nos._exit(0)",
        "print(open(__file__).read())\nimport os\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit",
        "'''",
    ],
)
async def test_a_program_that_ends_before_its_tests_has_passed_none(source: str) -> None:
    assert await values(code(), written(source, "assert add(1, 2) == 3")) == [0.0]


@pytest.mark.slow
async def test_endless_program_is_wrong_and_others_are_judged() -> None:
    endless = written("while True: pass", SUMS)
    right = sample(RIGHT, label=SUMS)
    assert await values(code(seconds=5.0), endless, right) == [
        0.0,
        1.0,
    ]  # on a busy machine the right program takes a second


class FakeSandbox:
    """Runs programs such as "4", which prints 3 after 4 seconds, on a clock of its own.

    used  seconds of each run
    """

    def __init__(self) -> None:
        self.used: list[float] = []
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, command: Sequence[str], *, limits: Limits, stdin: bytes, files: Mapping[str, bytes]) -> Outcome:
        (source,) = files.values()
        needed = float(source)
        self.used.append(min(needed, limits.seconds))
        self.may_run.wait()
        in_time = needed < limits.seconds
        stopped: Stopped = "" if in_time else "time"
        return Outcome(
            code=0, stdout=b"3" if in_time else b"", stderr=b"", stopped=stopped, seconds=min(needed, limits.seconds)
        )


def faked(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[GuardedReward, FakeSandbox]:
    reward, sandbox = load("code", timeout_seconds=30.0, sandbox="none", **options), FakeSandbox()
    monkeypatch.setattr(reward.function, "_sandbox", sandbox)
    return reward, sandbox


def taking(*seconds: float) -> list[Sample]:
    return [written(str(one), {"inputs": ["1", "2"], "outputs": ["3", "3"]}) for one in seconds]


async def test_answers_share_the_groups_time_and_endless_ones_take_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = [1000.0 + number for number in range(16)]
    reward, sandbox = faked(monkeypatch)  # 60 s of programs for a group, 6 s for a test
    assert await values(reward, *taking(*endless, 0.5)) == [0.0] * 16 + [1.0]
    assert sorted(sandbox.used) == [0.5, 0.5, *[pytest.approx(60 / 17)] * 16]
    reward, sandbox = faked(monkeypatch)
    assert await values(reward, *taking(7.0, 4.0, 0.1, 0.1)) == [0.0, 1.0, 1.0, 1.0]
    assert sorted(sandbox.used) == [0.1, 0.1, 4.0, 4.0, 6.0]


async def test_code_inside_thinking_is_not_run() -> None:
    text = f"<think>```python\nprint(3)\n```</think>{RIGHT}"
    assert await values(code(), sample(text, label=SUMS)) == [1.0]


@pytest.mark.parametrize(
    "after", ["Example output:\n```\n3\n```", "Run it:\n```\n$ python a.py\n```\n```bash\nls\n```"]
)
async def test_the_program_is_the_last_python_block_whatever_is_shown_after_it(after: str) -> None:
    draft = "```python\nprint(0)\n```\nBetter:\n"
    untagged = draft.replace("python", "bash") + RIGHT.replace("python", "")
    cases = [sample(text, label=SUMS) for text in (f"{draft}{RIGHT}\n{after}", untagged)]
    assert await values(code(), *cases) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (None, "the label holds no tests"),
        ("", "the label holds no tests"),
        ([], "the label holds no tests"),
        ({"inputs": ["1"]}, "need inputs and outputs, lists of one length"),
        ([3], "a test must be a statement or have input and output, is '3'"),
        ({"fn_name": "a b", "inputs": [[1]], "outputs": [1]}, "fn_name must be a function's name"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "must be lists of arguments"),
        ("1234", "no assert and no call, so that every program would pass: '1234'"),
        ("x = 3", "no assert and no call"),
        ("Paris", "no assert and no call"),
        ("the sum is 3", "neither JSON nor Python statements: 'the sum is 3'"),
        ('{"inputs": ["1"], "outputs": ["2"', "neither JSON nor Python statements"),
        (["assert add(1, 2) == 3", "3"], "no assert and no call"),
    ],
)
async def test_a_label_that_is_no_test_fails_its_group_with_the_reason(label: Any, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        await code()([sample("print(1)", label=label)])


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bwrap here (bubblewrap)")
async def test_programs_run_in_a_sandbox_unless_the_run_file_says_otherwise() -> None:
    reward = load("code", timeout_seconds=200.0, seconds=100.0, total_seconds=100.0)
    reward.check_machine()
    looks = written("import os\nprint(os.getcwd(), os.path.exists('/root'), len(os.environ))", None)
    cases = [sample(RIGHT, label=SUMS), written(looks.completion, SUMS)]
    assert await values(reward, *cases) == [1.0, 0.0]


def test_an_interpreter_that_does_not_start_is_refused_by_check(tmp_path: Any) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no modules >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="python: .*/python does not run in the sandbox: no modules$"):
        code(python=str(broken)).check_machine()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sandbox": "docker"}, "sandbox must be one of 'bwrap', 'none'"),
        ({"seconds": 0.0}, "seconds must be > 0"),
        ({"at_once": 0}, "at_once must be > 0"),
        ({"python": "/nowhere/python"}, "/nowhere/python is not there"),
        ({"readable": ["/nowhere"]}, "/nowhere is not there"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load("code", **options)


def test_labels_that_rewards_cannot_use_are_refused_before_the_run_with_their_row(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    labels = ["assert add(1, 2) == 3", "3"]
    rows.write_text("".join(json.dumps({"prompt": "add", "label": label}) + "\n" for label in labels))
    kinds = {
        "code": "every program would pass: '3'",
        "ifeval": "not a table of instructions",
        "gpqa": "is none of A, B, C, D",
    }
    for kind, problem in kinds.items():
        for section in (RewardSection(kind=kind), RewardSection(kind="parts", parts={"p": RewardPart(kind=kind)})):
            limits = RowLimits(labelled_for=kind, check_label=label_check(section))
            with pytest.raises(ConfigError, match=problem) as caught:
                open_checked(DataSection(path=str(rows)), seed=0, limits=limits)
            assert str(rows) in str(caught.value)
