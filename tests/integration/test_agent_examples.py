"""The agents of examples/agents, as their run files start them, in child processes, with a scripted model."""

from __future__ import annotations

import glob
import http.server
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import config
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.environments.load import load_rollout
from asyncrl.errors import ConfigError
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory
from asyncrl.messages.control import ServerAddress
from asyncrl.rewards.sandbox import open_sandbox
from examples.agents import coding, game, python_tool, search, tau
from tests import ROOT
from tests.harness.agents import TOKENIZER, Scripted, pieces
from tests.harness.rollouts import saying

AGENTS = ROOT / "examples" / "agents"


async def play(
    name: str,
    row: dict[str, Any],
    generate: Any,
    tokenizer: Any,
    *,
    max_new_tokens: int = 0,
    context_tokens: int = 4096,
    **options: Any,
) -> Sequence[Trajectory]:
    """Play one sample of the run file ``name``."""
    section = config.load(AGENTS / f"{name}.toml").rollout
    of_harness = {**section.options["harness_options"], "directory": str(ROOT), **options}
    if "processes" in of_harness:
        of_harness["processes"] = 1
    chosen = {**section.options, "harness_options": of_harness}
    made = load_rollout(config.RolloutSection(function="agent", options=chosen))(tokenizer)
    generate.attempt, generate.context_tokens = 1, context_tokens
    prompt = PromptGroup(
        group_id=0,
        prompt_tokens=[1],
        group_size=1,
        sampling=SamplingParams(max_new_tokens=max_new_tokens or section.max_new_tokens),
        prompt=row["prompt"],
        label=row.get("label"),
        metadata=row.get("metadata", {}),
    )
    try:
        return await made(prompt, generate, index=0)  # type: ignore[return-value]
    finally:
        await made.close()  # type: ignore[attr-defined]


async def play_real(
    name: str, row: dict[str, Any], said: Sequence[str], *, max_new_tokens: int = 2000
) -> Sequence[Trajectory]:
    """Play a row for real models, with the settings of a real model, by what one would say."""
    engine = Scripted(said)
    return await play(name, row, engine, TOKENIZER, max_new_tokens=max_new_tokens, environment=sandbox())


def sandbox() -> dict[str, str]:
    """Where bubblewrap cannot start, the test's child runs without it; a user's run would be refused."""
    try:
        open_sandbox("bwrap").check()
    except ConfigError:
        return {"SANDBOX": "none"}
    return {}


async def test_a_tiny_model_searches_and_answers_in_a_token_each() -> None:
    row, tokenizer = next(search.tiny_rows()), make_tokenizer("", phrases=search.phrases())
    said = saying("<search>Iron</search>", "<answer>26</answer>", tokenizer=tokenizer)
    (made,) = await play("search", row, said, tokenizer)
    assert made.reward_parts == {"searched": 0.1, "found": 0.4, "right": 0.5}
    assert (made.reward, int(made.response_mask.sum())) == (1.0, 2)


async def test_an_answer_from_two_documents_counts_once_both_were_found() -> None:
    row = next(row for row in search.rows() if len(row["metadata"]["titles"]) == 2)
    one, two = row["metadata"]["titles"]
    look_up = [f"First I look for it. <search>{name} atomic number</search>" for name in (one, two)]
    (made,) = await play_real("search", row, [*look_up, f"<answer>{two}</answer>"])
    assert made.reward == 1.0
    (known,) = await play_real("search", row, [f"I know it. <answer>{two}</answer>"])
    assert known.reward == 0.0


def test_a_search_gives_the_documents_that_fit_best_or_none() -> None:
    index = search.Index(["the cat sat", "the dog sat on the mat", "a bird"])
    found = [index.best(query, count=2) for query in ("the dog?", "A BIRD", "fish")]
    assert found == [[1, 0], [2], []]


