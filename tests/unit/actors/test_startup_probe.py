"""A start that makes no progress is named soon; a start that works is not named."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from asyncrl import os_process
from asyncrl.actors.startup_probe import StartSigns, judged
from asyncrl.messages import Wait
from asyncrl.os_process import Work
from asyncrl.policies.health.faults import FIRST_SECONDS, PATIENCE_SECONDS


class Machine:
    """A clock, and a process whose work the test controls."""

    def __init__(self) -> None:
        self.now, self.cpu_seconds, self.read_bytes = 100.0, 3.0, 10**9
        self.tells = True

    def clock(self) -> float:
        return self.now

    def work(self) -> Work | None:
        return Work(cpu_seconds=self.cpu_seconds, read_bytes=self.read_bytes) if self.tells else None


def test_a_start_is_quiet_from_the_last_time_it_computed_or_read() -> None:
    machine = Machine()
    signs = StartSigns(clock=machine.clock, work=machine.work)
    quiet = []
    for cpu_seconds, read_bytes in ((0.0, 0), (0.01, 100), (1.0, 0), (0.01, 0), (0.0, 10**6), (0.01, 100), (0.01, 0)):
        machine.now += 2.0
        machine.cpu_seconds += cpu_seconds
        machine.read_bytes += read_bytes
        quiet.append(signs.look())
    assert quiet == [0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 4.0]


def test_where_the_system_does_not_tell_no_start_is_quiet() -> None:
    machine = Machine()
    machine.tells = False
    signs = StartSigns(clock=machine.clock, work=machine.work)
    machine.now += 60.0
    assert signs.look() == 0.0


def test_only_the_wait_for_a_start_that_does_nothing_becomes_a_stall_early() -> None:
    start = Wait(what="its engine to start", on="start", seconds=9.0, limit=FIRST_SECONDS)
    other = Wait(what="weights", on="learner", seconds=9.0)
    assert judged((start, other), quiet_seconds=2.0) == (start, other)
    quiet, same = judged((start, other), quiet_seconds=8.0)
    assert (quiet.seconds, quiet.limit, same) == (9.0, PATIENCE_SECONDS, other)
    assert quiet.what == "its engine to start, which has neither computed nor read for 8 s"


def test_the_work_of_a_process_is_that_of_its_children_too() -> None:
    before = os_process.work()
    assert before is not None
    code = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = os_process.work()
        child.kill()
    assert after is not None
    assert after.cpu_seconds - before.cpu_seconds >= 0.4
    assert after.read_bytes > before.read_bytes


def test_a_thread_that_never_returns_does_not_keep_a_process() -> None:
    code = "import threading; from asyncrl import os_process; os_process.exit_within(0.1, 70); threading.Event().wait()"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 70
    stuck = "threading.Thread(target=threading.Event().wait).start()"
    code = f"import threading; from asyncrl import os_process; os_process.exit_within(0.1, 70); {stuck}"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 70


def test_a_process_knows_its_age() -> None:
    code = "import time; time.sleep(0.2); from asyncrl import os_process; print(os_process.age_seconds())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=os.environ).stdout)
    assert 0.2 <= age <= time.monotonic() - began + 0.02  # Linux counts process times in hundredths of a second
