"""Inject faults into runs of real processes on a real nats-server, and measure how soon and how each is reported.

    python -m benchmarks.faults [--json FILE]

A tiny model trains on two CPU cores. Hangs: a subclass of a real part waits while a file exists. Freezes: a process is
stopped by SIGSTOP. Lost connections: a proxy stops forwarding. docs/guides/operate.md says what is named and how soon;
tests/chaos/test_liveness.py runs some of the faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.faults.injections import Proxy, full_disk, hanging, stopped
from tests.harness.faults.run import NAMED_SECONDS, Run, prepare, running


@dataclass(frozen=True, slots=True)
class Measured:
    what: str
    seconds: float
    said: str


def measure(
    run: Run,
    what: str,
    text: str,
    injected: contextlib.AbstractContextManager[None],
    *,
    seconds: float = NAMED_SECONDS,
) -> Measured:
    """Inject a fault until it is reported with ``text``. Raises TimeoutError."""
    before = len(run.said)
    with injected:
        began = time.monotonic()
        line = run.wait_for(text, after=before, seconds=seconds)
        took = time.monotonic() - began
    return Measured(what, took, line.removeprefix("asyncrl run: "))


def of_own_processes(folder: Path) -> Iterator[Measured]:
    """Inject faults into the run's own processes, one at a time; each is healed before the next."""
    with running(folder) as run:

        def parts(name: str) -> contextlib.AbstractContextManager[None]:
            return hanging(folder, name)

        faults: list[tuple[str, str, Callable[[], contextlib.AbstractContextManager[None]]]] = [
            ("engine hangs", "engine has not answered", lambda: parts("engine")),
            ("reward hangs", "reward function has not returned", lambda: parts("reward")),
            ("rollout function hangs", "rollout function has not returned", lambda: parts("rollout")),
            ("weight load hangs", "has not loaded its weights", lambda: parts("load")),
            ("weight folder hangs", "has been reading a weight folder", lambda: parts("folder")),
            ("training step hangs", "has been in one training step", lambda: parts("step")),
            ("backend hangs in export", "backend has not answered", lambda: parts("backend")),
            ("checkpoint hangs", "a checkpoint to be written", lambda: parts("checkpoint")),
            ("writing weights hangs", "weights to be written", lambda: parts("write")),
            ("event loop blocks", "its event loop is blocked", lambda: parts("blocked")),
            ("nothing left to learn from", "filtered out", lambda: parts("filtered")),
            ("SIGSTOP of a worker", "worker w1 is stopped (SIGSTOP)", lambda: stopped(run.pid("w1"))),
            ("SIGSTOP of the learner", "learner is stopped (SIGSTOP)", lambda: stopped(run.pid("learner"))),
            ("SIGSTOP of nats-server", "nats-server has not answered", lambda: stopped(run.pid("nats-server"))),
        ]
        for what, text, inject in faults:
            before = len(run.said)
            yield measure(run, what, text, inject())
            run.wait_for("over: ", after=before, seconds=90)
            run.wait_for_steps(3)
        yield measure(run, "disk of nats-server full", "has stored nothing", full_disk(run.pid("nats-server")))


def of_joined_workers(folder: Path) -> Iterator[Measured]:
    """Inject faults into workers that joined by themselves, including their absence."""
    with running(folder, "rollout.workers=0") as run:
        run.wait_for("there is no rollout worker", seconds=120)
        with joined(run, "x0") as worker:
            yield measure(run, "last worker leaves", "there is no rollout worker", _drained(worker))
        yield measure(run, "worker starts and hangs", "has been starting", _starting(run), seconds=330)
        proxy = Proxy(run.bus()[0])
        with joined(run, "x1", url=proxy.url):
            yield measure(run, "connection half open", "worker x1 has not been heard of", _silent(proxy))
        with joined(run, "x2") as worker:
            yield measure(run, "kill -9 of a remote worker", "worker x2 has not been heard of", _killed(worker))
        with joined(run, "x4"), hanging(folder, "raises"):  # it goes on until the run has ended, not until the alarm
            yield measure(run, "all prompts are failed", "groups were all failed", contextlib.nullcontext())
            run.process.wait(60)


@contextlib.contextmanager
def joined(run: Run, name: str, *, url: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker and let it work for some steps."""
    worker = run.worker(name, url=url)
    try:
        run.wait_for_steps(4)
        yield worker
    finally:
        worker.kill()
        worker.wait()


@contextlib.contextmanager
def _starting(run: Run) -> Iterator[None]:
    """Start a worker whose engine hangs right at its start."""
    with hanging(run.folder, "start"):
        worker = run.worker("x3")
        try:
            while not (run.folder / "begun").exists():  # the worker is still importing
                time.sleep(0.01)
            yield
        finally:
            worker.kill()
            worker.wait()
            (run.folder / "begun").unlink(missing_ok=True)


@contextlib.contextmanager
def _silent(proxy: Proxy) -> Iterator[None]:
    proxy.is_silent = True
    yield


@contextlib.contextmanager
def _killed(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    worker.kill()
    yield


@contextlib.contextmanager
def _drained(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    worker.terminate()
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for one line a fault")
    parser.add_argument("--only", choices=["own", "joined"], help="one of the two runs")
    options = parser.parse_args()
    rows = []
    scenarios = {"own": of_own_processes, "joined": of_joined_workers}
    for scenario in [scenarios[options.only]] if options.only else scenarios.values():
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name))
            for row in scenario(Path(name)):
                rows.append(row)
                print(f"{row.what:30s} {row.seconds:5.1f} s   {row.said}", flush=True)
    late = [row.what for row in rows if row.seconds > 15]
    print(f"{len(rows)} kinds of fault, {len(rows) - len(late)} named within 15 s; later: {', '.join(late) or 'none'}")
    if options.json:
        lines = [json.dumps({"what": row.what, "seconds": row.seconds, "said": row.said}) + "\n" for row in rows]
        options.json.write_text("".join(lines))


if __name__ == "__main__":
    main()
