"""What users bring as rollout.function: how it is found, checked and made; the example; the page that shows how."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray

from asyncrl import app, config
from asyncrl.actors.rollouts import given, single_turn
from asyncrl.bus.memory import MemoryBus
from asyncrl.commands import check
from asyncrl.data import demo_task
from asyncrl.data.tiny_model import make_tokenizer
from asyncrl.errors import ConfigError, RewardError
from asyncrl.messages import PromptGroup, Sampling, Trajectory, VersionSpan
from asyncrl.protocols import Generate, Generation, Reward, RolloutFn, Sample
from asyncrl.rewards.load import load_reward
from asyncrl.rollout_functions import load_rollout
from asyncrl.turns import Turns
from tests import fakes
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "customize.md"
HERE = "tests.test_rollout_functions"


# -- what a run file may name ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    calls: int = 2


class Play:
    def __init__(self, tokenizer: Any, options: Options) -> None:
        self.tokenizer, self.options = tokenizer, options

    async def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        return await single_turn(prompt, generate, index=index)


class RefusesToBeMade(Play):
    def __init__(self, tokenizer: Any, options: Options) -> None:
        raise ValueError("no such tool")


class TakesTooLittle(Play):
    def __init__(self, tokenizer: Any) -> None: ...


class Uncallable:
    def __init__(self, tokenizer: Any, options: Options) -> None: ...


class Blocking(Uncallable):
    def __call__(self, prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        raise NotImplementedError


class WithoutIndex(Uncallable):
    async def __call__(self, prompt: PromptGroup, generate: Generate) -> Trajectory:
        raise NotImplementedError


async def play(prompt: PromptGroup, generate: Generate, *, index: int, calls: int = 2) -> Trajectory:
    return await single_turn(prompt, generate, index=index)


async def anything(*arguments: Any, **named: Any) -> Trajectory:
    raise NotImplementedError


@functools.wraps(play)
def decorated(*arguments: Any, **named: Any) -> Any:
    return play(*arguments, **named)


made_before = Play(None, Options())
partial = functools.partial(play, calls=3)


def blocking(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
    raise NotImplementedError


async def without_index(prompt: PromptGroup, generate: Generate) -> Trajectory:
    raise NotImplementedError


async def wants_more(prompt: PromptGroup, generate: Generate, reward: float, *, index: int) -> Trajectory:
    raise NotImplementedError


def load(name: str, *, tokenizer: Any = None, **options: Any) -> RolloutFn:
    address = name if ":" in name or name in app.ROLLOUTS else f"{HERE}:{name}"
    return load_rollout(config.Rollout(function=address, options=options), table=app.ROLLOUTS)(tokenizer)


def test_a_function_stays_as_it_is() -> None:
    assert (load("single_turn"), load("given"), load("play")) == (single_turn, given, play)
    assert (load("anything"), load("decorated"), load("partial")) == (anything, decorated, partial)
    assert load("made_before") is made_before


def test_a_class_is_made_with_the_workers_tokenizer_and_its_options() -> None:
    tokenizer = object()
    made = load("Play", tokenizer=tokenizer, calls=5)
    assert isinstance(made, Play)
    assert (made.tokenizer, made.options) == (tokenizer, Options(calls=5))


def test_a_class_without_options_beside_it_is_made_with_the_tokenizer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "async def __call__(self, prompt, generate, *, index): ..."
    (tmp_path / "optionless.py").write_text(
        f"class Play:\n    def __init__(self, tokenizer):\n        self.tokenizer = tokenizer\n    {body}\n"
        f"class Alone:\n    {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load("optionless:Play", tokenizer="t").tokenizer == "t"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"is made with \(tokenizer\), as its module has no Options, it takes \(\)$"):
        load("optionless:Alone")
    with pytest.raises(ConfigError, match=r"^rollout.options: 'optionless:Play' takes no options, got calls"):
        load("optionless:Play", calls=1)
    del sys.modules["optionless"]


CALL = r"async def __call__\(self, prompt, generate, \*, index\)"
REFUSED = {
    "blocking": (r"must be async def blocking\(prompt, generate, \*, index\), it is not async$", {}),
    "without_index": (r"must be async def without_index\(.*\), it takes \(prompt, generate\)$", {}),
    "wants_more": (r"it takes \(prompt, generate, reward, \*, index\)$", {}),
    "Blocking": (rf"must be {CALL}, it is not async$", {}),
    "WithoutIndex": (rf"must be {CALL}, it takes \(self, prompt, generate\)$", {}),
    "Uncallable": (rf"must be {CALL}, it is a class without __call__$", {}),
    "TakesTooLittle": (r"made with \(tokenizer, options\), as its module has an Options, it takes \(tokenizer\)$", {}),
    "Play": (r"^rollout.options: unknown key 'call'; did you mean 'calls'\?$", {"call": 1}),
    "play": (rf"^rollout.options: '{HERE}:play' takes no options, got calls", {"calls": 1}),
    "single_turn": (r"^rollout.options: 'single_turn' takes no options, got calls", {"calls": 1}),
    "RefusesToBeMade": (r"making '.*:RefusesToBeMade' raised ValueError: no such tool$", {}),
    "os:sep": (r"'os:sep' is a str, not a function or class$", {}),
    "nothing": (r"has no 'nothing'", {}),
}


@pytest.mark.parametrize(("name", "reason", "options"), [(name, *row) for name, row in REFUSED.items()], ids=REFUSED)
def test_what_could_not_be_called_is_refused_in_one_line(name: str, reason: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        load(name, **options)
    assert str(caught.value).startswith("rollout.") and "\n" not in str(caught.value)


# -- in a worker -------------------------------------------------------------------------------------------------------


async def trained_on(rollout: RolloutFn, directory: Path) -> dict[str, Any]:
    """The metrics of one step with reward.kind = "none"."""
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    loop = fakes.Loop(bus, directory, steps=1)
    reward = load_reward(config.RewardSection(kind="none"))
    async with asyncio.TaskGroup() as group:
        group.create_task(fakes.run_worker(fakes.worker(bus, fakes.Engine(), rollout=rollout, reward=reward)))
        await loop.run_learner()
    return dict(loop.recorder.rows[-1])


async def test_the_reward_of_a_rollout_function_stands_where_there_is_no_other(tmp_path: Path) -> None:
    """Samples 0 and 1 of each group get 0.25 and 0.75."""

    async def rollout(prompt: PromptGroup, generate: Generate, *, index: int) -> Trajectory:
        turns = Turns(prompt.prompt_tokens)
        turns.answered(await generate(turns.tokens))
        turns.observed([5, 6])
        turns.answered(await generate(turns.tokens))
        return turns.trajectory(reward=0.25 + 0.5 * index, reward_parts={"index": float(index)})

    metrics = await trained_on(rollout, tmp_path)
    assert (metrics["reward/mean"], metrics["reward/index"]) == (0.5, 0.5)
    assert metrics["length/trained_mean"] == 10  # two answers of 4 and an observation of 2


async def test_a_rollout_function_that_says_no_reward_gets_0(tmp_path: Path) -> None:
    assert (await trained_on(single_turn, tmp_path))["reward/mean"] == 0


async def test_a_reward_that_is_no_number_buries_its_group() -> None:
    with pytest.raises(RewardError, match="reward none: the reward is inf"):
        await load_reward(config.RewardSection(kind="none"))([sample_of(reward=float("inf"))])


# -- the example -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and prompts."""
    path = tmp_path_factory.mktemp("demo")
    demo_task.write(path)
    return path


