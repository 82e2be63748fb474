"""`asyncrl profile-engine RUN_DIR WORKER`: profiles an SGLang server of this machine for some seconds.

It asks the server that the worker started to record a trace (torch's profiler, inside the server), waits, and asks it
to stop. Traces go to RUN_DIR/profile/WORKER, for ui.perfetto.dev or chrome://tracing. The server samples more slowly
while it is profiled, and not at all while it writes the trace, which may take longer than the profile itself. Run it on
the worker's machine: a server that a worker starts answers only local requests.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from asyncrl.cli import arguments
from asyncrl.errors import ConfigError, EngineError

ADDRESS: Final = "{worker}.engine.url"
"""File in logs/ of the run with the address of a worker's server (engines/sglang/engine.py)."""
ANSWER_SECONDS: Final = 120.0
"""A server that stops profiling first writes its trace."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_folder(parser)
    parser.add_argument("worker", metavar="WORKER", help="the rollout worker, such as w0")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to profile (default: 5)")


def run(options: argparse.Namespace) -> int:
    if not 0 < options.seconds <= 600:
        raise ConfigError(f"--seconds {options.seconds:g}: must be in (0, 600]")
    directory: Path = options.run_directory
    url = _address(directory, options.worker)
    out = (directory / "profile" / options.worker).absolute()
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.rglob("*"))
    _order(url, "/start_profile", {"output_dir": str(out), "activities": ["CPU", "GPU"]})
    try:
        time.sleep(options.seconds)
    finally:  # after Ctrl-C too: a server that keeps profiling fills its memory
        _order(url, "/stop_profile", {})
    files = [str(path) for path in sorted(set(out.rglob("*")) - before) if path.is_file()]
    if options.json:
        print(json.dumps({"out": str(out), "files": files}))
    else:
        what = "\n".join(f"  {file}" for file in files) or "  nothing yet: the server may still be writing"
        print(f"{options.worker}'s server was profiled for {options.seconds:g} s, in {out}:\n{what}")
    return 0


def _address(directory: Path, worker: str) -> str:
    folder = directory / "logs"
    try:
        return (folder / ADDRESS.format(worker=worker)).read_text().strip()
    except FileNotFoundError:
        suffix = ADDRESS.format(worker="")
        up = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}"))
        raise ConfigError(
            f"{directory}: worker {worker} has no SGLang server up on this machine; those that have: "
            f"{', '.join(up) or 'none'}"
        ) from None


def _order(url: str, path: str, body: dict[str, Any]) -> None:
    """Post a request to the server. Raises EngineError."""
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}{path}: {error.code} {error.read().decode(errors='replace')[:500]}") from error
    except (urllib.error.URLError, OSError) as error:
        raise EngineError(f"{url}{path}: no answer: {error}; is the worker still up?") from error
