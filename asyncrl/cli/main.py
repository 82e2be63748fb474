"""The asyncrl command: finds the verb, runs it, and turns errors into one line and an exit code.

Each verb is one file in this folder, or in a room that stands apart (APART), with ``add_arguments(parser)`` and
``run(options) -> exit code``, and one row of VERBS. Only the file of the requested verb is imported.

Exit codes: 0 done; 1 failed; 2 a wrong configuration, or a failure that a restart would repeat; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import TextIOWrapper
from typing import Any, Final, NoReturn, Protocol, cast

from asyncrl.cli.head_comment import command_that_makes
from asyncrl.errors import INTERRUPTED, AsyncRLError, ConfigError, exit_code_of, leaves
from asyncrl.logs import as_typed, in_a_line, printable
from asyncrl.version import VERSION

VERBS: Final = {
    "run": "Start a whole run on this machine and keep it up until it is done.",
    "learner": "Start the learner of a run; it connects to the run's bus.",
    "rollout-worker": "Start one rollout worker of a run, on any machine, at any time.",
    "engine-node": "Start another machine's part of a rollout worker's engine (engine.options.machines).",
    "model-server": "Start the server of a frozen model of a run, such as a judge: [servers.NAME] of its run file.",
    "check": "Print what a run file changes and what follows from it, and refuse what cannot work.",
    "plan": "Measure an engine and the learner, and recommend how to split GPUs between them.",
    "doctor": "Show what every actor of a run waits for and what is wrong; exit code 1 if anything is.",
    "top": "Show what a run does now: metrics, staleness, every rollout worker, and what is wrong.",
    "serve": "Let external programs play a run's samples over HTTP and report the outcome.",
    "board": "Show runs on a web page: curves, what every actor does, groups, and answers token by token.",
    "scale": "Change the number of rollout workers of a running run; workers that leave drain first.",
    "swap": "Replace the learner of a running run by one with other settings; the engines go on.",
    "shadow": "Train what a running run trains with other settings, beside it.",
    "promote": "Make a shadow the learner of its run; the engines go on.",
    "samples": "Show what the model writes: prompts, answers, rewards, and what became of them.",
    "tap": "Print messages on a topic of a running run as they arrive.",
    "trace": "Write a timeline of a run for Perfetto or Chrome.",
    "audit": "Account for every prompt group of a run: trained, dropped, pending or lost; exit code 1 if any is lost.",
    "replay": "Train a run again from its recorded log, without sampling.",
    "regrade": "Grade a run's recorded answers again, and write a branch of the run that was trained so.",
    "explain": "Find what moved a metric: which worker, engine, task or prompts; exit code 1 if nothing is found.",
    "certify": "Write down what a version was made from: data, samplers, code, settings; or check such a file.",
    "bill": "Show what a run's GPUs were spent on: by fate, task, prompt and worker, and per trained token.",
    "evaluate": "Evaluate saved models on data sets, without a run.",
    "import-eval": "Print the [evaluation] of a run file from the evaluation YAML of slime or Miles.",
    "import-model": "Convert a GGUF file, or a folder as it is published (FP8, INT4, MXFP4), to a folder for training.",
    "quantize": "Write a Hugging Face model folder in FP8 or INT4, for engines.",
    "convert": "Convert a Hugging Face model folder to a Megatron checkpoint, or back.",
}
"""Name and summary of each verb. The file of a verb has its name, with "_" for "-"."""

APART: Final = {
    "board": "asyncrl.board.command",
    "convert": "asyncrl.contrib.importers.convert",
    "import-eval": "asyncrl.contrib.importers.slime_evaluation",
    "import-model": "asyncrl.contrib.importers.command",
    "plan": "asyncrl.planning.command",
    "quantize": "asyncrl.contrib.importers.quantize",
}
"""Verbs whose modules stand apart: nothing imports them but this table, by name."""

_MEANT: Final = {
    **dict.fromkeys(("train", "start", "launch", "resume", "continue", "rl", "sft", "grpo", "fit"), "run"),
    **dict.fromkeys(("worker", "rollout", "rollouts", "join"), "rollout-worker"),
    **dict.fromkeys(("validate", "lint", "config", "show", "dry-run"), "check"),
    **dict.fromkeys(("trainer",), "learner"),
    **dict.fromkeys(("status", "watch", "monitor", "stats", "ps"), "top"),
    **dict.fromkeys(("ui", "web", "dashboard", "view"), "board"),
    **dict.fromkeys(("debug", "diagnose", "health"), "doctor"),
    **dict.fromkeys(("eval", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("import", "gguf"), "import-model"),
    **dict.fromkeys(("export",), "convert"),
    **dict.fromkeys(("answers", "logs", "generations"), "samples"),
    **dict.fromkeys(("rescore", "relabel", "retract", "undo", "branch"), "regrade"),
    **dict.fromkeys(("cost", "costs", "invoice"), "bill"),
    **dict.fromkeys(("why", "blame", "bisect"), "explain"),
    **dict.fromkeys(("provenance", "sign", "attest"), "certify"),
}
"""Names that other programs have for our verbs."""

EXAMPLES: Final = """examples:
  asyncrl run examples/demo.toml                       everything on this machine
  asyncrl run my.toml --set run.steps=10 --resume      continue from the last checkpoint
  asyncrl check my.toml                                print what it changes and means, refuse what cannot work
  asyncrl plan my.toml --gpus 8                        how to share eight GPUs between learner and engines
  asyncrl top runs/demo                                what the run does now, on one screen
  asyncrl board runs/demo runs/other                   a web page of them, on http://127.0.0.1:8420
  asyncrl doctor runs/demo                             what every actor waits for, and what is wrong
  asyncrl serve my.toml                                let external programs play the samples of a run
  asyncrl rollout-worker my.toml --set bus.url=nats://HOST:4222    join a run from any machine
  asyncrl scale runs/demo --rollout-workers 8          grow or shrink a running run
  asyncrl samples runs/demo --worst                    groups with the lowest-rewarded answers
  asyncrl tap runs/demo trajectories                   messages on a topic as they arrive
  asyncrl trace runs/demo --steps 10:20                a timeline for ui.perfetto.dev
  asyncrl audit runs/demo                              what became of every prompt group
  asyncrl replay runs/demo --set algorithm.name=gspo   train again from the recorded log
  asyncrl regrade runs/demo --reward my_rewards:score  the run as it had been with another reward, as a branch
  asyncrl explain runs/demo --metric reward/mean       what moved it: which worker, engine, task
  asyncrl certify runs/demo --version 40               what a version of the model was made from, as JSON
  asyncrl bill runs/demo --price 3                     GPU-seconds per trained token, and their cost
  asyncrl evaluate runs/demo --datasets my.toml        every saved model of a run on the data sets of my.toml
  asyncrl import-model model.gguf models/my-model      GGUF to a Hugging Face folder
  asyncrl convert models/my-model megatron/my-model    Hugging Face to Megatron's torch_dist, and back

