"""Measure the cost of the endpoint for agents: its own time per call, its CPU, its memory, and malformed requests.

    python -m benchmarks.endpoint [sessions] [cpu] [fuzz] [--sessions 1000] [--calls 8] [--seconds 20]

sessions  many agents at once against one server, on an engine that answers after --seconds; the clients are another
          process. Own time: from the request's arrival at the client's socket to its answer, without the engine's
cpu       CPU time per call in the server's process, for a short history and for a history of 80 kB
fuzz      malformed requests; each must be answered, or refused with a reason

Prints one JSON line per row. The engine is scripted, and the tokenizer is a byte-level BPE made from docs/.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.environments.agent.endpoint.chat_format import TemplateFormat
from asyncrl.environments.agent.endpoint.parsers import PlainParser
from asyncrl.environments.agent.endpoint.server import EndpointServer
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.environments.agent.endpoint.template import Template
from asyncrl.messages import VersionSpan
from benchmarks.stop_strings import tokenizer as docs_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "The page says how a run is resumed, and what it costs."
CHAT = "/v1/chat/completions"
QUANTILES = {"p50": 50, "p99": 99, "max": 100}


def make_template() -> Template:
    tokenizer = docs_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return Template(tokenizer)


class Engine:
    """A ``Generate`` that returns the same answer after ``seconds``."""

    attempt, context_tokens = 1, 10**9

    def __init__(self, template: Template, *, seconds: float) -> None:
        ids = [*template.encode(ANSWER), template.close_id]
        self._seconds = seconds
        self._answer = Generation(
            tokens=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=1),),
            finish_reason="stop",
        )

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        await asyncio.sleep(self._seconds)
        return self._answer

    def check_result(self, made: object) -> None: ...


def make_session(template: Template, number: int, *, seconds: float = 0.0) -> Session:
    engine = Engine(template, seconds=seconds)
    chat_format, context = TemplateFormat(template, PlainParser(template.source)), engine.context_tokens
    return Session(engine, chat_format=chat_format, name=str(number), max_tokens=10**9, context_tokens=context)


@contextlib.asynccontextmanager
async def serving(sessions: list[Session], server: EndpointServer | None = None) -> AsyncIterator[EndpointServer]:
    server = server or EndpointServer()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        for session in sessions:
            await stack.enter_async_context(server.session(session))
        yield server


# -- many sessions -----------------------------------------------------------------------------------------------------


async def play(url: str, keys: list[str], *, calls: int, seconds: float) -> list[float]:
    """Play the conversations of all keys concurrently; return the time of each call without the engine's time."""
    taken: list[float] = []

    async def one(http: aiohttp.ClientSession, key: str, number: int) -> None:
        await asyncio.sleep(seconds * number / len(keys))  # agents start at different times
        messages = [{"role": "system", "content": "Answer."}]
        for call in range(calls):
            messages.append({"role": "user", "content": f"{number} asks {call} things of the docs"})
            body, headers = json.dumps({"messages": messages}).encode(), {"Authorization": f"Bearer {key}"}
            begun = time.monotonic()
            async with http.post(url + CHAT, data=body, headers=headers) as reply:
                said = await reply.read()
                taken.append(time.monotonic() - begun)
            messages.append(json.loads(said)["choices"][0]["message"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        await asyncio.gather(*(one(http, key, number) for number, key in enumerate(keys)))
    return taken


def play_there(url: str, keys: list[str], calls: int, seconds: float, results: Any) -> None:
    results.put("up")
    results.put(asyncio.run(play(url, keys, calls=calls, seconds=seconds)))


class TimedServer(EndpointServer):
    """Measures the seconds of each call from its arrival to its answer, without the ``engine_seconds``."""

    def __init__(self, engine_seconds: float) -> None:
        super().__init__()
        self._engine_seconds = engine_seconds
        self.taken: list[float] = []

    async def _answer(self, *arguments: Any) -> Any:
        begun = time.monotonic()
        reply = await super()._answer(*arguments)
        self.taken.append(time.monotonic() - begun - self._engine_seconds)
        return reply


async def many_sessions(template: Template, options: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Run three rounds. Memory that the later rounds add is memory that sessions leak."""
    context = multiprocessing.get_context("spawn")
    for number in range(3):
        sessions = [make_session(template, place, seconds=options.seconds) for place in range(options.sessions)]
        async with serving(sessions, server := TimedServer(options.seconds)):
            results = context.Queue()
            arguments = (server.url, [session.key for session in sessions], options.calls, options.seconds, results)
            client = context.Process(target=play_there, args=arguments)
            client.start()
            await asyncio.to_thread(results.get)  # the client process is up
            begun, cpu = time.monotonic(), time.process_time()
            taken = await asyncio.to_thread(results.get)
            seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
            await asyncio.to_thread(client.join)
        yield {
            "row": "sessions",
            "round": number,
            "sessions": options.sessions,
            "calls": len(taken),
            "calls_per_second": round(len(taken) / seconds, 1),
            "own_ms": percentiles(server.taken),
            "client_ms_besides_engine": percentiles([one - options.seconds for one in taken]),
            "cpu_ms_per_call": round(cpu / len(taken) * 1e3, 2),
            "sequences_per_session": max(len(session.turns.sequences()) for session in sessions),
            "memory_mib": resident_mib(),
            "load": os.getloadavg()[0],
        }


def percentiles(seconds: list[float]) -> dict[str, float]:
    return {name: round(float(np.percentile(seconds, q)) * 1e3, 2) for name, q in QUANTILES.items()}


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


# -- CPU of a call -----------------------------------------------------------------------------------------------------


async def cpu_of_calls(template: Template, *, words: int, turns: int, calls: int = 50) -> dict[str, Any]:
    """Repeat the last call of a history. The client is another process."""
    said = " ".join((docs_words() * (1 + words // 200))[:words])
    session = make_session(template, 0)
    async with serving([session]) as server, aiohttp.ClientSession() as http:
        http.headers["Authorization"] = f"Bearer {session.key}"
        messages: list[Any] = [{"role": "user", "content": said}]
        for _ in range(turns - 1):
            async with http.post(server.url + CHAT, json={"messages": messages}) as reply:
                messages.append((await reply.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": said})
        body = json.dumps({"messages": messages}).encode()
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        client = context.Process(target=repeat_there, args=(server.url, session.key, body, calls, results))
        client.start()
        await asyncio.to_thread(results.get)
        before = time.process_time()
        wall = await asyncio.to_thread(results.get)
        cpu = time.process_time() - before
        await asyncio.to_thread(client.join)
        tokens = list(session.turns)[-1].prompt_length
    return {
        "row": "cpu",
        "body_bytes": len(body),
        "turns": turns,
        "tokens": tokens,
        "cpu_ms_per_call": round(cpu / calls * 1e3, 2),
        "wall_ms_per_call": round(wall / calls * 1e3, 2),
    }


def docs_words() -> list[str]:
    return Path("docs/guides/environments.md").read_text().split()[:200]


def repeat_there(url: str, key: str, body: bytes, calls: int, results: Any) -> None:
    """In the client process: report the start once it is warm, then the time that the calls took."""

    async def ask(http: aiohttp.ClientSession, count: int) -> float:
        begun = time.monotonic()
        for _ in range(count):
            async with http.post(url + CHAT, data=body) as reply:
                await reply.read()
                assert reply.status == 200
        return time.monotonic() - begun

    async def go() -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            results.put(await ask(http, 3))
            results.put(await ask(http, calls))

    asyncio.run(go())


# -- requests that make no sense ---------------------------------------------------------------------------------------

WHOLE: list[tuple[str, Any]] = [
    (
        CHAT,
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "Be terse."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "stop": [],
            "logit_bias": {},
            "temperature": 0.7,
            "n": 2,
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
            ],
            "instructions": "Be terse.",
            "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
            "previous_response_id": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "max_output_tokens": 20,
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "Be terse."}],
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2"}]},
            ],
            "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 20,
            "stream": True,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    (
        "/inference/v1/generate",
        {"model": "m", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "n": 1, "temperature": 1.0}},
    ),
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3.5, 1e300, 2**70, "", "x", "\ud800", "\x00", "null", "user", "assistant", "tool"),
    *([], {}, [[]], [None], {"type": "text"}, {"role": "user"}, [{}], "<|im_end|>", "\u241eTURN\u241e", "a" * 5000),
]


def broken(value: Any, draw: random.Random) -> Any:
    """Return a copy in which one item is changed, removed or duplicated."""
    value = json.loads(json.dumps(value))
    places = list(_places(value))
    holder, key = draw.choice(places)
    match draw.randrange(5):
        case 0 if isinstance(holder, list):
            holder.append(draw.choice([*ODD, holder[key]]))
        case 1 if isinstance(holder, dict):
            del holder[key]
        case 2 if isinstance(holder, dict):
            holder[draw.choice(["type", "role", "content", "text", "id", "name", "x"])] = draw.choice(ODD)
        case 3:
            other, at = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[at])) if isinstance(other, list | dict) else None
        case _:
            holder[key] = draw.choice(ODD)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def request_of(draw: random.Random) -> tuple[str, bytes]:
    path, body = draw.choice(WHOLE)
    for _ in range(draw.randint(1, 4)):
        body = broken(body, draw)
        if not body:
            break
    raw = json.dumps(body).encode()
    if draw.random() < 0.1:  # not even JSON
        at = draw.randrange(len(raw) + 1)
        raw = raw[:at] + draw.randbytes(draw.randint(0, 4)) + raw[at + draw.randint(0, 3) :]
    return path, raw


async def ask_broken(http: aiohttp.ClientSession, url: str, path: str, raw: bytes) -> int:
    """Send a malformed request and return the status. Raises AssertionError for a refusal without a reason, or a server
    error."""
    async with http.post(url + path, data=raw) as reply:
        said = await reply.read()
        if reply.status != 200:
            assert 400 <= reply.status < 500, (reply.status, path, raw[:2000], said[:500])
            assert json.loads(said)["error"]["message"], (path, raw[:2000])
        return reply.status


async def fuzz(template: Template, *, requests: int, seed: int) -> dict[str, Any]:
    draw, statuses = random.Random(seed), dict[int, int]()
    session = make_session(template, 0)
    begun = time.monotonic()
    async with serving([session]) as server, aiohttp.ClientSession() as http:
        http.headers["Authorization"] = f"Bearer {session.key}"
        for _ in range(requests):
            status = await ask_broken(http, server.url, *request_of(draw))
            statuses[status] = statuses.get(status, 0) + 1
        session.turns.sequences()
    return {"row": "fuzz", "requests": requests, "statuses": statuses, "seconds": round(time.monotonic() - begun, 1)}


async def main(options: argparse.Namespace) -> None:
    template = make_template()
    if "cpu" in options.rows:
        for words, turns in ((20, 1), (20, 8), (1500, 8)):
            print(json.dumps(await cpu_of_calls(template, words=words, turns=turns)), flush=True)
    if "sessions" in options.rows:
        async for row in many_sessions(template, options):
            print(json.dumps(row), flush=True)
    if "fuzz" in options.rows:
        print(json.dumps(await fuzz(template, requests=options.requests, seed=options.seed)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["cpu", "sessions", "fuzz"])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(main(parser.parse_args()))
