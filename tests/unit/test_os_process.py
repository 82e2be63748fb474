"""A child process imports everything that its parent can; a process whose new thread cannot start ends."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import os_process
from asyncrl.logs import as_typed


def test_a_child_imports_from_the_scripts_folder_before_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "inherited")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "gone"), "inherited", *sys.path])
    assert os_process.import_path()[0] == str(tmp_path)
    assert not {"inherited", str(tmp_path / "gone"), os.__file__.rpartition("/")[0]} & set(os_process.import_path())
    child = os_process.environment_of_child({"A": "b", "PYTHONPATH": str(tmp_path)})
    assert (child["A"], child["PYTHONPATH"]) == ("b", f"{tmp_path}{os.pathsep}inherited")
    assert os_process.environment_of_child({})["PYTHONPATH"] == "inherited"
    monkeypatch.delenv("PYTHONPATH")
    assert "PYTHONPATH" not in os_process.environment_of_child({})


def test_a_command_in_a_message_works_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "my venv" / "bin" / "asyncrl"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    said = "see `asyncrl top runs/a` or `asyncrl check a.toml`; an asyncrl process"
    for directory, command in (
        (tmp_path, "'my venv/bin/asyncrl'"),
        (program.parents[2] / "my venv" / "bin", "asyncrl"),
    ):
        monkeypatch.chdir(directory)
        if command == "asyncrl":  # as in an activated environment
            monkeypatch.setenv("PATH", str(program.parent))
        assert as_typed(said) == f"see `{command} top runs/a` or `{command} check a.toml`; an asyncrl process"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir("/usr")
    assert as_typed("`asyncrl top`") == f"`'{program}' top`"
    program.unlink()
    assert as_typed("`asyncrl top`") == f"`'{program.with_name('python')}' -m asyncrl top`"


def test_a_program_of_ours_does_not_import_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("http", "json", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    command = [*os_process.module_command("json.tool"), "--json-lines"]
    done = subprocess.run(command, cwd=tmp_path, input="1\n", capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_process_that_its_parent_has_not_reaped_is_not_alive() -> None:
    """Containers without an init leave such processes behind."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert os_process.is_alive(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        os.kill(child.pid, 0)
        assert not os_process.is_alive(child.pid)
    assert not os_process.is_alive(child.pid)


def test_state_of_a_process_is_what_its_machine_says() -> None:
    assert os_process.process_state(os.getpid()) == "running"
    assert os_process.process_state(0) == ""
    assert os_process.process_state(2**22 + 1) == "gone"


STARTER = """
import os, subprocess, sys, time
code = "import time; from asyncrl import os_process; os_process.end_with_parent(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"ASYNCRL_PARENT_PID": str(os.getpid())})
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_its_parent_even_if_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended = select.poll()  # select() takes no descriptor above 1,023
        ended.register(child, select.POLLIN)
        assert ended.poll(60_000)
        os.close(child)
