"""Install a peer in a separate environment, and run its driver against a scripted engine."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from benchmarks.peers.scene import Job, Row, Scene

PEERS: Final = ("areal", "trl", "verl", "prime_rl", "slime", "toy")
ROOT: Final = Path(__file__).parents[2]


def driver_of(peer: str) -> ModuleType:
    """Return a peer's driver: REQUIREMENTS, ADAPTATIONS and optional SOURCES (address, commit, import folders)."""
    return importlib.import_module(f"benchmarks.peers.{peer}")


def python_of(peer: str, folder: Path) -> Path:
    """Return the peer's interpreter in ``folder``/peer; install it if missing. Its own packages precede ours."""
    driver = driver_of(peer)
    if not driver.REQUIREMENTS and not getattr(driver, "SOURCES", ()):
        return Path(sys.executable)
    home = folder.absolute() / peer
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    paths = [sysconfig.get_path("purelib")]
    for address, commit, roots in getattr(driver, "SOURCES", ()):
        source = home / "source" / address.rsplit("/", 1)[-1]
        _clone(address, commit=commit, into=source)
        paths = [*(str(source / root) for root in roots), *paths]
    (site / "behind.pth").write_text("".join(f"{path}\n" for path in paths))
    if driver.REQUIREMENTS:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *driver.REQUIREMENTS], check=True)
    (home / "complete").touch()
    return python


def _clone(address: str, *, commit: str, into: Path) -> None:
    into.mkdir(parents=True)
    for command in (["init", "-q"], ["fetch", "-q", "--depth", "1", address, commit], ["checkout", "-q", "FETCH_HEAD"]):
        subprocess.run(["git", *command], cwd=into, check=True)


def run_peer(peer: str, scenes: Sequence[Scene], *, folder: Path, limit: float) -> list[Row]:
    """Return one row per scene; for an unfinished scene, the reason. The peer's output is in ``folder``/peer.log."""
    python = python_of(peer, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        jobs = []
        for number, scene in enumerate(scenes):
            out = folder / f"{peer}.{number}.row.json"
            out.unlink(missing_ok=True)
            address = stack.enter_context(scripted_engine(scene, folder / f"{peer}.{number}.engine.json"))
            jobs.append((Job(scene=scene, engine=address, out=out.absolute()), folder / f"{peer}.{number}.job.json"))
            jobs[-1][0].write(jobs[-1][1])
        command = [str(python), "-m", f"benchmarks.peers.{peer}", *(str(path.absolute()) for _, path in jobs)]
        failure = ""
        with (folder / f"{peer}.log").open("w") as log:
            try:
                subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=True, timeout=limit * len(scenes))
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                failure = type(error).__name__
    return [json.loads(job.out.read_text()) if job.out.exists() else {"failed": failure} for job, _ in jobs]


@contextlib.contextmanager
def scripted_engine(scene: Scene, job_file: Path) -> Iterator[str]:
    """Start a scripted engine, and yield its address."""
    job_file.parent.mkdir(parents=True, exist_ok=True)
    Job(scene=scene, engine="", out=Path()).write(job_file)
    command = [sys.executable, "-m", "benchmarks.peers.engine", str(job_file)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()
