"""A language model as judge: its grade is the reward; every failure gives a reason, never a silent zero."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from asyncrl.actors.rollout.server_book import ServerBook
from asyncrl.config import RewardSection
from asyncrl.config.reward import RewardPart
from asyncrl.errors import ConfigError, Outage, RewardError
from asyncrl.messages.control import ServerAddress
from asyncrl.rewards.http import Away
from asyncrl.rewards.judge_pool import JudgePool
from asyncrl.rewards.load import load_reward
from tests.harness.rewards import load, rewards, sample, values


class Server:
    """Answers with the entries of ``says`` in order, and repeats the last one.

    An entry is a text or a status. A text that ends in "[cut]" is cut off there.
    """

    def __init__(self) -> None:
        self.says: list[str | int] = ["Score: 10"]
        self.seen: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append((request.headers.get("Authorization"), await request.json()))
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, int):
            return web.Response(status=said, text="no such model\ndetails")
        choice = {
            "message": {"content": said.removesuffix("[cut]")},
            "finish_reason": "length" if said.endswith("[cut]") else "stop",
        }
        return web.json_response({"choices": [choice], "usage": {"total_tokens": 30}})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", found.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield found
    await runner.cleanup()


def judge(server: Server, **options: Any) -> Any:
    return load("llm_judge", url=server.url, model="m", backoff_seconds=0.0, **options)


async def test_the_last_grade_is_the_reward_between_lowest_and_highest(server: Server) -> None:
    server.says = ["Score: 3? No.\nScore: **7.5**"]
    reward = judge(server, api_key="k", template="{prompt}|{answer}|{label}")
    (found,) = await reward([sample("<think>x</think> a {b}", prompt="p", label=5)])
    assert (found.value, found.parts) == (0.75, {"grade": 7.5})
    assert server.seen[0][0] == "Bearer k" and server.seen[0][1]["messages"][0]["content"] == "p|a {b}|5"
    await reward.close()


async def test_a_judge_of_the_run_is_asked_where_it_is_now_and_waited_for_by_its_name(server: Server) -> None:
    reward = load("llm_judge", server="judge", backoff_seconds=1e6)  # it is not tried again while it is not up
    here = ServerAddress(name="judge", url=server.url, model="its name", key="its key")
    one = replace(sample("a"), servers={"judge": here})
    assert (await rewards(reward, [one]))[0].value == 1.0
    assert server.seen[0][0] == "Bearer its key" and server.seen[0][1]["model"] == "its name"
    with pytest.raises(Outage, match="reward llm_judge: server judge is not up"):
        await reward([replace(sample("b"), servers=ServerBook({"judge": None}))])
    with pytest.raises(RewardError, match="there is no such server in \\[servers\\]"):
        await reward([sample("b")])
    await reward.close()


@pytest.mark.parametrize("options", [{}, {"url": "http://h/v1", "server": "judge", "model": "m"}])
def test_a_judge_has_an_address_or_is_a_server_of_the_run(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either url, the address of a server, or server"):
        load("llm_judge", **options)


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        *(("Score: 7", 7.0), ("Score: **7.5**", 7.5), ("Score: 1,5", 1.5), ("Score: 1e1", 10.0), ("Score: .5", 0.5)),
        *(("Score: 10/10", 10.0), ("Score: **7**/10.", 7.0), ("Score: 7 out of 10", 7.0), ("Score: 7 - good", 7.0)),
        *(("Score: [7]", 7.0), ("Score: 7, as 3 of 4 hold", 7.0), ("Score: 7\n- 3 points lost", 7.0)),
        *(("Score: 7 (out of 10)", 7.0), ("Score: 7 out of ten", 7.0), ("Score: 9\u00a0/\u00a010", 9.0)),
        *(("Score: 7 points out of 10", 7.0), ("Score: 7 (good)", 7.0), ("Score: 7...", 7.0)),
    ],
)
async def test_a_grade_is_read_as_a_judge_writes_it(server: Server, said: str, grade: float) -> None:
    server.says = [said]
    (found,) = await (reward := judge(server))([sample("a")])
    assert found.parts == {"grade": grade}
    await reward.close()


@pytest.mark.parametrize(
    "said",
    [
        *("Score: -3", "Score: −3", "Score: 4/5", "Score: 7/100", "Score: 7-8", "Score: 7 to 8", "Score: 70%"),
        *("Score: 1,000", "Score: 1 000", "Score: 7.5.2", "Score: 7/10/3", "Score: 0x7", "Score: 1e400", "Score: 7th"),
        "Score: 9. No:\nScore: ?",
        *(
            "Score: 4 (out of 5)",
            "Score: 4 stars out of 5",
            "Score: 4 [of 5]",
            "Score: 4 out of five",
            "Score: 4 / five",
        ),
        *("Score: 4 on a scale of 1 to 5", "Score: 4\u00a0/\u00a05", "Score: 8 -> 6", "Score: 8 → 6", "Score: 7+2"),
        *("Score: 7~8", "Score: 7…8", "Score: 7 and 8", "Score: 3*2"),
    ],
)
async def test_a_grade_of_another_scale_or_of_several_numbers_is_asked_for_again(server: Server, said: str) -> None:
    server.says = [said, "Score: 2"]
    assert await values(judge(server), sample("a")) == [0.2]
    assert len(server.seen) == 2


async def test_a_pattern_that_matches_the_beginning_of_a_number_reads_the_whole(server: Server) -> None:
    server.says = ["Score: 1e1"]
    assert await values(judge(server, pattern=r"Score: (\d+)"), sample("a")) == [1.0]
    server.says = ["Score: 85%"]
    assert await values(judge(server, pattern=r"Score: (\d+)", highest=100.0), sample("a")) == [0.85]


async def test_graded_question_is_not_sent_again(server: Server) -> None:
    reward = judge(server)
    assert [r.value for r in await reward([sample("a"), sample("a"), sample("b")])] == [1.0] * 3
    assert await values(reward, sample("b"), sample("a")) == [1.0, 1.0]
    assert len(server.seen) == 2


async def test_retries_busy_servers_and_replies_without_a_grade(server: Server) -> None:
    server.says = [503, 429, "I cannot say", "Score: 11", "Score: 5"]
    assert await values(judge(server), sample("a")) == [0.5]


async def test_a_router_that_says_by_200_that_its_server_is_away_is_an_outage() -> None:
    reward = load("llm_judge", url="http://judge/v1", model="m")
    read = reward.function._read  # type: ignore[attr-defined]
    for code in (429, 502, 503):
        with pytest.raises(Away):
            read({"error": {"code": code, "message": "Provider returned error"}})
    others: tuple[Any, ...] = ({"error": {"code": 401}}, {"error": "no"}, {"error": None}, [], None)
    for answer in others:
        with pytest.raises(RewardError, match="not a chat completion"):
            read(answer)


async def test_grades_in_reasoning_or_in_cut_replies_do_not_count(server: Server) -> None:
    server.says = [
        "<think>If the scale is Score: 10[cut]",
        "Good. Score: 1[cut]",
        "<think>Score: 9</think>",
        "Score: 2",
    ]
    assert await values(judge(server), sample("a")) == [0.2]
    assert len(server.seen) == 4


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ([500], "after 3 tries: HTTP 500"),
        (["Score: 1[cut]"], "after 3 tries: its reply reached reward.options.max_tokens = 512: 'Score: 1'"),
        (["fine"], "after 3 tries: no grade in what it says \\(reward.options.pattern\\): 'fine'"),
        ([404], "HTTP 404 Not Found: no such model$"),
    ],
)
async def test_permanent_judge_errors_fail_the_group_with_the_reason(
    server: Server, says: list[str | int], problem: str
) -> None:
    server.says = says
    reward = judge(server, retries=2)
    with pytest.raises(RewardError, match=problem):
        await reward([sample("a")])
    await reward.close()
    assert len(server.seen) == (1 if says == [404] else 3)


@pytest.mark.parametrize("option", ["max_requests", "max_total_tokens"])
async def test_a_budget_that_is_spent_fails_groups(server: Server, option: str) -> None:
    reward = judge(server, **{option: 2 if option == "max_requests" else 60})
    assert [r.value for r in await reward([sample("a")]) + await reward([sample("b")])] == [1.0, 1.0]
    with pytest.raises(RewardError, match=f"the budget of reward.options.{option} = .* is spent"):
        await reward([sample("c")])
    assert await values(reward, sample("a")) == [1.0] and len(server.seen) == 2


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"url": "judge:80"}, "url must start with http"
    yield {"template": "{prompt}"}, "template: {answer} is missing"
    yield {"template": "{answer} {reference}"}, "template: {reference} is unknown"
    yield {"template": "{answer"}, "template: .*brace"
    yield {"pattern": "Score"}, "has no group for the grade"
    yield {"pattern": "("}, "is not a regular expression"
    yield {"highest": 0.0}, "highest must be above lowest"
    yield {"at_once": 0}, "at_once must be > 0"


@pytest.mark.parametrize(("options", "problem"), list(refusals()))
def test_options_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load("llm_judge", **({"url": "http://judge:80/v1", "model": "m"} | options))
    assert "\n" not in str(caught.value)


ENDLESS = "\\boxed{{9^{{9^{{9^{{{}}}}}}}}}"


@pytest.fixture
async def pool() -> AsyncIterator[JudgePool]:
    found = JudgePool("tests.unit.rewards.fake_judge", [], name="fake", processes=1)
    found.seconds = 1000.0
    yield found
    await found.close()


async def test_each_answer_gets_an_equal_share_of_the_time_that_is_left(
    pool: JudgePool, caplog: pytest.LogCaptureFixture
) -> None:
    shares = await pool.ask([300, "share", 5000, "share"])  # three that differ: 333 s, then half of what is left
    assert shares == [1.0, pytest.approx(500, rel=0.1), 0.0, shares[1]]
    assert "reward fake: 1 of 3 different answers were not judged within reward.timeout_seconds = 1000" in caplog.text


async def test_stuck_judge_fails_only_its_own_answer(pool: JudgePool, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = pool._answer

    async def stuck_at_7(judge: Any, line: str, seconds: float) -> float | None:
        if line == "7":
            raise TimeoutError
        return await answer(judge, line, seconds)

    monkeypatch.setattr(pool, "_answer", stuck_at_7)
    assert await pool.ask([1, 7, 2]) == [1.0, 0.0, 1.0]


async def test_slow_answers_of_one_group_are_0_and_cost_other_groups_nothing() -> None:
    pytest.importorskip("math_verify")
    parts = {"right": RewardPart(kind="math", options={"timeout_seconds": 100})}
    reward = load_reward(RewardSection(kind="parts", timeout_seconds=2.0, parts=parts))
    slow = [sample(text, label="5") for text in (ENDLESS.format(8), "\\boxed{5}", ENDLESS.format(9))]
    groups = await asyncio.gather(
        *(rewards(reward, group) for group in (slow, [sample("5", label="5")], [sample("5", label="5")]))
    )
    assert [[one.value for one in group] for group in groups] == [[0.0, 1.0, 0.0], [1.0], [1.0]]
    await reward.close()
