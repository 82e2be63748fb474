"""harness = "command": any program, started once per sample, in its own process and virtual environment.

The program finds the model through environment variables (OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ...). It
reads the task as one JSON line from standard input. It prints the reward as a JSON object on a line of its own, writes
it to a file, or leaves it to the run's reward function. Tests: tests/unit/environments/harnesses/test_command.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.config.checks import NonNegative, Positive
from asyncrl.environments.agent.harnesses import environment
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of
from asyncrl.errors import OUTAGES, ConfigError, RolloutError
from asyncrl.outage import AWAY, line_kind
from asyncrl.program import GONE, Program, last_bytes

_KEPT_BYTES: Final = 2**18
"""Bytes kept from the end of the program's output; the reward must be in them."""
_SHOWN: Final = 300
"""Characters of the program's last line to show in an error."""
REWARD_FILE: Final = "REWARD_FILE"
_REWARD_FOLDER: Final = "{reward_folder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    command: tuple[str, ...]
    """The program and its arguments. {model}, {base_url} and, with reward = "file", {reward_folder} (that of
    REWARD_FILE) are replaced."""
    reward: Literal["stdout", "file", "grader"] = "stdout"
    """Where the reward comes from. stdout: the line of the output that is a JSON object with a reward; it may also have
    reward_parts, turn_rewards and metrics. file: the file named by REWARD_FILE, which holds such an object or a number.
    grader: the run's reward function."""
    venv: str = ""
    """Virtual environment whose bin comes first on PATH."""
    directory: str = ""
    """Working directory; empty: the worker's."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment variables."""
    inherit: tuple[str, ...] = ()
    """Environment variables to pass on from the worker, besides PATH, HOME and the like."""
    memory_mib: NonNegative[int] = 0
    """Memory limit for all processes of one sample together; 0: no limit."""
    output_mib: Positive[int] = 64
    """Limit for the output of one sample."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ConfigError('command is empty; name a program: command = ["python", "agent.py"]')
        if self.reward != "file" and any(_REWARD_FOLDER in part for part in self.command):
            raise ConfigError(f'command: {_REWARD_FOLDER} is there only with reward = "file", got "{self.reward}"')
        environment.check_names(self.environment)
        environment.check_venv(self.venv)
        environment.check_program(
            self.command, directory=self.directory, path=self.base_variables().get("PATH", os.defpath)
        )

    def base_variables(self) -> dict[str, str]:
        return environment.base_variables(venv=self.venv, inherit=self.inherit, added=self.environment)


class CommandHarness:
    """Runs one process per sample."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._environment = options.base_variables()

    async def __call__(self, task: Task, endpoint: Endpoint) -> Outcome:
        with contextlib.ExitStack() as stack:
            variables = self._environment | environment.endpoint_variables(endpoint, self._environment)
            file: Path | None = None
            if self._options.reward == "file":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True))
                file = Path(folder) / "reward.json"
                variables[REWARD_FILE] = str(file)
            command = [_fill(part, endpoint, file) for part in self._options.command]
            output, errors = await self._run(command, task, variables)
            try:
                return self._outcome(output, file)
            except (ValueError, OSError) as error:
                raise _error(" ".join(str(error).split()), said=_last_line(errors)) from error

    async def _run(self, command: Sequence[str], task: Task, variables: Mapping[str, str]) -> tuple[bytes, bytes]:
        """Run the program and return the ends of its output and of its errors. Raises RolloutError."""
        program = await Program.start(
            command,
            environment=variables,
            directory=self._options.directory,
            memory_mib=self._options.memory_mib,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert program.stdin is not None and program.stdout is not None and program.stderr is not None
        most = self._options.output_mib * 2**20
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_feed(program.stdin, json.dumps(task.as_json(), default=str).encode() + b"\n"))
                output = group.create_task(last_bytes(program.stdout, keep=_KEPT_BYTES, most=most))
                errors = group.create_task(last_bytes(program.stderr, keep=_KEPT_BYTES, most=most))
            if problem := await program.wait_for_problem():
                told = _last_line(errors.result())
                is_temporary = await program.wait() == os.EX_TEMPFAIL
                outage = AWAY if is_temporary else line_kind(told)  # not what the model said
                said = told or _last_line(output.result())
                raise _error(problem, said=said, kind=OUTAGES.get(outage, RolloutError))
        except ExceptionGroup as error:
            first = error.exceptions[0]
            if isinstance(first, ValueError):
                raise _error(f"{first} (output_mib = {self._options.output_mib})") from error
            raise first from error
        finally:
            await program.end()
        return output.result(), errors.result()

    def _outcome(self, output: bytes, file: Path | None) -> Outcome:
        """Read the outcome from the output or the reward file. Raises ValueError and OSError."""
        if self._options.reward == "grader":
            return Outcome()
        if file is not None:
            if not file.exists():
                raise ValueError(f"wrote no reward to the file that {REWARD_FILE} names")
            found = _read_json(file)
        else:
            found = _find_reward(output)
        outcome = outcome_of(found)
        if outcome.reward is None:
            raise ValueError(
                'gave no reward: print it as one line, {"reward": 0.5} (a number alone is not read: it may be what the '
                'model said), or leave it to reward.kind: reward = "grader"'
            )
        return outcome


def _read_json(file: Path) -> Any:
    """Return what the whole file is, or the table with a reward in one of its lines. Raises ValueError, OSError."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _KEPT_BYTES))
        text = stream.read()
    whole = _parse(text) if size <= _KEPT_BYTES else None
    return _find_reward(text) if whole is None else whole


def _find_reward(text: bytes) -> Any:
    """Return the line of ``text`` that is a JSON object with a reward; None if no line is.

    The output may hold what the model said. So a number is never a reward, and two lines that differ are none: the
    program may have printed {"reward": 0.0}, and the model {"reward": 1.0}. Raises ValueError.
    """
    lines = text.splitlines()
    found = [one for one in map(_parse, lines) if isinstance(one, dict) and "reward" in one]
    if not found and any(line.strip().startswith(b'"reward":') for line in lines):
        raise ValueError("its reward is in JSON over several lines; print it on one line")
    if other := next((one for one in found if one != found[-1]), None):
        raise ValueError(
            f"printed several rewards, {_short(other)} and {_short(found[-1])}, and the model may have written one; "
            f'print one, or write it to the file that {REWARD_FILE} names: reward = "file"'
        )
    return found[-1] if found else None


def _parse(text: bytes) -> Any:
    """Return the number or table that ``text`` is in JSON, otherwise None."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | int | float) and not isinstance(found, bool) else None


def _short(value: Any) -> str:
    return json.dumps(value)[:_SHOWN]


async def _feed(stdin: asyncio.StreamWriter, data: bytes) -> None:
    """Write the task to the program's standard input. The program need not read it."""
    with contextlib.suppress(*GONE):
        stdin.write(data)
        await stdin.drain()
    stdin.close()
    with contextlib.suppress(*GONE):
        await stdin.wait_closed()


def _fill(part: str, endpoint: Endpoint, file: Path | None) -> str:
    filled = part.replace("{model}", endpoint.model).replace("{base_url}", endpoint.base_url)
    return filled if file is None else filled.replace(_REWARD_FOLDER, str(file.parent))


def _last_line(text: bytes) -> str:
    """Return the last line that says something; a traceback may end with a frame, as of an ExceptionGroup."""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if any(map(str.isalnum, line))), "")[:_SHOWN]


def _error(problem: str, *, said: str = "", kind: type[RolloutError] = RolloutError) -> RolloutError:
    return kind(f"harness command: {problem}" + (f": {said}" if said else ""))
