"""What a sandbox prevents: hostile programs, each with what it must not have done."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox import Limits, Sandbox, open_sandbox
from asyncrl.rewards.sandboxed_program import Outcome

needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bwrap here (bubblewrap)")
PYTHON = os.path.realpath(sys.executable)
LIMITS = Limits(seconds=60.0, memory_mib=256, disk_mib=8, output_kib=64, processes=8)
"""No test should reach the time limit."""


@pytest.fixture
def bwrap() -> Sandbox:
    return open_sandbox("bwrap", readable=[sys.base_prefix])


@pytest.fixture(params=[pytest.param("bwrap", marks=needs_bwrap), "none"])
def each(request: pytest.FixtureRequest) -> Sandbox:
    return open_sandbox(request.param, readable=[sys.base_prefix])


def run(sandbox: Sandbox, program: str, *, limits: Limits = LIMITS, stdin: bytes = b"") -> Outcome:
    return sandbox.run(
        [PYTHON, "-I", "-S", "program.py"], limits=limits, stdin=stdin, files={"program.py": program.encode()}
    )


# -- every sandbox -----------------------------------------------------------------------------------------------------


def test_program_gets_stdin_and_its_output_is_returned(each: Sandbox) -> None:
    program = "import sys\nprint(sys.stdin.read()[::-1])\nprint('warned', file=sys.stderr)\nsys.exit(3)"
    outcome = run(each, program, stdin=b"abc" * 21_840)
    assert (outcome.code, outcome.stopped, outcome.stderr) == (3, "", b"warned\n")
    assert outcome.stdout == b"cba" * 21_840 + b"\n"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(1000)"])
def test_endless_program_is_killed_at_the_time_limit(each: Sandbox, program: str) -> None:
    assert run(each, program, limits=Limits(seconds=0.5)).stopped == "time"


def test_endless_output_is_cut(each: Sandbox) -> None:
    program = "import sys\nfor _ in range(200): sys.{}.write('x' * 2**20)"
    for stream in ("stdout", "stderr"):
        outcome = run(each, program.format(stream))
        assert outcome.stopped == "output"
        assert len(getattr(outcome, stream)) == LIMITS.output_kib * 1024


def test_memory_is_limited(each: Sandbox) -> None:
    outcome = run(each, "x = bytearray(4 << 30)\nprint('had it')")
    assert outcome.code == 1 and b"MemoryError" in outcome.stderr and not outcome.stdout


def test_fork_bomb_is_killed(each: Sandbox) -> None:
    program = "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)"
    assert run(each, program).stopped == "processes"


def test_a_child_in_the_same_session_ends_with_its_program(each: Sandbox) -> None:
    """Otherwise the sandbox would wait for the child, which holds standard output open."""
    outcome = run(each, "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nprint('left')")
    assert (outcome.stdout, outcome.stopped) == (b"left\n", "")


def test_environment_variables_are_not_inherited(each: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_BUS_TOKEN", "secret")
    seen = run(each, "import os\nprint(sorted(os.environ))").stdout.decode()
    assert "ASYNCRL" not in seen and "PATH" in seen


# -- bubblewrap --------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("s3cret")
    return path


@pytest.fixture
def listener() -> Iterator[int]:
    """Yield the port of a server on this machine's loopback interface."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@needs_bwrap
def test_files_of_the_machine_are_hidden(bwrap: Sandbox, secret: Path) -> None:
    outcome = run(bwrap, f"print(open({str(secret)!r}).read())")
    assert outcome.code == 1 and b"No such file" in outcome.stderr


@needs_bwrap
@pytest.mark.parametrize("path", ["/written", "/usr/written", "/etc/written", "/dev/written"])
def test_nothing_but_its_own_folder_can_be_written(bwrap: Sandbox, path: str) -> None:
    outcome = run(bwrap, f"open({path!r}, 'w').write('x')\nprint('wrote')")
    assert outcome.code == 1 and not outcome.stdout


@needs_bwrap
def test_settings_of_the_machine_cannot_be_opened_for_writing(bwrap: Sandbox) -> None:
    """Even where we are root and the kernel treats the program as root. /proc/sys/kernel/core_pattern, for example,
    names a program that the kernel would run as root."""
    program = (
        "import os\n"
        "for folder, _, names in os.walk('/proc'):\n"
        "    if (folder + '//').split('/')[2].isdigit(): continue\n"
        "    for name in names:\n"
        "        try: os.close(os.open(f'{folder}/{name}', os.O_WRONLY | os.O_NONBLOCK))\n"
        "        except OSError: pass\n"
        "        else: print(f'{folder}/{name}')\n"
    )
    assert run(bwrap, program).stdout == b""


