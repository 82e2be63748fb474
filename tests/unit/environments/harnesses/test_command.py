"""harness = command: what a program receives, what is read from it, and what happens when it fails."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from asyncrl import keeper
from asyncrl.config import tables
from asyncrl.environments.agent.harnesses.command import REWARD_FILE, CommandHarness, Options
from asyncrl.environments.agent.harnesses.environment import endpoint_variables
from asyncrl.environments.agent.harnesses.load import Limited, load_harness
from asyncrl.environments.agent.harnesses.protocol import Endpoint, Outcome, Task, outcome_of
from asyncrl.errors import ConfigError, Outage, RolloutError
from asyncrl.program import Program
from tests.unit.environments.harnesses.tasks import (
    ENDPOINT,
    ENVIRONMENT,
    TASK,
    is_gone,
    python,
    read_when_there,
    until_gone,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found on Linux only")


async def played(script: str, **options: Any) -> Outcome:
    return await CommandHarness(Options(command=tuple(python(script)), **options))(TASK, ENDPOINT)


async def failure(script: str, **options: Any) -> str:
    with pytest.raises(RolloutError) as raised:
        await played(script, **options)
    return str(raised.value)


async def test_a_program_gets_the_task_and_finds_the_model_by_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_BUS_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.setenv("HF_TOKEN", "allowed")
    seen = tmp_path / "seen"
    script = (
        f"import json, os, sys; json.dump([json.load(sys.stdin), dict(os.environ)], open({str(seen)!r}, 'w')); "
        "print('{\"reward\": 1}')"
    )
    await played(script, environment={"LEVEL": "easy"}, inherit=("HF_TOKEN",))
    task, environment = json.loads(seen.read_text())
    assert task == {
        "prompt": "What is 3 + 4?",
        "messages": [{"role": "user", "content": "What is 3 + 4?"}],
        "label": "7",
        "metadata": {"row": 1},
        "group_id": 5,
        "index": 2,
        "seed": 11,
        "servers": {},
    }
    assert environment["OPENAI_BASE_URL"] == "http://127.0.0.1:1234/v1"
    assert environment["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1234"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] == "key-of-this-sample"
    assert environment["OPENAI_MODEL"] == "policy"
    assert environment["LEVEL"] == "easy" and environment["HF_TOKEN"] == "allowed"
    assert "ASYNCRL_BUS_TOKEN" not in environment


@pytest.mark.parametrize(
    ("given", "direct"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "intern.org, 10.0.0.0/8"}, "intern.org,10.0.0.0/8,127.0.0.1,localhost"),
        ({"NO_PROXY": "a.org", "no_proxy": "b.org,127.0.0.1"}, "a.org,b.org,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_no_proxy_is_asked_for_the_endpoint_in_any_spelling(given: dict[str, str], direct: str) -> None:
    found = endpoint_variables(ENDPOINT, given)
    assert (found["NO_PROXY"], found["no_proxy"]) == (direct, direct)


async def test_the_reward_is_the_line_that_is_an_object_with_a_reward() -> None:
    table = {"reward": 1, "reward_parts": {"right": 1}, "turn_rewards": [0, 1], "metrics": {"tools": 2}}
    assert await played(f"print('thinking'); print({json.dumps(table)!r}); print('done')") == Outcome(
        reward=1.0, reward_parts={"right": 1.0}, turn_rewards=(0.0, 1.0), metrics={"tools": 2.0}
    )


@pytest.mark.parametrize(
    ("script", "is_outage"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 1))", True),
        ("import sys; print('no search engine', file=sys.stderr); sys.exit(75)", True),
        ("raise TimeoutError", True),
        ("raise ValueError('ConnectionError: said the model')", False),
        ("import sys; sys.exit(1)", False),
    ],
)
async def test_a_program_that_ends_because_a_service_is_away_says_so(script: str, is_outage: bool) -> None:
    with pytest.raises(RolloutError) as raised:
        await played(script)
    assert isinstance(raised.value, Outage) is is_outage


@pytest.mark.parametrize("said", ["7", "[7]", "0.5", '{"answer": 7}', "true", '"reward"', "reward: 1", "NaN"])
async def test_what_the_model_said_is_not_the_reward(said: str) -> None:
    assert (await played(f"print('{{\"reward\": 0.0}}'); print('the model said:'); print({said!r})")).reward == 0.0
    assert "a number alone is not read" in await failure(f"print({said!r})")


async def test_a_reward_that_the_model_writes_beside_the_programs_is_refused() -> None:
    reason = await failure("print('{\"reward\": 0.0}'); print('{\"reward\": 1.0}')")
    assert 'printed several rewards, {"reward": 0.0} and {"reward": 1.0}' in reason and REWARD_FILE in reason
    assert (await played("print('{\"reward\": 0.5}\\n' * 2)")).reward == 0.5


async def test_the_reward_is_in_a_file_where_output_is_no_place_for_it() -> None:
    for text, reward in (("0.5", 0.5), ('{"reward": 0.5}\n', 0.5), ('seen\n{"reward": 0.25}\n7\n', 0.25)):
        write = f"import os; print('{{\"reward\": 9}}'); open(os.environ['REWARD_FILE'], 'w').write({text!r})"
        assert (await played(write, reward="file")).reward == reward
    assert "wrote no reward" in await failure("print(1)", reward="file")


async def test_a_reward_over_several_lines_is_read_from_a_file_and_refused_in_output() -> None:
    for indent in (0, 2):
        table = f"json.dumps({{'reward': 0.5, 'turn_rewards': [1, 2, 3]}}, indent={indent})"
        write = f"import json, os; open(os.environ['REWARD_FILE'], 'w').write({table})"
        assert await played(write, reward="file") == Outcome(reward=0.5, turn_rewards=(1.0, 2.0, 3.0))
        reason = await failure(f"import json; print({table})")
        assert "over several lines; print it on one line" in reason


async def test_a_program_that_gives_no_reward_fails_its_sample_with_the_reason() -> None:
    assert "gave no reward" in await failure("print('hello')")
    assert "gave no reward" in await failure("print('{\"metrics\": {}}')")
    assert "gave no reward" in await failure("print('{\"reward\": null}')")
    assert "reward is nan" in await failure("print('{\"reward\": NaN}')")
    assert "reward is a number" in await failure('print(\'{"reward": "1"}\')')
    assert "no 'rewards'" in await failure('print(\'{"reward": 1, "rewards": 1}\')')
    assert (await failure("import sys; print('no tool found', file=sys.stderr)")).endswith(": no tool found")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import sys; print(1); sys.exit('no such tool')", "ended with exit code 1: no such tool"),
        ("import nothing_here", "ended with exit code 1: ModuleNotFoundError: No module named 'nothing_here'"),
        ("raise ExceptionGroup('tools', [KeyError('a')])", "ended with exit code 1: | KeyError: 'a'"),
        ("print('cannot log in'); raise SystemExit(3)", "ended with exit code 3: cannot log in"),
        ("import os; os.close(0); os._exit(4)", "ended with exit code 4"),
    ],
)
def test_the_last_line_of_a_program_that_dies_at_once_is_the_reason(script: str, reason: str) -> None:
    """On uvloop, as in a worker: it raises RuntimeError where a pipe has been closed."""
    uvloop = pytest.importorskip("uvloop")

    async def play() -> list[str]:
        return list(await asyncio.gather(*(failure(script) for _ in range(8))))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert {*runner.run(play())} == {f"harness command: {reason}"}


CONFINED = (
    *("bwrap", "--unshare-all", "--share-net", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc"),
    *("--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/root", "--tmpfs", "/home"),
    *("--bind", "{reward_folder}", "{reward_folder}", "--"),
)
"""As docs/guides/environments.md has it."""


@pytest.mark.skipif(
    subprocess.run(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"], check=False).returncode != 0
    if shutil.which("bwrap")
    else True,
    reason="bubblewrap cannot start here",
)
async def test_a_program_below_bubblewrap_reaches_the_endpoint_and_no_file_of_the_workers() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with tempfile.NamedTemporaryFile(dir="/tmp") as secret, server:
        script = (
            "import json, os, socket; found = {}\n"
            f"socket.create_connection({server.getsockname()!r}).close()\n"
            f"found['secret'] = float(os.path.exists({secret.name!r}))\n"
            "try: open('/usr/here', 'w'); found['wrote'] = 1.0\n"
            "except OSError: found['wrote'] = 0.0\n"
            f"json.dump({{'reward': 0.5, 'metrics': found}}, open(os.environ[{REWARD_FILE!r}], 'w'))"
        )
        command = (*CONFINED, "/usr/bin/env", "python3", "-c", script)
        outcome = await CommandHarness(Options(command=command, reward="file"))(TASK, ENDPOINT)
        assert outcome == Outcome(reward=0.5, metrics={"secret": 0.0, "wrote": 0.0})


async def test_a_cancelled_sample_ends_its_program(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"import os, time; open({str(file)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    sample = asyncio.ensure_future(played(script))
    pid = int(await read_when_there(file))
    sample.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sample
    await until_gone(pid)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": []}, "command is empty"),
        ({"command": ["no-such-agent"]}, "'no-such-agent' cannot be started: it is not on PATH"),
        ({"command": ["/nowhere/agent"]}, "it is not there, or not executable"),
        ({"command": ["python3", "-u", "no_agent.py"]}, "'python3' cannot run 'no_agent.py': no such file (from "),
        ({"command": ["python3", "/nowhere/agent.py"]}, "cannot run '/nowhere/agent.py': no such file"),
        ({"command": ["python3"], "venv": "/nowhere"}, "venv: /nowhere is not a virtual environment"),
        ({"command": ["python3"], "directory": "/nowhere"}, "directory: /nowhere is not a folder"),
        ({"command": ["python3"], "environment": {"A": 1}}, "'A' must be a text"),
        ({"command": ["python3"], "reward": "stderr"}, "reward must be one of"),
        ({"command": ["python3", "{reward_folder}"]}, 'command: {reward_folder} is there only with reward = "file"'),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tables.build(Options, options, "rollout.options.harness_options")
    assert problem in str(raised.value) and "\n" not in str(raised.value)


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
        assert await program.wait_for_problem() == words
        await program.end()


async def test_a_program_and_its_children_may_take_so_much_memory_together() -> None:
    hog = "import os, time\nos.fork()\nheld = b'x' * (120 * 2**20)\ntime.sleep(1000)"  # two processes of 120 MiB
    program = await Program.start(python(hog), environment=ENVIRONMENT, memory_mib=200)
    assert await program.wait_for_problem() == "took more than memory_mib = 200 of memory"
    await program.end()


async def never(task: Task, endpoint: Endpoint) -> Outcome:
    await asyncio.Event().wait()
    return Outcome()


async def raises(task: Task, endpoint: Endpoint) -> Outcome:
    raise TimeoutError("of its own")


async def test_a_sample_that_takes_too_long_is_cut_or_fails_as_the_run_file_says() -> None:
    cut = Limited(never, name="never", timeout_seconds=0.01, on_timeout="truncate", timeout_reward=-1.0)
    outcome = await cut(TASK, ENDPOINT)
    assert (outcome.finish_reason, outcome.reward, outcome.metrics) == ("length", -1.0, {"timeout": 1.0})
    with pytest.raises(RolloutError, match=r"harness never: took longer than timeout_seconds = 0\.01 for a sample"):
        await Limited(never, name="never", timeout_seconds=0.01)(TASK, ENDPOINT)


def test_a_harness_is_found_by_name_or_address_and_a_mistake_is_told_in_one_line() -> None:
    load_harness("command", {"command": ["python3"]})
    load_harness("no_such_package.module:Harness", {"processes": 2})  # a child process will import it
    for name, options, problem in (
        ("comand", {}, "rollout.options.harness: 'comand' is unknown; did you mean 'command'?"),
        ("my pkg:Harness", {}, "rollout.options.harness: 'my pkg:Harness' is not an address"),
        ("command", {"program": "x"}, "rollout.options.harness_options: unknown key 'program'"),
        ("my_pkg:Harness", {"venv": "/nowhere"}, "rollout.options.harness_options: venv: /nowhere is not a virtual"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_harness(name, options)
        assert str(raised.value).startswith(problem)


def test_an_outcome_is_a_number_a_table_or_nothing() -> None:
    assert outcome_of(None) == Outcome()
    assert outcome_of(True) == Outcome(reward=1.0)
    assert outcome_of(Outcome(reward=2, turn_rewards=[1])) == Outcome(reward=2.0, turn_rewards=(1.0,))
    keyed = {"a": 1, "b": [0, 0.5]}
    assert outcome_of({"turn_rewards": keyed}) == Outcome(turn_rewards={"a": 1.0, "b": (0.0, 0.5)})
    keyed_wrong = ({"turn_rewards": {"a": value}} for value in ("1", None, [None], {"b": 1}, float("nan")))
    for wrong in (
        "1",
        [1],
        {"reward": "1"},
        {"reward": float("inf")},
        {"turn_rewards": 1},
        {"metrics": [1]},
        *keyed_wrong,
    ):
        with pytest.raises(ValueError, match=r"."):
            outcome_of(wrong)


def test_a_name_of_both_a_part_and_a_metric_is_refused_as_one_would_hide_the_other() -> None:
    both = {"reward": 1, "reward_parts": {"right": 1}, "metrics": {"right": 0, "turns": 2}}
    with pytest.raises(ValueError, match="'right' is in reward_parts and in metrics"):
        outcome_of(both)
    with pytest.raises(ValueError, match="'right' is in reward_parts and in metrics"):
        outcome_of(Outcome(reward_parts={"right": 1.0}, metrics={"right": 1.0}))
    assert outcome_of(both | {"metrics": {"turns": 2}}).metrics == {"turns": 2.0}