`asyncrl VERB --help` explains one verb.
"""

_VENDORS_ENVIRONMENT: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # a progress bar per process would hide the step lines
    # A thread of a learner that spins while it waits for its others takes a core from an engine. On two cores, with
    # SmolLM2-135M, a step took 45 s with it and 23 s without.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",  # otherwise tokenizers warns about every fork
}


class Verb(Protocol):
    """Functions that the file of each verb defines."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Run the verb and return the exit code. Raises ConfigError for a user error."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command as from a shell and return its exit code. ``arguments`` default to those of the process."""
    is_deaf = sys.flags.ignore_environment  # python -I and -E
    if arguments is None and sys.getfilesystemencoding() != "utf-8" and not is_deaf:
        _begin_again_in_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a notebook has others
            # Answers and paths may have characters that a terminal or pipe cannot show.
            with contextlib.suppress(OSError):  # it was redirected after Python opened it, from a file to a pipe
                stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in words if not word.startswith("-")), "")
    try:
        if name and name not in VERBS:
            _Parser(prog="asyncrl").error(_unknown_verb(name))
        options, unknown = parser([name] if name in VERBS else []).parse_known_args(words)
        if unknown:
            _refuse(name, unknown)
    except SystemExit as ended:  # --help, --version, or an error that argparse has printed
        return ended.code if isinstance(ended.code, int) else 0
    # Finds "my_rewards:score" in the working directory. Last, so that a user's http.py does not replace Python's.
    sys.path.append(os.getcwd())
    for variable, value in _VENDORS_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        code = _outside_event_loop(lambda: load(name).run(options))
        sys.stdout.flush()
    except AsyncRLError as error:
        logging.getLogger("asyncrl").debug("traceback", exc_info=True)
        where = "asyncrl" if isinstance(error, ConfigError) else f"asyncrl {name}"
        print(f"{where}: {as_typed(in_a_line(str(error)))}{_how_to_make(options, error)}", file=sys.stderr)
        code = exit_code_of(error)
    except BrokenPipeError:  # the reader of stdout is gone, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:  # an error of the machine
        logging.getLogger("asyncrl").debug("traceback", exc_info=True)
        where = f"{error.filename}: " if error.filename else ""
        print(f"asyncrl {name}: {in_a_line(f'{where}{error.strerror or error}')}", file=sys.stderr)
        code = exit_code_of(error)
    except Exception as error:
        logging.getLogger("traceback").exception("ended by")  # to this process's log file; to stderr if it has none
        # the message of a TaskGroup's error alone says nothing
        said = dict.fromkeys(f"{type(leaf).__name__}: {leaf}" for leaf in leaves(error))
        print(f"asyncrl {name}: {in_a_line('; '.join(said))}", file=sys.stderr)
        code = exit_code_of(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    return code


def _begin_again_in_utf8() -> NoReturn:
    """Replace this process by one that reads and writes UTF-8, as our files are, whatever the locale says.

    Paths and answers with other letters than the locale's would end it anywhere. The terminal is written to as before.
    """
    encodings = {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{sys.stdout.encoding}:backslashreplace"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | encodings)


def parser(verbs: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """Return the command line parser.

    Only ``verbs`` get their arguments, because that imports their files; the others have only a summary.
    """
    made = _Parser(
        prog="asyncrl",
        description="Fully asynchronous reinforcement learning for language models.",
        epilog=as_typed(EXAMPLES),
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
    """Reports an error in one line without the usage. Options may not be abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, as_typed(f"{self.prog}: {message}; `{self.prog} --help` says more\n"))


