"""The agents of examples/agents, as their run files start them, in child processes, with a scripted model."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl import config
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.environments.load import load_rollout
from asyncrl.errors import ConfigError
from asyncrl.messages import PromptGroup, SamplingParams, Trajectory
from asyncrl.rewards.sandbox import open_sandbox
from examples.agents import coding, game, python_tool, search
from tests import ROOT
from tests.harness.agents import TOKENIZER, Scripted
from tests.harness.rollouts import saying

AGENTS = ROOT / "examples" / "agents"


async def play(name: str, row: dict[str, Any], generate: Any, tokenizer: Any, **options: Any) -> Sequence[Trajectory]:
    """Play one sample of the run file ``name``."""
    section = config.load(AGENTS / f"{name}.toml").rollout
    of_harness = {**section.options["harness_options"], "directory": str(ROOT), **options}
    if "processes" in of_harness:
        of_harness["processes"] = 1
    chosen = {**section.options, "harness_options": of_harness}
    made = load_rollout(config.RolloutSection(function="agent", options=chosen))(tokenizer)
    generate.attempt, generate.context_tokens = 1, 4096
    prompt = PromptGroup(
        group_id=0,
        prompt_tokens=[1],
        group_size=1,
        sampling=SamplingParams(max_new_tokens=section.max_new_tokens),
        prompt=row["prompt"],
        label=row.get("label"),
        metadata=row.get("metadata", {}),
    )
    try:
        return await made(prompt, generate, index=0)  # type: ignore[return-value]
    finally:
        await made.close()  # type: ignore[attr-defined]


def sandbox() -> dict[str, str]:
    """Where bubblewrap cannot start, the test's child runs without it; a user's run would be refused."""
    try:
        open_sandbox("bwrap").check()
    except ConfigError:
        return {"SANDBOX": "none"}
    return {}


async def test_search_finds_the_document_and_answers_from_it() -> None:
    row, tokenizer = list(search.rows())[5], make_tokenizer(search.ISLANDS + search.COUNTS + "?")
    (made,) = await play("search", row, saying("?J", row["label"], tokenizer=tokenizer), tokenizer)
    assert made.reward_parts == {"searched": 0.1, "found": 0.4, "right": 0.5}
    assert (made.reward, int(made.response_mask.sum())) == (1.0, 3)


def test_a_search_gives_the_document_that_fits_best_or_none() -> None:
    index = search.Index(["the cat sat", "the dog sat on the mat", "a bird"])
    assert [index.best(query) for query in ("the dog?", "A BIRD", "fish")] == ["the dog sat on the mat", "a bird", ""]


async def test_python_runs_in_the_sandbox_and_its_output_is_the_answer() -> None:
    row = next(iter(python_tool.rows()))
    tokenizer = make_tokenizer(python_tool.NAMES + python_tool.NUMBERS + ">")
    said = saying(f">{row['prompt'][-1]}", row["label"], tokenizer=tokenizer)
    (made,) = await play("python_tool", row, said, tokenizer, environment=sandbox())
    assert made.reward_parts == {"ran": 0.1, "seen": 0.4, "right": 0.5}


async def test_a_repository_is_mended_once_its_tests_have_said_what_they_want() -> None:
    row, tokenizer = list(coding.rows())[5 * 4], make_tokenizer("BCDF01234567")
    (made,) = await play("coding", row, saying("2", "5", tokenizer=tokenizer), tokenizer, environment=sandbox())
    assert (made.reward, made.reward_parts["turns"]) == (1.0, 2.0)
    assert "5" in tokenizer.decode(made.tokens[~made.response_mask])  # the tests' output, which is not trained


async def test_two_players_are_two_parts_and_each_has_its_own_reward() -> None:
    """A heap of 4: the players take one, one and two, and the first player wins."""
    tokenizer = make_tokenizer("01234567")
    row = next(row for row in game.rows() if row["prompt"] == "4")
    second, first = await play("game", row, saying("1", "1", "2", tokenizer=tokenizer), tokenizer)
    assert [turn.reward for turn in first.turn_rewards] == [0.0, 1.0]
    assert [turn.reward for turn in second.turn_rewards] == [-1.0]
    assert [tokenizer.decode(one.tokens[one.response_mask]) for one in (first, second)] == ["12", "1"]
    assert (first.reward, second.reward, first.reward_parts["best_moves"]) == (0.0, 0.0, 1.0)


# -- programs that are independent of asyncrl, where they are installed ------------------------------------------------


def venv_with(package: str) -> str:
    """Return the virtual environment with the package, from TEST_VENVS (paths separated by :)."""
    for folder in os.environ.get("TEST_VENVS", "").split(os.pathsep):
        if folder and glob.glob(str(Path(folder) / "lib" / "python*" / "site-packages" / package)):
            return folder
    return pytest.skip(f"no virtual environment of TEST_VENVS has {package}")


async def test_a_program_of_the_openai_agents_sdk_runs_untouched() -> None:
    venv = venv_with("agents")
    call = '<tool_call>\n{"name": "look_up", "arguments": {"island": "Koro"}}\n</tool_call>'
    engine = Scripted([call, "It has 7 lamps."])
    row = {"prompt": "How many lamps has the island Koro?", "label": "7"}
    (made,) = await play("openai_agents", row, engine, TOKENIZER, venv=venv)
    assert made.reward == 1.0 and len(engine.answers) == 2
    assert [*made.prompt_tokens.tolist(), *made.tokens.tolist()][: len(engine.given[1])] == engine.given[1]


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
