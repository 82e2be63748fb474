"""The asyncrl command: argument parsing, logging, signals, exit codes. Imports what a verb needs after parsing.

Exit codes: 0 done, 1 failed, 2 configuration, 3 failed and would again (a full disk), 4 a worker
whose name another one has, 70 stuck, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from asyncrl import __version__, logs
from asyncrl.errors import INTERRUPTED, AsyncRLError, ConfigError, HopelessError

if TYPE_CHECKING:
    from asyncrl.config import RunConfig

EXAMPLES = """examples:
  asyncrl run examples/demo.toml                       everything on this machine
  asyncrl run my.toml --set run.steps=10 --resume      go on from the last checkpoint
  asyncrl doctor my.toml                               who waits for whom in a run, and what is wrong
  asyncrl top runs/demo                                what it does now, on one screen
  asyncrl check my.toml                                what the run file means, and whether it can work
  asyncrl rollout-worker --join nats://learner-host:4222 --run my-run    join a run from any node
  asyncrl scale runs/demo --rollout-workers 8          grow or shrink the fleet of a run that is up
  asyncrl audit runs/demo                              what became of every prompt group; exit code 1 if one is lost
  asyncrl replay runs/demo --set algorithm.name=gspo   train again from the recorded log
  asyncrl import-model model.gguf models/my-model      GGUF to a Hugging Face folder
"""


_VENDORS_ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # a bar per process would bury the step lines
    "TOKENIZERS_PARALLELISM": "false",  # it warns about every fork otherwise
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    options = _parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # "my_rewards:score" beside the run file, as with `python -m`
    for name, value in _VENDORS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        code = _VERBS[options.verb](options)
    except ConfigError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        code = error.exit_code
    except AsyncRLError as error:
        logging.getLogger("asyncrl").debug("traceback", exc_info=True)
        print(f"asyncrl {options.verb}: {error}", file=sys.stderr)
        code = _exit_code(error)
    except Exception as error:
        logging.getLogger("traceback").exception("ended by")  # to this process's log file; stderr where there is none
        print(f"asyncrl {options.verb}: {type(error).__name__}: {error}", file=sys.stderr)
        code = _exit_code(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _exit_code(error: BaseException) -> int:
    """Of a process that ``error`` ends: what no restart heals decides, be it a cause or one of a group."""
    codes, waiting, seen = [1], [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:  # the one exception of a group has the group as its cause
            continue
        seen.add(id(one))
        if isinstance(one, AsyncRLError):
            codes.append(one.exit_code)
        elif isinstance(one, OSError) and one.errno in _FULL_DISK:
            codes.append(HopelessError.exit_code)
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        waiting += [one.__cause__] if one.__cause__ is not None else ()
    return max(codes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Post-training of language models by reinforcement learning in which nothing waits.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, summary: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=summary, description=summary)

    def run_file(sub: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
        sub.add_argument("run_file", metavar="RUN.toml", type=Path, nargs=nargs, help="the run file")
        setting(sub, "override one key of the run file; repeatable")

    def setting(sub: argparse.ArgumentParser, meaning: str) -> None:
        sub.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=meaning
        )

    run = verb("run", "Start and supervise a whole run on this machine.")
    learner = verb("learner", "Start the learner of a run against its bus.")
    worker = verb("rollout-worker", "Start one rollout worker of a run against its bus, on any node, at any time.")
    check = verb("check", "Print what a run file means and refuse what cannot work.")
    for sub in (run, learner, check):
        run_file(sub)
    run_file(worker, nargs="?")
    run.add_argument(
        "--launcher",
        default="",
        metavar="KIND",
        help="who starts the processes: local, ray, or package.module:Class (launcher.kind of the run file)",
    )
    for sub in (run, learner):
        sub.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    worker.add_argument("--name", default="", help="unique in the run (default: host and process id)")
    worker.add_argument("--join", default="", metavar="nats://HOST:PORT", help="instead of a run file: the run's bus")
    worker.add_argument("--run", default="", metavar="NAME", help="with --join: the run's name; its settings are there")

    doctor = verb("doctor", "Say what every actor of a run waits for and what is wrong; exit code 1 if anything is.")
    doctor.add_argument("where", metavar="RUN", type=Path, nargs="?", help="the run's folder, or its run file")
    setting(doctor, "override one key of the run, such as bus.url; repeatable")
    doctor.add_argument("--json", action="store_true", help="for a program")

    top = verb("top", "Show what a run does now: metrics, staleness, every rollout worker, and what is wrong.")
    top.add_argument("where", metavar="RUN", type=Path, nargs="?", help="the run's folder, or its run file")
    top.add_argument("--once", action="store_true", help="print it once, also to a terminal")
    setting(top, "override one key of the run, such as bus.url; repeatable")

    scale = verb("scale", "Grow or shrink the fleet of a run that is up; workers that leave drain.")
    scale.add_argument("where", metavar="RUN", type=Path, nargs="?", help="the run's folder, or its run file")
    scale.add_argument("--rollout-workers", type=int, required=True, metavar="N", help="so many of `asyncrl run`'s own")
    scale.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="to wait (default: 600)")
    setting(scale, "override one key of the run, such as bus.url; repeatable")

    import_model = verb("import-model", "Turn a GGUF file into a Hugging Face folder.")
    import_model.add_argument("source", help="a .gguf file, or package:NAME for one inside an installed package")
    import_model.add_argument("destination", type=Path, help="folder to make")
    import_model.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default: float32)")

    audit = verb("audit", "Account for every prompt group of a run: trained once, dropped, pending, or lost.")
    replay = verb("replay", "Train again from a run's recorded log, without any rollout.")
    for sub in (audit, replay):
        sub.add_argument("run_directory", metavar="RUN_DIR", type=Path, help="run.directory/run.name of the run")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    replay.add_argument("--from-step", type=int, default=1, metavar="K", help="first step to train (default: 1)")
    setting(replay, "train with another setting from step K on, such as algorithm.correction=none; repeatable")
    replay.add_argument("--out", type=Path, help="folder to write to (default: RUN_DIR/replay-1, -2, ...)")
    return parser


def _load(options: argparse.Namespace) -> RunConfig:
    from asyncrl import config

    return config.load(options.run_file, options.overrides)


def _run(options: argparse.Namespace) -> int:
    from asyncrl.commands import launch
    from asyncrl.commands.check import check

    if options.launcher:
        options.overrides.append(f"launcher.kind={json.dumps(options.launcher)}")
    config = _load(options)
    check(config)
    return launch.run(
        config, run_file=options.run_file, overrides=options.overrides, resume=options.resume, token=_token(config)
    )


def _learner(options: argparse.Namespace) -> int:
    from asyncrl import processes
    from asyncrl.commands import roles

    config = _load(options)
    processes.end_with_parent()
    config = _on_its_bus(config)
    if config.weights.channel == "nccl":
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang sets it; unlike settings cannot meet
    logs.log_to(config.run_directory / "logs" / "learner.log")
    return roles.run_learner(config, resume=options.resume, token=_token(config))


def _rollout_worker(options: argparse.Namespace) -> int:
    from asyncrl import processes
    from asyncrl.commands import roles

    processes.end_with_parent()
    config = _on_its_bus(_joined(options))
    name = options.name or roles.worker_name()
    logs.log_to(config.run_directory / "logs" / f"{name}.log")
    return roles.run_worker(config, name=name, token=_token(config))


def _joined(options: argparse.Namespace) -> RunConfig:
    """Of a worker: the run file, or what the run's learner left on its bus."""
    from asyncrl.commands import joining

    if options.run_file is not None and not (options.join or options.run):
        return _load(options)
    if options.run_file is not None or not (options.join and options.run):
        raise ConfigError("rollout-worker: name a run file, or a bus and a run: --join nats://HOST:PORT --run NAME")
    return joining.joined(options.join, options.run, options.overrides, token=os.environ.get("ASYNCRL_BUS_TOKEN", ""))