async def test_a_tiny_model_runs_python_and_its_output_is_the_answer() -> None:
    row = next(python_tool.tiny_rows())
    tokenizer = make_tokenizer("", phrases=python_tool.phrases())
    name = row["prompt"][-2]
    said = saying(f"```python\n{name}\n```", f"<answer>{row['label']}</answer>", tokenizer=tokenizer)
    (made,) = await play("python_tool", row, said, tokenizer, environment={"MOST_TOKENS": "1"} | sandbox())
    assert made.reward_parts == {"ran": 0.1, "seen": 0.4, "right": 0.5}


async def test_problems_are_solved_by_code_that_a_model_may_correct() -> None:
    row = next(row for row in python_tool.rows() if "decimal digits" in row["prompt"])
    power = re.search(r"\d+\*\*\d+", row["prompt"])
    assert power
    codes = [f"```python\nprint(sum({power[0]}))\n```", f"```python\nsum(map(int, str({power[0]})))\n```"]
    said = [*codes, f"The output says it. <answer>{row['label']}</answer>"]
    (made,) = await play_real("python_tool", row, said)
    assert made.reward == 1.0


def test_labels_of_problems_are_right() -> None:
    """Divisors of 6! = 720 = 2^4 x 3^2 x 5; the 20th Fibonacci number is 6765."""
    assert (python_tool.divisors_of_factorial(6), python_tool.fibonacci(20)) == (5 * 3 * 2, 765)
    assert [number for number in range(12) if python_tool.is_prime(number)] == [2, 3, 5, 7, 11]


async def test_a_repository_is_mended_once_its_tests_have_said_what_they_want() -> None:
    row = next(row for row in coding.rows() if row["metadata"]["edit"] == "leap.py")
    wrong, right = (
        f"```python\ndef is_leap(year):\n    return {rule}\n```"
        for rule in ("year % 4 == 0 and year % 100 > 0", "year % 400 == 0 or year % 4 == 0 and year % 100 > 0")
    )
    (made,) = await play_real("coding", row, [wrong, right])
    assert (made.reward, made.reward_parts["turns"]) == (1.0, 2.0)
    assert "every 400th" in TOKENIZER.decode(made.tokens[~made.response_mask])  # the tests' output, not trained


def test_every_repository_fails_its_tests_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "sandbox", lambda: open_sandbox("none"))
    assert not any(coding.run_tests(row["metadata"]["files"])[0] for row in coding.rows())


async def test_a_tiny_model_mends_a_file_of_one_digit() -> None:
    row, tokenizer = list(coding.tiny_rows())[5 * 4], make_tokenizer("", phrases=[*"BCDF01234567"])
    environment = {"MOST_TOKENS": "1"} | sandbox()
    (made,) = await play("coding", row, saying("2", "5", tokenizer=tokenizer), tokenizer, environment=environment)
    assert (made.reward, made.reward_parts["turns"]) == (1.0, 2.0)


async def test_two_players_are_two_parts_and_each_has_its_own_reward() -> None:
    """A heap of 5: the players take one, one and three, and the first player wins."""
    tokenizer = make_tokenizer("", phrases=game.phrases())
    said = saying("take 1", "take 1", "take 3", tokenizer=tokenizer)
    second, first = await play("game", game.row_of(5), said, tokenizer)
    assert [turn.reward for turn in first.turn_rewards] == [0.0, 1.0]
    assert [turn.reward for turn in second.turn_rewards] == [-1.0]
    assert [tokenizer.decode(one.tokens[one.response_mask]) for one in (first, second)] == ["take 1take 3", "take 1"]
    assert (first.reward, second.reward, first.reward_parts["best_moves"]) == (0.0, 0.0, 1.0)


async def test_a_player_that_names_no_move_loses() -> None:
    (first,) = await play_real("game", game.row_of(30), ["I think about it."])
    assert (first.turn_rewards[0].reward, first.reward_parts["legal"]) == (-1.0, 0.0)


