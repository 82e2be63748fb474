"""What rewards promise: each kind judges as it says, and whatever a function does, a group gets rewards or a reason."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncrl import config
from asyncrl.errors import ConfigError, RewardError
from asyncrl.messages import Trajectory, VersionSpan
from asyncrl.protocols import Reward, Sample
from asyncrl.rewards.guard import GuardedReward
from asyncrl.rewards.load import load_reward

HERE = "tests.test_rewards"


def sample(
    completion: str = "", *, label: Any = None, prompt: str = "", metadata: dict[str, Any] | None = None
) -> Sample:
    return Sample(
        prompt=prompt,
        completion=completion,
        label=label,
        metadata=metadata or {},
        trajectory=Trajectory(
            tokens=np.zeros(1, np.int32),
            response_mask=np.ones(1, np.bool_),
            behavior_logprobs=np.zeros(1, np.float32),
            version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=0),),
        ),
        prompt_tokens=np.zeros(1, np.int32),
    )


def load(kind: str, *, timeout_seconds: float = 30.0, **options: Any) -> GuardedReward:
    return load_reward(config.RewardSection(kind=kind, timeout_seconds=timeout_seconds, options=options))


async def values(reward: GuardedReward, *samples: Sample) -> list[float]:
    try:
        return [each.value for each in await reward(samples)]
    finally:
        await reward.close()


# -- built-in kinds ----------------------------------------------------------------------------------------------------


async def test_math_judges_what_is_equal_not_what_looks_equal() -> None:
    pytest.importorskip("math_verify")
    cases = [
        ("The answer is 42.", "42", 1.0),
        ("so we get \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("first 3, then 4, so 7", "7", 1.0),
        ("It is 1,000 in all", "1000", 1.0),
        ("$x = 3$", 3, 1.0),
        ("2.5", 2.5, 1.0),
        ("\\boxed{8} or maybe 9", "8", 1.0),
        ("The answer is 41.", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
    ]
    got = await values(load("math"), *(sample(text, label=label) for text, label, _ in cases))
    assert got == [value for _, _, value in cases]


async def test_math_survives_what_no_time_is_enough_for() -> None:
    pytest.importorskip("math_verify")
    section = config.RewardSection(kind="math", options={"timeout_seconds": 1})
    endless = "\\boxed{9^{9^{9^{9^{9}}}}}"
    assert await values(load_reward(section), sample(endless, label="3"), sample("3", label="3")) == [0.0, 1.0]


async def test_a_judge_that_dies_fails_its_group_and_is_replaced() -> None:
    pytest.importorskip("math_verify")
    reward = load("math")
    await reward([sample("1", label="1")])
    judge = reward._function._idle[0]  # type: ignore[attr-defined]
    judge.kill()
    await judge.wait()
    with pytest.raises(RewardError, match="judge's process"):
        await reward([sample("1", label="1")])
    assert await values(reward, sample("1", label="1")) == [1.0]


async def test_math_without_a_label_says_so() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(RewardError, match="no label"):
        await load("math")([sample("7")])


async def test_exact_compares_stripped_text() -> None:
    texts = [sample(" yes\n", label="yes"), sample("Yes", label="yes"), sample("yes, sir", label="yes")]
    assert await values(load("exact"), *texts) == [1.0, 0.0, 0.0]
    assert await values(load("exact", ignore_case=True), *texts) == [1.0, 1.0, 0.0]
    assert await values(load("exact", strip=False), *texts) == [0.0, 0.0, 0.0]


async def test_exact_extracts_the_last_match() -> None:
    reward = load("exact", extract=r"answer: (\d+)")
    texts = [sample("answer: 3, no, answer: 4 indeed", label=4), sample("4", label=4)]
    assert await values(reward, *texts) == [1.0, 0.0]


async def test_regex_compares_its_group_to_the_label_or_just_matches() -> None:
    texts = [sample("<a>\n7</a>", label="7"), sample("<a>8</a>", label="7"), sample("7", label="7")]
    assert await values(load("regex", pattern="<a>(.*?)</a>"), *texts) == [1.0, 0.0, 0.0]
    assert await values(load("regex", pattern="<a>(.*?)</a>", compare="match"), *texts) == [1.0, 1.0, 0.0]


# -- remote ------------------------------------------------------------------------------------------------------------

Serve = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """``await serve(handler)``: the address of a server that answers with it."""
    runners: list[web.AppRunner] = []

    async def start(handler: Any) -> str:
        application = web.Application()
        application.router.add_post("/reward", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/reward"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_remote_sends_the_group_and_takes_numbers_and_parts(serve: Serve) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["X-Key"], await request.json()))
        return web.json_response({"rewards": [0.5, {"format": 0.25, "correct": 1.0}]})

    reward = load("remote", url=await serve(handler), headers={"X-Key": "k"})
    first, second = await reward([sample("a", label=1, prompt="p", metadata={"m": 2}), sample("b")])
    assert (first.value, second.value, second.parts) == (0.5, 1.25, {"format": 0.25, "correct": 1.0})
    sent = {"prompt": "p", "completion": "a", "label": 1, "metadata": {"m": 2}}
    assert seen[0][0] == "k" and seen[0][1]["samples"][0] == sent and len(seen[0][1]["samples"]) == 2


async def test_remote_tries_again_when_the_server_is_busy(serve: Serve) -> None:
    answers = [web.Response(status=503), web.Response(status=429), web.json_response([1.0])]

    async def handler(request: web.Request) -> web.Response:
        return answers.pop(0)

    assert await values(load("remote", url=await serve(handler), backoff_seconds=0.0), sample()) == [1.0]


async def test_remote_gives_up_after_its_retries_and_never_retries_a_refusal(serve: Serve) -> None:
    calls: list[str] = []

    async def busy(request: web.Request) -> web.Response:
        calls.append("busy")
        return web.Response(status=500)

    async def refuses(request: web.Request) -> web.Response:
        calls.append("refuses")
        return web.Response(status=400, text="no such model\ndetails")

    url = await serve(busy)
    with pytest.raises(RewardError, match="after 3 tries: ServerBusy: HTTP 500"):
        await load("remote", url=url, retries=2, backoff_seconds=0.0)([sample()])
    with pytest.raises(RewardError, match="HTTP 400 Bad Request: no such model$"):
        await load("remote", url=await serve(refuses))([sample()])
    assert calls == ["busy"] * 3 + ["refuses"]


async def test_remote_reports_a_server_that_is_not_there() -> None:
    with pytest.raises(RewardError, match="127.0.0.1:1/"):
        await load("remote", url="http://127.0.0.1:1/", retries=0)([sample()])


async def test_remote_refuses_an_answer_of_the_wrong_shape(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"scores": [1.0]})

    with pytest.raises(RewardError, match="must be"):
        await load("remote", url=await serve(handler))([sample()])


# -- your own function -------------------------------------------------------------------------------------------------


def per_sample(sample: Sample) -> float:
    return float(len(sample.completion))


async def async_per_sample(sample: Sample) -> Reward:
    return Reward(value=1.0, parts={"length": len(sample.completion)})


def named_samples(samples):  # type: ignore[no-untyped-def]
    return [float(len(samples))] * len(samples)


def annotated_sequence(group: Sequence[Sample]) -> list[float]:
    return [1.0 / len(group)] * len(group)


async def async_list(group: list[Sample]) -> list[dict[str, float]]:
    return [{"a": 0.5, "b": 0.25} for _ in group]


def with_default(sample: Sample, scale: float = 2.0) -> np.float32:
    return np.float32(scale)


class Scorer:
    def __call__(self, sample: Sample) -> float:
        return 3.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("per_sample", [1.0, 2.0]),
        ("async_per_sample", [1.0, 1.0]),
        ("named_samples", [2.0, 2.0]),
        ("annotated_sequence", [0.5, 0.5]),
        ("async_list", [0.75, 0.75]),
        ("with_default", [2.0, 2.0]),
        ("Scorer", [3.0, 3.0]),
    ],
)
async def test_the_signature_decides_between_sample_and_group(name: str, expected: list[float]) -> None:
    assert await values(load(f"{HERE}:{name}"), sample("a"), sample("bb")) == expected


async def test_a_dict_of_parts_is_summed_and_kept() -> None:
    (reward,) = await load(f"{HERE}:async_list")([sample()])
    assert reward == Reward(value=0.75, parts={"a": 0.5, "b": 0.25})


async def test_the_demo_rewards_counting_on() -> None:
    reward = load("asyncrl.data.demo_task:reward")
    # 0124: three of four count on. 012: three, one missing. 01234: five of five. 3456: all but the first.
    texts = ["0123", "0124", "012", "01234", "", "3456"]
    got = await values(reward, *(sample(text, prompt="67", label="0123") for text in texts))
    assert got == [1.0, 0.75, 0.75, 1.0, 0.0, 0.75]


# -- what a bad function does ------------------------------------------------------------------------------------------


def raises(sample: Sample) -> float:
    raise KeyError("no such thing\nand more")


def raises_at_random(sample: Sample) -> float:
    if sample.completion == "bad":
        raise ValueError("bad sample")
    return 1.0


def raises_timeout(sample: Sample) -> float:
    raise TimeoutError("the user's own")


def exits(sample: Sample) -> float:
    raise SystemExit(3)


def nan(sample: Sample) -> float:
    return math.nan


def infinite_part(sample: Sample) -> Reward:
    return Reward(value=1.0, parts={"speed": math.inf})


def text(sample: Sample) -> str:
    return "1.0"


def too_few(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


def one_number(samples: Sequence[Sample]) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", r"raised KeyError: 'no such thing\\nand more'$"),
        ("raises_at_random", "raised ValueError: bad sample$"),
        ("raises_timeout", "raised TimeoutError: the user's own$"),
        ("exits", "raised RuntimeError: SystemExit: 3$"),
        ("nan", "the reward is nan$"),
        ("infinite_part", "speed is inf$"),
        ("text", "must be a number, a Reward or a dict of parts, got '1.0'$"),
        ("too_few", "returned 1 rewards for 2 samples$"),
        ("one_number", "must return a list of rewards, returned 1.0$"),
    ],
)
async def test_a_bad_reward_is_one_line_with_its_reason(name: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason) as caught:
        await load(f"{HERE}:{name}")([sample("good"), sample("bad")])
    assert str(caught.value).startswith(f"reward {HERE}:{name}: ")
    assert "\n" not in str(caught.value)


_release = threading.Event()


def blocks(sample: Sample) -> float:
    _release.wait()
    return 1.0


async def waits(sample: Sample) -> float:
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize("name", ["blocks", "waits"])
async def test_a_reward_that_hangs_is_given_up_and_holds_nobody(name: str) -> None:
    reward = load(f"{HERE}:{name}", timeout_seconds=0.05)
    for _ in range(3):
        with pytest.raises(RewardError, match="longer than reward.timeout_seconds = 0.05"):
            await reward([sample() for _ in range(16)])
    _release.set()


async def test_a_plain_function_does_not_block_the_loop() -> None:
    (reward,) = await load(f"{HERE}:thread_name")([sample()])
    assert reward.parts == {"is_reward_thread": 1.0}


def thread_name(sample: Sample) -> dict[str, float]:
    return {"is_reward_thread": float(threading.current_thread().name == "reward")}


async def test_cancelling_a_reward_is_no_reward_error() -> None:
    task = asyncio.ensure_future(load(f"{HERE}:waits")([sample()]))
    await asyncio.wait([task], timeout=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- run files that cannot work ----------------------------------------------------------------------------------------


def two_arguments(prompt: str, completion: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mth", {}, "did you mean 'math'"),
        ("nothing.here:f", {}, "cannot import 'nothing.here'"),
        (f"{HERE}:per_smaple", {}, "did you mean 'per_sample'"),
        (f"{HERE}:two_arguments", {}, "must take one argument.*it takes prompt, completion"),
        (f"{HERE}:HERE", {}, "is a str, not a function"),
        (f"{HERE}:per_sample", {"scale": 2}, "takes no options, got scale"),
        ("exact", {"stripp": True}, "reward.options: unknown key 'stripp'; did you mean 'strip'"),
        ("exact", {"extract": "("}, "reward.options: extract: '\\(' is no regular expression"),
        ("regex", {}, "reward.options: missing pattern"),
        ("regex", {"pattern": "["}, "is no regular expression"),
        ("remote", {"url": "localhost:80"}, "url must start with http"),
        ("math", {"processes": 0}, "must be >= 1"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_before_the_run(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(kind, **options)
    assert "\n" not in str(caught.value)


def test_loading_starts_nothing() -> None:
    before = threading.active_count()
    reward = load("math")
    assert threading.active_count() == before
    assert not reward._function._idle  # type: ignore[attr-defined]