def _check(options: argparse.Namespace) -> int:
    from asyncrl.commands.check import describe

    print(describe(_load(options)))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from asyncrl import recorded
    from asyncrl.commands import doctor

    run = recorded.run_at(options.where, options.overrides, verb="doctor")
    return doctor.examine(run, token=_token(run), as_json=options.json)


def _top(options: argparse.Namespace) -> int:
    from asyncrl import recorded
    from asyncrl.commands import top

    run = recorded.run_at(options.where, options.overrides, verb="top")
    return top.top(run, token=_token(run), once=options.once)


def _scale(options: argparse.Namespace) -> int:
    from asyncrl import recorded
    from asyncrl.commands import scale

    run = recorded.run_at(options.where, options.overrides, verb="scale")
    return scale.scale(run, rollout_workers=options.rollout_workers, token=_token(run), seconds=options.timeout)


def _import_model(options: argparse.Namespace) -> int:
    from asyncrl.data.import_model import import_model

    import_model(options.source, options.destination, dtype=options.dtype)
    return 0


def _audit(options: argparse.Namespace) -> int:
    from asyncrl.commands.audit import audit

    return audit(options.run_directory, token=os.environ.get("ASYNCRL_BUS_TOKEN", ""), as_json=options.json)


def _replay(options: argparse.Namespace) -> int:
    from asyncrl.commands.replay import replay

    return replay(
        options.run_directory,
        from_step=options.from_step,
        overrides=options.overrides,
        out=options.out,
        token=os.environ.get("ASYNCRL_BUS_TOKEN", ""),
        as_json=options.json,
    )


_VERBS = {
    "run": _run,
    "learner": _learner,
    "rollout-worker": _rollout_worker,
    "check": _check,
    "doctor": _doctor,
    "top": _top,
    "scale": _scale,
    "import-model": _import_model,
    "audit": _audit,
    "replay": _replay,
}


def _on_its_bus(config: RunConfig) -> RunConfig:
    """With the address of the server that `asyncrl run` started, if it told us."""
    url = os.environ.get("ASYNCRL_BUS_URL", "")
    return dataclasses.replace(config, bus=dataclasses.replace(config.bus, address=url)) if url else config


def _token(config: RunConfig) -> str:
    """The bus's token: the environment wins, so that it need not be in a file."""
    return os.environ.get("ASYNCRL_BUS_TOKEN", config.bus.token)