async def test_a_sample_that_has_no_tokens_left_ends_with_what_it_earned() -> None:
    row, said = next(search.tiny_rows()), "<search>Iron</search>"
    (made,) = await play_real("search", row, [said], max_new_tokens=len(pieces(said)) + 1)
    assert made.reward == 0.5


class ScriptedChat:
    """Answers by a script, then has no tokens left; keeps what it was sent."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = [*messages, None]
        self.sent: list[dict[str, Any]] = []

    def send(self, *messages: dict[str, Any]) -> dict[str, Any] | None:
        self.sent += messages
        return self._messages.pop(0)


def serve(*messages: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]], list[dict[str, Any]]]:
    """Let a clerk serve a customer who is content with one word. Return outcome, actions, and what it was told."""
    acted, chat = list[tuple[str, Any]](), ScriptedChat(*messages)

    def act(name: str, arguments: dict[str, Any]) -> Any:
        acted.append((name, arguments))
        is_over = name == tau.RESPOND
        return SimpleNamespace(observation=f"did {name}", done=is_over, reward=1.0 if is_over else 0)

    return tau.serve(chat, "hello", act=act, options=tau.Options()), acted, chat.sent


def called(number: int, arguments: str, *, name: str = "cancel") -> dict[str, Any]:
    return {"id": f"call-{number}", "function": {"name": name, "arguments": arguments}}


def test_a_clerk_acts_with_tools_and_speaks_and_the_end_has_the_reward() -> None:
    calls = [called(0, '{"order": 1}'), called(1, "[]"), called(2, "no JSON"), called(3, "{}", name=tau.RESPOND)]
    outcome, acted, sent = serve({"content": None, "tool_calls": calls}, {"content": "It is done."})
    assert outcome == {"reward": 1.0, "metrics": {"turns": 2.0}}
    assert acted == [("cancel", {"order": 1}), ("respond", {"content": "It is done."})]
    wrong = "Error: no such tool, or its arguments are not a JSON object"
    assert [(one["role"], one.get("tool_call_id"), one["content"]) for one in sent] == [
        ("user", None, "hello"),
        ("tool", "call-0", "did cancel"),
        ("tool", "call-1", wrong),
        ("tool", "call-2", wrong),
        ("tool", "call-3", wrong),
    ]


def test_a_clerk_without_tokens_left_earns_nothing() -> None:
    outcome, acted, _ = serve({"content": "", "tool_calls": [called(0, "{}")]})
    assert (outcome, len(acted)) == ({"reward": 0.0, "finish_reason": "length"}, 1)


# -- programs that are independent of asyncrl, where they are installed ------------------------------------------------


def venv_with(package: str) -> str:
    """Return the virtual environment with the package, from TEST_VENVS (paths separated by :)."""
    for folder in os.environ.get("TEST_VENVS", "").split(os.pathsep):
        if folder and glob.glob(str(Path(folder) / "lib" / "python*" / "site-packages" / package)):
            return folder
    return pytest.skip(f"no virtual environment of TEST_VENVS has {package}")


@pytest.mark.parametrize(("program", "package"), [("openai_agents", "agents"), ("strands", "strands")])
async def test_a_program_of_an_agent_framework_runs_untouched(program: str, package: str) -> None:
    venv = venv_with(package)
    call = '<tool_call>\n{"name": "look_up", "arguments": {"island": "Koro"}}\n</tool_call>'
    engine = Scripted([call, "It has 7 lamps."])
    row = {"prompt": "How many lamps has the island Koro?", "label": "7"}
    (made,) = await play(program, row, engine, TOKENIZER, venv=venv)
    assert made.reward == 1.0 and len(engine.answers) == 2
    assert [*made.prompt_tokens.tolist(), *made.tokens.tolist()][: len(engine.given[1])] == engine.given[1]


@pytest.mark.parametrize(
    ("agent", "call"),
    [
        ("claude", {"name": "Bash", "arguments": {"command": "echo 7 > answer.txt", "description": "answer"}}),
        ("codex", {"name": "exec_command", "arguments": {"cmd": "echo 7 > answer.txt"}}),
    ],
)
async def test_claude_code_and_codex_run_untouched(agent: str, call: dict[str, Any]) -> None:
    """Where one of TEST_VENVS has them: npm install --prefix FOLDER @anthropic-ai/claude-code @openai/codex"""
    folders = [Path(one) / "node_modules" / ".bin" for one in os.environ.get("TEST_VENVS", "").split(os.pathsep)]
    programs = next((one for one in folders if (one / agent).exists()), None)
    if programs is None:
        pytest.skip(f"no folder of TEST_VENVS has {agent}")
    engine = Scripted([f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "It is written."])
    row = {"prompt": "How many lamps has the island Koro?", "label": "7"}
    (made,) = await play(
        "coding_cli",
        row,
        engine,
        TOKENIZER,
        context_tokens=200_000,
        command=["python", "examples/agents/coding_cli.py", agent],
        environment={"PATH": os.pathsep.join([str(programs), os.environ["PATH"]])},
    )
    assert made.reward == 1.0 and len(engine.answers) == 2
    assert [*made.prompt_tokens.tolist(), *made.tokens.tolist()][: len(engine.given[1])] == engine.given[1]


class Customer(http.server.BaseHTTPRequestHandler):
    """A server of OpenAI's protocol that plays a customer of two messages."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        said = "###STOP###" if any(one["role"] == "assistant" for one in asked) else "I want to return two things."
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(("items", "reward"), [(["9624127908", "8917609800"], 1.0), (["9624127908"], 0.0)])
async def test_a_customer_of_tau_bench_is_served_and_the_package_rewards_it(items: list[str], reward: float) -> None:
    """By the database: task 0 is a return of two things."""
    venv = venv_with("tau_bench")
    order = {"order_id": "#W6067464", "item_ids": items, "payment_method_id": "credit_card_4190576"}
    call = {"name": "return_delivered_order_items", "arguments": order}
    engine = Scripted([f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "Your return is requested."])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Customer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        engine.servers = {"user": ServerAddress(name="user", url=url, model="user")}
        row = {"prompt": "task 0", "metadata": {"task": 0}}
        (made,) = await play("tau", row, engine, TOKENIZER, context_tokens=100_000, venv=venv)
        server.shutdown()
    assert (made.reward, made.reward_parts) == (reward, {"turns": 2.0})


