"""Two groups that are opened at once on a board that has just started: the tokenizer is loaded in two threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncrl.data import demo_task

SCRIPT = """
import sys, threading
from pathlib import Path
from asyncrl.data.tokenizer import load_tokenizer

found, go = [], threading.Barrier(4)
def load():
    go.wait()
    found.append(load_tokenizer(Path(sys.argv[1])).eos_token)
threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 4 and len(set(found)) == 1
"""


def test_threads_that_load_a_tokenizer_first_do_not_trip_over_each_other(tmp_path: Path) -> None:
    demo_task.write(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "model"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
