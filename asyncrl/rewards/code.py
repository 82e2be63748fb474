"""reward.kind = "code": the program in a completion passes tests, each run in a sandbox (sandbox.py).

The program is the last fenced block after </think> that is tagged as Python (```python), else the last without a tag,
else the whole text. The label holds the tests:

{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}     standard input and output, compared word by word
[{"input": "1 2\\n", "output": "3\\n"}]         the same
{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}   calls of a function, or of a method of class Solution
["assert add(1, 2) == 3"]                      statements that must not raise; each item is a test
"assert add(1, 2) == 3"                        one test; if it defines check(candidate), check is called with
                                               metadata["entry_point"]

A table or list may also be JSON text. Output, and the results of calls as JSON, are compared in the worker, out of the
program's reach. Calls and statements leave out what the program does only as __main__. Statements run in the program's
own process. A program that exits early fails, but a program could fake success: with results that claim to equal
everything, or by searching for the mark that a test prints at its end.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from asyncrl.config.checks import Positive
from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import last_block
from asyncrl.rewards.guard import in_thread
from asyncrl.rewards.port import Reward, Sample
from asyncrl.rewards.sandbox import Limits, open_sandbox
from asyncrl.rewards.sandboxed_program import Outcome

_PROGRAM: Final = "program.py"
_LANGUAGES: Final = ("python", "python3", "py")
_IMPORTED: Final = """
import sys as _sys
__name__ = "program"
_sys.modules["program"] = _sys.modules["__main__"]
exec(compile({program!r}, "program.py", "exec"))
__name__ = "__main__"
import json as _json
"""
"""Runs a program as if it were imported: what it does only as __main__, such as reading its input, is left out. The
statements after it run as __main__."""
_CALL: Final = """
_target = {name} if "{name}" in globals() else getattr(Solution(), "{name}")
_result = _json.dumps(_target(*_json.loads({arguments!r})))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    sandbox: Literal["bwrap", "none"] = "bwrap"
    """bwrap: bubblewrap, which must be installed. none: no isolation, only limits, for trusted programs."""
    score: Literal["all", "share"] = "all"
    """all: 1 if every test passes, else 0. share: the share of tests that pass."""
    seconds: Positive[float] = 6.0
    """Time limit of one test."""
    total_seconds: Positive[float] = 25.0
    """Time limit of all tests of an answer, or its share of at_once * reward.timeout_seconds, the time of its group, if
    that is less; tests that do not run in time fail."""
    memory_mib: Positive[int] = 512
    """Memory limit of one test."""
    disk_mib: Positive[int] = 16
    """Limit for the files of one test."""
    output_kib: Positive[int] = 1024
    """Limit for the output of one test, the result of a call included."""
    processes: Positive[int] = 16
    """Limit for the number of processes of one test."""
    at_once: Positive[int] = 2
    """Number of tests that a worker runs at the same time."""
    python: str = ""
    """Interpreter for the programs, for example from a virtual environment with packages. Empty: asyncrl's interpreter,
    without packages."""
    readable: tuple[str, ...] = ()
    """Folders of the worker's machine that programs may read, besides those of the system and the interpreter."""
    network: bool = False
    """Whether programs may use the network, including servers on the worker's machine."""

    def __post_init__(self) -> None:
        for path in (self.python, *self.readable):
            if path and not os.path.exists(path):
                raise ConfigError(f"python, readable: {path} is not there")

    def limits(self, seconds: float) -> Limits:
        return Limits(
            seconds=min(seconds, self.seconds),
            memory_mib=self.memory_mib,
            disk_mib=self.disk_mib,
            output_kib=self.output_kib,
            processes=self.processes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One run of a program.

    stdin       standard input of the program
    expected    expected standard output, compared word by word
    statements  statements to run after the program in the same process; None: run only the program, with ``stdin``
    result      JSON text, expected value of the variable ``_result`` after the statements, which holds JSON text; None:
                the statements must only end without an error
    """

    stdin: str = ""
    expected: str = ""
    statements: str | None = None
    result: str | None = None


class CodeReward:
    """Runs each test in a thread, at most ``at_once`` at the same time."""

    needs_label = True

    def __init__(self, options: Options) -> None:
        self._options = options
        interpreter = os.path.realpath(options.python or sys.executable)
        self._python = [options.python, "-I"] if options.python else [interpreter, "-I", "-S"]
        prefixes = [os.path.dirname(os.path.dirname(path)) for path in (interpreter, options.python) if path]
        prefixes += [] if options.python else [sys.base_prefix]
        readable = [*(path for path in prefixes if path != "/"), *options.readable]
        self._sandbox = open_sandbox(options.sandbox, readable=readable, network=options.network)
        self._places = asyncio.Semaphore(options.at_once)
        self._group_seconds = 30.0

    def check_machine(self) -> None:
        """Raise ConfigError if the sandbox is missing or cannot start, or if the interpreter does not run in it."""
        self._sandbox.check()
        outcome = self._run(["-c", "pass"], self._options.limits(self._options.seconds), stdin="", files={})
        if outcome.code or outcome.stopped:
            said = outcome.stderr.decode(errors="replace").strip().splitlines()
            problem = said[-1] if said else outcome.stopped or f"exit code {outcome.code}"
            raise ConfigError(f"python: {self._python[0]} does not run in the sandbox: {problem}")

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        tests_of(label, metadata)

    def limit_groups(self, seconds: float) -> None:
        self._group_seconds = seconds

    async def __call__(self, samples: Sequence[Sample]) -> list[Reward]:
        """Judge a group. Equal programs with equal tests run once.

        The tests of a group may run for at_once * reward.timeout_seconds, added up; waiting for other groups does not
        count. Each answer has an equal share of it, so that endless programs take nothing from the others.
        """
        keys = []
        for sample in samples:
            answer = sample.answer
            program = last_block(answer, *_LANGUAGES)
            keys.append((answer if program is None else program, tuple(tests_of(sample.label, sample.metadata))))
        different = dict.fromkeys(keys)
        seconds = min(self._options.total_seconds, self._options.at_once * self._group_seconds / len(different))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {key: group.create_task(self._judge(*key, seconds)) for key in different}
        except ExceptionGroup as error:
            raise error.exceptions[0] from None
        return [tasks[key].result() for key in keys]

    async def _judge(self, program: str, tests: Sequence[Test], seconds: float) -> Reward:
        """Run the tests of a program, for up to ``seconds`` together. Tests that do not run in time fail."""
        num_passed = 0
        for test in tests if program.strip() else ():  # without a program, a test that expects no output would pass
            if seconds <= 0:
                break
            is_passed, used = await self._run_in_turn(program, test, self._options.limits(seconds))
            num_passed += is_passed
            seconds -= used
            if not is_passed and self._options.score == "all":
                break
        share = num_passed / len(tests)
        return Reward(value=share if self._options.score == "share" else float(share == 1), parts={"tests": share})

    async def _run_in_turn(self, program: str, test: Test, limits: Limits) -> tuple[bool, float]:
        """Run a test in a thread as soon as fewer than at_once run. Return whether it passes, and its seconds."""
        await self._places.acquire()
        run = asyncio.ensure_future(in_thread(lambda _: self._passes(program, test, limits), None))
        # A thread cannot be cancelled: if the group is, the place stays taken until the test ends.
        run.add_done_callback(self._free_place)
        return await asyncio.shield(run)

    def _free_place(self, run: asyncio.Future[tuple[bool, float]]) -> None:
        self._places.release()
        if not run.cancelled():
            run.exception()  # seen, even if nobody waits any more

    def _passes(self, program: str, test: Test, limits: Limits) -> tuple[bool, float]:
        if test.statements is None:
            outcome = self._run([_PROGRAM], limits, stdin=test.stdin, files={_PROGRAM: _bytes(program)})
            is_passed = _text(outcome).split() == test.expected.split()
        else:
            # The seal is in no file, and Python reads standard input to its end before it runs anything.
            seal = secrets.token_hex(16)
            shown = "''" if test.result is None else "_result"
            end = f"print('\\n{seal}', {shown}, flush=True)"
            source = f"{_IMPORTED.format(program=_bytes(program).decode())}\n{test.statements}\n{end}\n"
            outcome = self._run(["-"], limits, stdin=source, files={})
            _, sealed, result = _text(outcome).rpartition(f"\n{seal}")
            is_passed = bool(sealed) and _is_result(result, test.result)
        return is_passed and outcome.code == 0 and not outcome.stopped, outcome.seconds

    def _run(self, arguments: Sequence[str], limits: Limits, *, stdin: str, files: Mapping[str, bytes]) -> Outcome:
        return self._sandbox.run([*self._python, *arguments], limits=limits, stdin=_bytes(stdin), files=files)


def tests_of(label: Any, metadata: Mapping[str, Any]) -> list[Test]:
    """Return the tests of a label, at least one. Raises ValueError with the problem of the label."""
    if isinstance(label, str) and label.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # statements may begin with a bracket
            label = json.loads(label)
    if isinstance(label, str) and label.strip():
        return [Test(statements=_add_call(_check_statements(label), metadata.get("entry_point")))]
    found = list(_tests(label))
    if not found:
        raise ValueError(f"the label holds no tests: {str(label)[:60]!r}")
    if not any(test.statements or test.expected.strip() for test in found):
        raise ValueError("the label's tests expect no output, so that every program that prints nothing would pass")
    return found


def _tests(label: Any) -> Iterator[Test]:
    if isinstance(label, Mapping):
        inputs, outputs = label.get("inputs"), label.get("outputs")
        if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
            raise ValueError("the label's tests need inputs and outputs, lists of one length")
        name = label.get("fn_name")
        for given, expected in zip(inputs, outputs, strict=True):
            yield (
                _make_call(str(name), given, expected) if name else Test(stdin=_lines(given), expected=_lines(expected))
            )
    elif isinstance(label, list | tuple):
        for one in label:
            if isinstance(one, Mapping) and "input" in one and "output" in one:
                yield Test(stdin=_lines(one["input"]), expected=_lines(one["output"]))
            elif isinstance(one, str):
                yield Test(statements=_check_statements(one))
            else:
                raise ValueError(f"a test must be a statement or have input and output, is {str(one)[:60]!r}")


def _make_call(name: str, given: Any, expected: Any) -> Test:
    if not name.isidentifier():
        raise ValueError(f"fn_name must be a function's name, is {name[:60]!r}")
    if not isinstance(given, list | tuple):
        raise ValueError(f"inputs of {name} must be lists of arguments, one is {str(given)[:60]!r}")
    return Test(statements=_CALL.format(name=name, arguments=json.dumps(given)), result=json.dumps(expected))


def _check_statements(statements: str) -> str:
    """Return the statements. Raises ValueError if every program would pass them, or none."""
    try:
        parsed = ast.parse(statements)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"a test is neither JSON nor Python statements: {statements[:60]!r}") from None
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(parsed)):
        raise ValueError(f"a test has no assert and no call, so that every program would pass: {statements[:60]!r}")
    return statements


def _add_call(statements: str, entry_point: Any) -> str:
    if entry_point and "def check(" in statements:
        return f"{statements}\ncheck({entry_point})\n"
    return statements


def _lines(value: Any) -> str:
    """Return input or output as one text; data sets hold texts or lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_result(text: str, expected: str | None) -> bool:
    """Whether ``text`` is JSON of the expected value (JSON text), or blank for None."""
    if expected is None:
        return not text.strip()
    try:
        return bool(json.loads(text) == json.loads(expected))
    except (ValueError, RecursionError):
        return False


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def _text(outcome: Outcome) -> str:
    return outcome.stdout.decode(errors="replace")
