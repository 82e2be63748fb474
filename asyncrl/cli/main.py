"""The asyncrl command: finds the verb, runs it, and turns errors into one line and an exit code.

A verb is one file of this folder, with ``add_arguments(parser)`` and ``run(options) -> exit code``, and one row of
VERBS. Only the file of the verb that was asked for is imported.

Exit codes: 0 done, 1 failed, 2 configuration, 3 failed and would fail again (every group fails), 4 another worker has
this worker's name, 5 a disk cannot be written, 70 stuck, 130 interrupted,
141 nobody reads its output any more.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import errno
import importlib
import logging
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NoReturn, Protocol, cast

from asyncrl.errors import INTERRUPTED, PIPE_CLOSED, AsyncRLError, ConfigError, exit_code_of, leaves
from asyncrl.version import VERSION

VERBS: Final = {
    "run": "Start a whole run on this machine and keep it up until it is done.",
    "learner": "Start the learner of a run; it connects to the run's bus.",
    "rollout-worker": "Start one rollout worker of a run, on any machine, at any time.",
    "reward-worker": "Start one reward worker of a run (reward.workers), on any machine, at any time.",
    "check": "Print what a run file means, and refuse what cannot work.",
    "plan": "Measure an engine and the learner, and say how to share GPUs between them.",
    "doctor": "Show what every actor of a run waits for and what is wrong; exit code 1 if anything is.",
    "top": "Show what a run does now: metrics, staleness, every rollout worker, and what is wrong.",
    "serve": "Let external programs play a run's samples over HTTP and report the outcome.",
    "board": "Show runs on a web page: curves, what every actor does, groups, and answers token by token.",
    "scale": "Change the number of rollout workers of a running run; workers that leave drain first.",
    "samples": "Show what the model writes: prompts, answers, rewards, and what became of them.",
    "tap": "Print messages on a topic of a running run as they arrive.",
    "trace": "Write a timeline of a run for Perfetto or Chrome.",
    "diff": "Show where two runs differ: settings, batches, and the first step with different numbers.",
    "profile-engine": "Profile an SGLang server of this machine for some seconds.",
    "audit": "Account for every prompt group of a run: trained, dropped, pending or lost; exit code 1 if any is lost.",
    "replay": "Train a run again from its recorded log, without sampling.",
    "evaluate": "Evaluate saved models on data sets, without a run.",
    "import-eval": "Print the [evaluation] of a run file from the evaluation YAML of slime or Miles.",
    "import-model": "Convert a GGUF file, or a folder with FP8 weights, to a model folder that can be trained.",
    "convert": "Convert a Hugging Face model folder to a Megatron checkpoint, or back.",
}
"""Name and summary of each verb; its file has the name, with "_" for "-"."""

EXAMPLES: Final = """examples:
  asyncrl run examples/demo.toml                       everything on this machine
  asyncrl run my.toml --set run.steps=10 --resume      continue from the last checkpoint
  asyncrl check my.toml                                what the run file means, and whether it can work
  asyncrl plan my.toml --gpus 8                        how to share eight GPUs between learner and engines
  asyncrl top runs/demo                                what the run does now, on one screen
  asyncrl board runs/demo runs/other                   a web page of them, on http://127.0.0.1:8420
  asyncrl doctor runs/demo                             what every actor waits for, and what is wrong
  asyncrl serve my.toml                                let programs outside play the samples of a run
  asyncrl rollout-worker --join nats://learner-host:4222 --run my-run    join a run from any machine
  asyncrl scale runs/demo --rollout-workers 8          grow or shrink a run that is up
  asyncrl samples runs/demo --worst                    what the model writes, and what it is worth
  asyncrl tap runs/demo trajectories                   what flows on a topic now
  asyncrl trace runs/demo --steps 10:20                a timeline for ui.perfetto.dev
  asyncrl diff runs/a runs/b                           where two runs differ, and from which step on
  asyncrl profile-engine runs/my-run w0 --seconds 5    what an SGLang server spends its time on
  asyncrl audit runs/demo                              what became of every prompt group
  asyncrl replay runs/demo --set algorithm.name=gspo   train again from the recorded log
  asyncrl evaluate runs/demo --datasets my.toml        every saved model of a run on the data sets of my.toml
  asyncrl import-eval eval.yaml >> my.toml             data sets as slime names them
  asyncrl import-model model.gguf models/my-model      GGUF to a Hugging Face folder
  asyncrl convert models/my-model megatron/my-model    Hugging Face to Megatron's torch_dist, and back

