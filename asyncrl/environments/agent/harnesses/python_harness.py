"""harness = "package.module:Harness": your own Python code, in a pool of long-lived child processes (child.py).

    class Harness:                                       or  async def play(task, endpoint)
        def __init__(self, options)                      if its module has an Options; else no argument
        async def __call__(self, task, endpoint)         plain functions run in threads

The harness returns an Outcome, a table of its fields, a number, or None. The children may use another virtual
environment, which need not contain asyncrl. A child that dies, hangs or uses too much memory is replaced; all processes
that it started end with it.
Tests: tests/unit/environments/harnesses/test_python_harness.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncrl.config.checks import NonNegative, Positive
from asyncrl.environments.agent.harnesses import child, environment
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of
from asyncrl.errors import OUTAGES, ConfigError, RolloutError
from asyncrl.program import GONE, Program

CANCEL_SECONDS: Final = 5.0
"""Time for a cancelled sample to end; after that its child is killed."""
CHECK_SECONDS: Final = 120.0
"""Time limit for the import check before the run starts. A slower import only logs a warning."""
_STDERR: Final = 2
log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    processes: Positive[int] = 4
    """Number of child processes per rollout worker; they share its samples."""
    venv: str = ""
    """Virtual environment of the children (Python 3.10 or newer); empty: the worker's."""
    directory: str = ""
    """Working directory of the children, from which they also import; empty: the worker's."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additional environment variables of the children."""
    inherit: tuple[str, ...] = ()
    """Environment variables to pass on from the worker, besides PATH, HOME and the like."""
    memory_mib: NonNegative[int] = 4096
    """Memory limit of a child. A child over the limit gets no more samples and is replaced; a child whose processes
    together use twice the limit is killed. 0: no limit."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Options of the harness's own class."""

    def __post_init__(self) -> None:
        environment.check_names(self.environment)
        environment.check_venv(self.venv)
        environment.check_program([self.python], directory=self.directory, path="")

    @property
    def python(self) -> str:
        return str(Path(self.venv).absolute() / "bin" / "python") if self.venv else sys.executable


@dataclass(slots=True, eq=False)
class _Child:
    program: Program
    control: socket.socket
    num_samples: int = 0
    is_leaving: bool = False
    was_hung: bool = False


class PythonHarness:
    """Runs samples in a pool of children. Each sample goes to the child with the fewest."""

    def __init__(self, address: str, options: Options, *, name: str = "") -> None:
        """
        address  "package.module:object" or "FILE.py:object"
        name     name in error messages; "": the address
        """
        self._address, self._options, self._name = address, options, name or address
        self._children: list[_Child] = []
        self._starting = asyncio.Lock()

    def check_machine(self) -> None:
        """Import the harness as a child does. Raises ConfigError if a child could not run it."""
        options = self._options
        try:
            done = subprocess.run(
                [options.python, child.__file__, "--check", self._address],
                env=self._variables(),
                cwd=options.directory or None,
                input=json.dumps(dict(options.options), default=str),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            log.warning("harness %s: its import takes longer than %g s", self._name, CHECK_SECONDS)
            return
        if done.returncode:
            said = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
            problem = said[-1] if said else f"its import ends with exit code {done.returncode}"
            where = f" with {options.python}" if options.venv else ""
            raise ConfigError(f"{self._name!r} cannot be imported{where}: {problem}")

    async def __call__(self, task: Task, endpoint: Endpoint) -> Outcome:
        member = await self._choose_child(endpoint)
        try:
            return await self._play(member, task, endpoint)
        finally:
            member.num_samples -= 1
            if member.program.has_ended:
                member.is_leaving = True
            if member.is_leaving:
                self._forget(member)
                if not member.num_samples:
                    await _end(member)

    def _variables(self) -> dict[str, str]:
        options = self._options
        return environment.base_variables(venv=options.venv, inherit=options.inherit, added=options.environment)

    async def close(self) -> None:
        while self._children:
            await _end(self._children.pop())

    async def _choose_child(self, endpoint: Endpoint) -> _Child:
        """Choose a child for one more sample; start a child if needed."""
        async with self._starting:
            self._children = [one for one in self._children if not one.program.has_ended]
            least = min(self._children, key=lambda one: one.num_samples, default=None)
            if least is None or (least.num_samples and len(self._children) < self._options.processes):
                least = await self._start(endpoint)
                self._children.append(least)
            least.num_samples += 1
            return least

    async def _start(self, endpoint: Endpoint) -> _Child:
        """Start a child. Its variables lead to the endpoint, which is the same for all samples of a worker."""
        variables = self._variables()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                program = await Program.start(
                    [self._options.python, child.__file__, self._address],
                    environment=variables | environment.direct_variables(endpoint, variables),
                    directory=self._options.directory,
                    memory_mib=2 * self._options.memory_mib,
                    stdin=theirs,
                    stdout=_STDERR,  # the harness's output goes to the worker's log
                )
            except BaseException:
                ours.close()
                raise
        return _Child(program, ours)

    async def _play(self, member: _Child, task: Task, endpoint: Endpoint) -> Outcome:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(member.control, [b"s"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise await self._describe_end(member) from None
        reader, writer = await asyncio.open_connection(sock=ours, limit=child.LARGEST_LINE)
        request = {"task": task.as_json(), "endpoint": endpoint.as_json(), "options": dict(self._options.options)}
        try:
            writer.write(json.dumps(request, default=str).encode() + b"\n")
            line = await reader.readline()
        except (OSError, *GONE):  # no outage: its own process is gone
            raise await self._describe_end(member) from None
        except asyncio.CancelledError:
            await self._cancel(member, reader, writer)
            raise
        finally:
            writer.close()
        if not line:
            raise await self._describe_end(member)
        return self._outcome(member, json.loads(line))

    def _outcome(self, member: _Child, answer: Mapping[str, Any]) -> Outcome:
        if 0 < self._options.memory_mib < answer["resident_mib"]:
            member.is_leaving = True
        if "error" in answer:
            raise self._error(f"raised {answer['error']}", kind=OUTAGES.get(answer["outage"], RolloutError))
        return outcome_of(answer["outcome"])

    async def _cancel(self, member: _Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Cancel a sample. If its child does not end it in time, kill the child and all processes it started."""
        try:
            writer.write_eof()
            async with asyncio.timeout(CANCEL_SECONDS):
                await reader.read()
        except TimeoutError:
            self._kill(member)
        except (OSError, *GONE):  # the child has exited
            pass
        except asyncio.CancelledError:  # the caller does not wait any longer
            self._kill(member)
            raise

    def _kill(self, member: _Child) -> None:
        member.is_leaving, member.was_hung = True, True
        self._forget(member)
        member.program.kill()
        log.warning("harness %s: process %d hung, and was killed", self._name, member.program.pid)

    async def _describe_end(self, member: _Child) -> RolloutError:
        """Return the error for a child that no longer answers."""
        member.is_leaving, problem = True, ""
        self._forget(member)
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                problem = await member.program.wait_for_problem()
        except TimeoutError:
            self._kill(member)
        if member.was_hung:
            return self._error(f"its process did not end a sample within {CANCEL_SECONDS:g} s, and was killed")
        return self._error(f"its process {problem or 'ended'}; what it printed is in the worker's log")

    def _forget(self, member: _Child) -> None:
        with contextlib.suppress(ValueError):
            self._children.remove(member)

    def _error(self, problem: str, *, kind: type[RolloutError] = RolloutError) -> RolloutError:
        return kind(f"harness {self._name}: {problem}")


async def _end(member: _Child) -> None:
    member.control.close()
    await member.program.end()
