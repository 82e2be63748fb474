"""How much of its limits a process has used, as reported by Linux."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from asyncrl.actors import process_resources
from asyncrl.actors.process_resources import used_shares


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self" / "fd").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    100 kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc"


def test_memory_is_the_containers_without_what_it_can_give_back(proc: Path) -> None:
    cgroup = proc.parent / "cgroup"
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("900\n")
    (cgroup / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    assert used_shares(proc, cgroup)["process/memory"] == 0.6


def test_memory_without_a_limit_is_the_machines(proc: Path) -> None:
    cgroup = proc.parent / "cgroup"
    assert used_shares(proc, cgroup)["process/memory"] == 0.9
    (cgroup / "memory.max").write_text("max\n")
    assert used_shares(proc, cgroup)["process/memory"] == 0.9


def test_descriptors_are_counted_against_their_limit(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (10, 20))
    for number in range(8):
        (proc / "self" / "fd" / str(number)).touch()
    assert used_shares(proc, proc.parent / "cgroup")["process/descriptors"] == 0.8


def test_threads_are_counted_where_a_container_limits_them(proc: Path) -> None:
    cgroup = proc.parent / "cgroup"
    (cgroup / "pids.max").write_text("200\n")
    (cgroup / "pids.current").write_text("50\n")
    assert used_shares(proc, cgroup)["process/threads"] == 0.25


def test_elsewhere_nothing_is_known(tmp_path: Path) -> None:
    assert used_shares(tmp_path / "none", tmp_path / "none") == {}


def test_the_last_descriptor_is_used_where_not_even_their_folder_opens(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process_resources.os, "listdir", full)
    assert used_shares(proc, proc.parent / "cgroup")["process/descriptors"] == 1.0