`asyncrl VERB --help` explains one verb.
"""

_VENDORS_ENVIRONMENT: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # a bar per process would bury the step lines
    "TOKENIZERS_PARALLELISM": "false",  # it warns about every fork otherwise
}


_LONGEST_SHOWN: Final = 300
"""Characters of a path."""


class Verb(Protocol):
    """What the file of a verb defines."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """The exit code. Raises ConfigError for a mistake of the user."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, as from a shell; ``arguments`` default to the process's own. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in words if not word.startswith("-")), "")
    try:
        options, unknown = parser([name] if name in VERBS else []).parse_known_args(words)
        if unknown:
            _refuse(name, unknown)
    except SystemExit as ended:  # --help, --version or a mistake, which argparse has printed
        return ended.code if isinstance(ended.code, int) else 0
    except KeyboardInterrupt:  # while the verb is imported
        return INTERRUPTED
    sys.path.insert(0, os.getcwd())  # "my_rewards:score" beside the run file, as with `python -m`
    for variable, value in _VENDORS_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        code = _outside_event_loop(lambda: load(name).run(options))
    except ConfigError as error:
        print(f"asyncrl: {_in_a_line(error)}", file=sys.stderr)
        code = error.exit_code
    except AsyncRLError as error:
        logging.getLogger("asyncrl").debug("traceback", exc_info=True)
        print(f"asyncrl {name}: {_in_a_line(error)}", file=sys.stderr)
        code = exit_code_of(error)
    except BrokenPipeError:
        if not _is_left_by_reader():
            raise
        code = PIPE_CLOSED
    except OSError as error:  # the machine's, not ours
        logging.getLogger("asyncrl").debug("traceback", exc_info=True)
        where = f"{str(error.filename)[:_LONGEST_SHOWN]}: " if error.filename else ""
        print(f"asyncrl {name}: {where}{error.strerror or error}", file=sys.stderr)
        code = ConfigError.exit_code if error.errno == errno.ENAMETOOLONG else exit_code_of(error)
    except Exception as error:
        logging.getLogger("traceback").exception("ended by")  # to this process's log file; stderr where there is none
        said = dict.fromkeys(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))  # "a TaskGroup" says nothing
        print(f"asyncrl {name}: {'; '.join(said)}", file=sys.stderr)
        code = exit_code_of(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _in_a_line(error: Exception) -> str:
    """What it says may quote what a user wrote, or what a library said in several."""
    return " ".join(filter(None, (line.strip() for line in str(error).splitlines())))


def _is_left_by_reader() -> bool:
    """Whether nobody reads stdout any more, as behind `| head`; what is left is thrown away then."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # it is no file, as in a notebook
        return False
    pipe = select.poll()
    pipe.register(stdout, 0)
    is_left = any(events & (select.POLLERR | select.POLLHUP) for _, events in pipe.poll(0))
    if is_left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return is_left


def parser(verbs: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """The command line. Only ``verbs`` have their arguments, as this imports their files; of the others the summary."""
    made = _Parser(
        prog="asyncrl",
        description="Fully asynchronous reinforcement learning for language models.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"asyncrl {VERSION}")
    subparsers = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, summary in VERBS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in verbs:
            load(name).add_arguments(subparser)
    return made


class _Parser(argparse.ArgumentParser):
    """A mistake gets one line, without the usage before it; an option is written out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says more\n")


def _refuse(name: str, unknown: Sequence[str]) -> NoReturn:
    """End with the first word that the verb does not know, and the option that was meant perhaps."""
    asked = _Parser(prog=f"asyncrl {name}")
    load(name).add_arguments(asked)
    known = re.findall(r"--[a-z][a-z-]+", asked.format_help())
    near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
    asked.error(f"unknown argument {unknown[0]}{f', did you mean {near[0]}' if near else ''}")


def load(name: str) -> Verb:
    """Import the file of a verb."""
    return cast(Verb, importlib.import_module(f"asyncrl.cli.{name.replace('-', '_')}"))


def _outside_event_loop(command: Callable[[], int]) -> int:
    """Call it here, or in a thread of its own where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return command()
    with ThreadPoolExecutor(1, thread_name_prefix="asyncrl") as thread:
        return thread.submit(command).result()