def _refuse(name: str, unknown: Sequence[str]) -> NoReturn:
    """Exit with an error for the first unknown argument, and suggest the closest option."""
    subparser = _Parser(prog=f"asyncrl {name}")
    load(name).add_arguments(subparser)
    known = re.findall(r"--[a-z][a-z-]+", subparser.format_help())
    near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
    subparser.error(f"unknown argument {unknown[0]}{f', did you mean {near[0]}' if near else ''}")


def _how_to_make(options: argparse.Namespace, error: AsyncRLError) -> str:
    """Return how the run file says that a missing file is made."""
    run_file = getattr(options, "run_file", None)
    if run_file is None or not isinstance(error, ConfigError):
        return ""
    command = command_that_makes(run_file, str(error))
    return f"; make it as {run_file} says: {printable(command)}" if command else ""


def _unknown_verb(name: str) -> str:
    """Return an error with the verb that was probably meant."""
    if name.endswith(".toml"):
        return f"{name} is a run file; did you mean `asyncrl run {name}`"
    meant = _MEANT.get(name) or next(iter(difflib.get_close_matches(name, VERBS, 1, cutoff=0.5)), "")
    return f"there is no {name!r}" + (f", did you mean `asyncrl {meant}`" if meant else "")


def load(name: str) -> Verb:
    """Import the file of a verb."""
    return cast(Verb, importlib.import_module(APART.get(name) or f"asyncrl.cli.{name.replace('-', '_')}"))


def _outside_event_loop(command: Callable[[], int]) -> int:
    """Call ``command`` in this thread, or in a new thread if an event loop already runs here, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return command()
    with ThreadPoolExecutor(1, thread_name_prefix="asyncrl") as thread:
        return thread.submit(command).result()
