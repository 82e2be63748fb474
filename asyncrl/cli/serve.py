"""`asyncrl serve RUN.toml`: an HTTP endpoint for external programs that play the run's samples."""

from __future__ import annotations

import argparse

from asyncrl.cli import arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_run_file(parser)
    parser.add_argument("--host", default="", help="address to listen on (default: the host in the run file's url)")


def run(options: argparse.Namespace) -> int:
    from asyncrl.launch.serve import serve

    serve(arguments.load(options), host=options.host)
    return 0
