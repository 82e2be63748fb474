"""Show which sandboxes start on this machine, and how long a start takes for `true` and for Python printing a number.

    python -m asyncrl.rewards.sandbox [--repeats 50] [--json FILE]

Prints the least and the median time of sequential starts. Other load on the machine only adds to these times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox.load import SANDBOXES, open_sandbox
from asyncrl.rewards.sandbox.sandbox import Limits, Sandbox

PROGRAMS = {"true": ["true"], "print(42)": [os.path.realpath(sys.executable), "-I", "-S", "-c", "print(42)"]}


def milliseconds(sandbox: Sandbox, command: list[str], *, repeats: int) -> dict[str, float]:
    """Measure the time from the call to the end of the program; return least and median."""
    found = []
    for _ in range(repeats):
        outcome = sandbox.run(command, limits=Limits())
        assert outcome.code == 0 and not outcome.stopped, outcome
        found.append(outcome.seconds * 1e3)
    return {"least": round(min(found), 1), "median": round(statistics.median(found), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write one object a line")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}")
    rows: list[dict[str, object]] = [{"cores": os.cpu_count(), "load": load}]
    for name in SANDBOXES:
        sandbox = open_sandbox(name, readable=[sys.base_prefix])
        try:
            sandbox.check()
        except ConfigError as error:
            print(error)
            continue
        for program, command in PROGRAMS.items():
            row = milliseconds(sandbox, command, repeats=options.repeats)
            rows.append({"sandbox": name, "program": program, "milliseconds": row})
            print(
                f"{name:>6}  {program:<10}  least {row['least']:5.1f} ms   median {row['median']:5.1f} ms", flush=True
            )
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