def of_folder(folder: Path) -> list[str]:
    return [f"model.path={folder / 'model'}", f"data.path={folder / 'prompts.jsonl'}"]


def prompt_of(text: str, tokenizer: Any, *, label: Any, max_new_tokens: int) -> PromptGroup:
    return PromptGroup(
        group_id=0,
        prompt_tokens=np.array(tokenizer.encode(text), np.int32),
        group_size=1,
        sampling=Sampling(max_new_tokens=max_new_tokens),
        prompt=text,
        label=label,
    )


def saying(*texts: str, tokenizer: Any) -> Generate:
    """A model that says these one after the other, cut to what it may."""
    left = list(texts)

    async def generate(tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        said = np.array(tokenizer.encode(left.pop(0))[:max_new_tokens], np.int32)
        return Generation(
            tokens=said,
            logprobs=np.full(len(said), -1.0, np.float32),
            version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=0),),
            finish_reason="stop",
        )

    return generate


def test_the_example_can_work(folder: Path) -> None:
    run = config.load(ROOT / "examples" / "calculator.toml", of_folder(folder))
    assert "options = {question_reward = 0.5}" in check.describe(run)  # which checks first


def test_its_mistakes_are_found_before_anything_starts(folder: Path) -> None:
    wrong = ["rollout.options={question_rewards=1}"]
    with pytest.raises(ConfigError, match=r"^rollout.options: unknown key 'question_rewards'"):
        check.check(config.load(ROOT / "examples" / "calculator.toml", of_folder(folder) + wrong))


PLAYS = {
    "right question, right answer": ("7", "0", "700", 1.0),
    "right question, wrong answer": ("7", "3", "703", 0.5),
    "right answer, wrong question": ("1", "0", "120", 0.5),
    "no question": ("<eos>", "1", "1", 0.0),
}


@pytest.mark.parametrize(("question", "answer", "conversation", "reward"), PLAYS.values(), ids=PLAYS)
async def test_the_example_rewards_the_right_question_and_the_right_answer(
    question: str, answer: str, conversation: str, reward: float
) -> None:
    tokenizer = make_tokenizer(demo_task.DIGITS)
    calculate = load("examples.calculator:Calculator", tokenizer=tokenizer)
    prompt = prompt_of("567", tokenizer, label="0123", max_new_tokens=3)
    made = await calculate(prompt, saying(question, answer, tokenizer=tokenizer), index=0)
    assert tokenizer.decode(made.tokens, skip_special_tokens=True) == conversation
    assert (made.reward, sum(made.reward_parts.values()), made.response_mask.sum()) == (reward, reward, 2)