async def test_an_environment_of_verifiers_runs_untouched() -> None:
    venv = venv_with("verifiers/envs")
    engine = Scripted(["It has 3 lamps."])
    row = {"prompt": "task 1", "metadata": {"task": 1}}
    (made,) = await play("verifiers", row, engine, TOKENIZER, venv=venv, directory=str(AGENTS))
    assert made.reward == 1.0 and made.response_mask.all()


@pytest.mark.parametrize("program", ["null", "bash"])
async def test_a_program_that_comes_with_verifiers_plays_its_tasks_untouched(program: str) -> None:
    venv = venv_with("verifiers/v1/harnesses")
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((1 + 2)) lamps"}}\n</tool_call>'
    engine = Scripted([*([call] if program == "bash" else []), "It has 3 lamps."])
    row = {"prompt": "task 1", "metadata": {"task": 1}}
    agent = {"harness": {"id": program}, "runtime": {"type": "subprocess"}}
    options = {"environment": "lamp_tasks", "arguments": {"agent": agent}, "directory": str(AGENTS)}
    (made,) = await play("verifiers", row, engine, TOKENIZER, venv=venv, **options)
    assert made.reward == 1.0 and len(engine.given) == len(engine.answers) == (2 if program == "bash" else 1)
    assert [*made.prompt_tokens.tolist(), *made.tokens.tolist()][: len(engine.given[-1])] == engine.given[-1]
