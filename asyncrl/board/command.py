"""`asyncrl board RUN_DIR...`: a web page that shows one or several runs, during and after training, and their shadows.

The board is read-only. On a loopback address everyone on this machine may open it. On any other address a token is
required; it is part of the printed address, or comes from ASYNCRL_BOARD_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from pathlib import Path
from typing import Final

from asyncrl.cli import arguments
from asyncrl.errors import ConfigError

TOKEN_VARIABLE: Final = "ASYNCRL_BOARD_TOKEN"
MOST_RUNS: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="*", help="a run's folder or its run file; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8420, help="port to listen on; 0: any free port (default: 8420)")
    arguments.add_overrides(parser, "override one key of the runs, such as bus.url; repeatable")


def shadows_of(run: Path) -> list[Path]:
    """Return the folders of the run's shadows that have trained a step (`asyncrl shadow`)."""
    return sorted(file.parent for file in run.glob("shadows/*/metrics.jsonl"))


def run(options: argparse.Namespace) -> int:
    from asyncrl.board.guard import is_loopback
    from asyncrl.board.server import Board
    from asyncrl.board.watched_run import WatchedRun

    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: a port is 0 to 65535")
    shown = [*options.runs, *(shadow for run in options.runs for shadow in shadows_of(run))]
    if len(shown) > MOST_RUNS:
        raise ConfigError(f"at most {MOST_RUNS} runs and shadows are shown side by side, got {len(shown)}")
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not is_loopback(options.host):
        token = token or secrets.token_urlsafe(24)
    bus_token = arguments.bus_token()
    runs = [WatchedRun(where, options.overrides, token=bus_token, verb="board") for where in shown or [None]]
    board = Board(runs, host=options.host, port=options.port, token=token)

    async def serve() -> None:
        async with board.serving():
            print(f"asyncrl board: {board.url}   (Ctrl-C ends it)", flush=True)
            await asyncio.Event().wait()

    asyncio.run(serve())
    return 0
