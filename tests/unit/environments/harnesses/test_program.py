"""A program ends together with everything that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.environments.agent.harnesses import keeper
from asyncrl.environments.agent.harnesses.program import Program
from tests.unit.environments.harnesses.tasks import ENVIRONMENT, is_gone, python, read_when_there, until_gone

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found on Linux only")

FAMILY = """
import os, sys, time
if not os.fork():
    os.setsid()                      # it leaves the group and the session,
    if os.fork(): os._exit(0)        # and is an orphan
    with open(sys.argv[1] + ".new", "w") as file: print(os.getpid(), file=file)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(1000)
os.wait()
"""


async def test_what_left_the_session_of_a_program_ends_with_it(tmp_path: Path) -> None:
    program = await Program.start(
        [*python(FAMILY + "time.sleep(1000)"), str(tmp_path / "pid")], environment=ENVIRONMENT
    )
    orphan = int(await read_when_there(tmp_path / "pid"))
    await program.end()
    await until_gone(orphan)
    assert program.has_ended


def test_a_program_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    read, write = os.pipe()
    holder = subprocess.Popen(python("import time; time.sleep(1000)"), pass_fds=(write,))
    os.close(write)
    command = [*python(FAMILY + "time.sleep(1000)"), str(tmp_path / "pid")]
    kept = subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(read), "0", *command], pass_fds=(read,), env=ENVIRONMENT
    )
    os.close(read)
    orphan = int(asyncio.run(read_when_there(tmp_path / "pid")))
    holder.kill()  # only the holder has the other end
    holder.wait()
    assert kept.wait() == 1
    assert is_gone(orphan)


async def test_a_program_says_in_words_how_it_ended() -> None:
    for script, words in {
        "raise SystemExit(3)": "ended with exit code 3",
        f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})": "ended by SIGKILL",
        "": "",
    }.items():
        program = await Program.start(python(script), environment=ENVIRONMENT)
        assert await program.ended() == words
        await program.end()


async def test_a_program_and_its_children_may_take_so_much_memory_together() -> None:
    hog = "import os, time\nos.fork()\nheld = b'x' * (120 * 2**20)\ntime.sleep(1000)"  # two processes of 120 MiB
    program = await Program.start(python(hog), environment=ENVIRONMENT, memory_mib=200)
    assert await program.ended() == "took more than memory_mib = 200 of memory"
    await program.end()