# -- docs/customize.md -------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The page's modules, which can be imported by the names in their first lines, and the one that they import."""
    names = ["my_verl_rewards"]
    for name, code in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / f"{name}.py").write_text(code)
        names.append(name)
    verls = "def compute_score(source, solution, truth, extra=None):\n    return float(solution == truth)\n"
    (tmp_path / "my_verl_rewards.py").write_text(verls)
    monkeypatch.syspath_prepend(tmp_path)
    yield names
    for name in names:
        sys.modules.pop(name, None)


def sample_of(completion: str = "", *, label: Any = None, length: int = 1, reward: float = 0.0) -> Sample:
    trajectory = Trajectory(
        tokens=np.zeros(length, np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.zeros(length, np.float32),
        version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=0),),
        reward=reward,
    )
    return Sample(
        prompt="", completion=completion, label=label, metadata={}, trajectory=trajectory, prompt_tokens=np.zeros(1)
    )


async def rewards(kind: str, samples: Sequence[Sample], **options: Any) -> list[Reward]:
    reward = load_reward(config.RewardSection(kind=kind, options=options))
    try:
        return list(await reward(samples))
    finally:
        await reward.close()


def test_every_module_of_the_page_has_a_name_and_every_run_file_says_what_there_is(
    modules: list[str], folder: Path, tmp_path: Path
) -> None:
    text = PAGE.read_text()
    assert len(re.findall(r"```python\n", text)) == len(modules) - 1
    blocks = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == len(re.findall(r"```", text)) // 2 - len(modules) + 1 == 3
    for block in blocks:
        path = tmp_path / "run.toml"
        path.write_text(block)
        smaller = ["engine.kind=inprocess", "learner.backend=reference", "rollout.max_new_tokens=8"]
        check.check(config.load(path, of_folder(folder) + smaller))


async def test_the_rewards_of_the_page_judge_as_it_says(modules: list[str]) -> None:
    right, wrong = sample_of("7, please", label=7), sample_of("8", label=7, length=4)
    assert [r.value for r in await rewards("my_rewards:contains", [right, wrong])] == [1, 0]
    assert [r.value for r in await rewards("my_rewards:shortest", [right, wrong])] == [1, 0.25]
    assert await rewards("my_rewards:in_parts", [right]) == [Reward(value=1.1, parts={"right": 1, "polite": 0.1})]
    assert await rewards("my_rewards:watched", [right]) == [Reward(value=1, parts={"characters": 9})]
    assert [r.value for r in await rewards("from_verl:score", [sample_of("7", label="7"), wrong])] == [1, 0]


@pytest.fixture
async def judge() -> AsyncIterator[str]:
    """The address of a server that gives a point for each character."""

    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"points": len((await request.json())["text"])})

    application = web.Application()
    application.router.add_post("/points", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/points"
    await runner.cleanup()


async def test_the_judge_of_the_page_asks_its_server(modules: list[str], judge: str) -> None:
    samples = [sample_of("12345"), sample_of("1")]
    assert [r.value for r in await rewards("my_judge:Judge", samples, url=judge)] == [0.5, 0.1]


async def test_the_two_turns_of_the_page_share_their_budget(modules: list[str]) -> None:
    tokenizer = make_tokenizer("abcdefgh?")
    two_turns = load("my_turns:think_then_answer")
    prompt = prompt_of("a", tokenizer, label=None, max_new_tokens=8)
    made = await two_turns(prompt, saying("abcdefgh", "abcdefgh", tokenizer=tokenizer), index=0)
    assert made.response_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 2


TOOL_USES = {
    "asks once": (["ab?", "3"], {}, "ab?33", 1.0, 1, "stop"),
    "asks as often as it may": (["a?", "a?"], {"calls": 1}, "a?2a?", 0.0, 1, "stop"),
    "has no room for an answer": (["abcdefg?", ""], {}, "abcdefg?", 0.0, None, "length"),
}


@pytest.mark.parametrize(("said", "options", "text", "reward", "calls", "ended"), TOOL_USES.values(), ids=TOOL_USES)
async def test_the_tool_of_the_page_answers_questions_within_the_budget(
    modules: list[str], said: list[str], options: dict[str, Any], text: str, reward: float, calls: int, ended: str
) -> None:
    tokenizer = make_tokenizer("abcdefgh?0123456789")
    use = load("my_tools:Tools", tokenizer=tokenizer, **options)
    prompt = prompt_of("a", tokenizer, label="3", max_new_tokens=8)
    made = await use(prompt, saying(*said, tokenizer=tokenizer), index=0)
    assert (tokenizer.decode(made.tokens), made.reward, made.finish_reason) == (text, reward, ended)
    assert made.reward_parts == ({} if calls is None else {"calls": calls})