@needs_bwrap
@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
def test_many_small_files_do_not_fill_the_machine(bwrap: Sandbox, folder: str) -> None:
    program = f"for n in range(100): open('{folder}/%d' % n, 'wb').write(b'x' * 2**20)\nprint('wrote 100 MB')"
    outcome = run(bwrap, program)
    assert b"No space left" in outcome.stderr and not outcome.stdout


UNCOUNTED = {
    "files in memory": "import os\nfor _ in range(100): os.write(os.memfd_create('a'), b'x' * 2**20)",
    "shared segments": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.shmat.restype = ctypes.c_void_p\n"
        "if libc.shmget(0, 2**20, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'shmget')"
    ),
    "semaphores": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.semget(0, 32000, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'semget')"
    ),
    "a disk of its own": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nuid = os.getuid()\n"
        "libc.unshare(0x10000000 | 0x00020000)\nopen('/proc/self/uid_map', 'w').write(f'0 {uid} 1')\n"
        "if libc.mount(b'a', b'/work', b'tmpfs', 0, None) < 0: raise OSError(ctypes.get_errno(), 'mount')"
    ),
    "a disk of its own, by the newer calls": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.syscall(430, b'tmpfs', 0) < 0: raise OSError(ctypes.get_errno(), 'fsopen')"
    ),
    "buffers of sockets": "import socket\nheld = [socket.socketpair() for _ in range(1000)]",
}


@needs_bwrap
@pytest.mark.parametrize("program", UNCOUNTED.values(), ids=UNCOUNTED.keys())
def test_memory_that_belongs_to_no_process_cannot_be_made(bwrap: Sandbox, program: str) -> None:
    outcome = run(bwrap, program + "\nprint('had it')")
    assert not outcome.stdout and (b"[Errno 38]" in outcome.stderr or b"[Errno 24]" in outcome.stderr)


@needs_bwrap
def test_the_calls_of_another_machine_are_refused(bwrap: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel can run programs of several machines, their calls have other numbers."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert run(bwrap, "print('ran')").stdout == b""


@needs_bwrap
def test_network_is_unreachable_by_default(bwrap: Sandbox, listener: int) -> None:
    outcome = run(bwrap, f"import socket\nsocket.create_connection(('127.0.0.1', {listener}), 5)\nprint('connected')")
    assert b"ConnectionRefused" in outcome.stderr and not outcome.stdout


@needs_bwrap
def test_network_is_available_when_requested(listener: int) -> None:
    sandbox = open_sandbox("bwrap", readable=[sys.base_prefix], network=True)
    program = f"import socket\nsocket.create_connection(('127.0.0.1', {listener}), 50)\nprint('connected')"
    assert run(sandbox, program).stdout == b"connected\n"


@needs_bwrap
def test_other_processes_are_neither_seen_nor_signalled(bwrap: Sandbox) -> None:
    assert int(run(bwrap, "import os\nprint(sum(name.isdigit() for name in os.listdir('/proc')))").stdout) <= 3
    outcome = run(bwrap, f"import os\nos.kill({os.getpid()}, 0)\nprint('could')")
    assert not outcome.stdout


@needs_bwrap
def test_kills_children_in_their_own_session(bwrap: Sandbox) -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '4321.5'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print('left')"
    )
    assert run(bwrap, program).stdout == b"left\n"
    while any(b"4321.5" in line for line in command_lines()):
        time.sleep(0.01)  # the kernel ends it with its namespace, without any notice


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:  # the process has just ended
            continue


@needs_bwrap
def test_sandboxed_program_has_no_privileges(bwrap: Sandbox) -> None:
    program = "print(open('/proc/self/status').read())"
    status = dict(line.split(":", 1) for line in run(bwrap, program).stdout.decode().splitlines() if ":" in line)
    assert int(status["CapEff"], 16) == 0 and status["NoNewPrivs"].strip() == "1" and "65534" in status["Uid"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_sandbox_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match='^sandbox = "bwrap": there is no bwrap on PATH; install bubblewrap'
    ) as caught:
        open_sandbox("bwrap").check()
    assert "\n" not in str(caught.value)


def test_a_sandbox_that_cannot_start_is_refused_with_what_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match="cannot start here: bwrap: No permissions to create new namespace; a container"
    ):
        open_sandbox("bwrap").check()
