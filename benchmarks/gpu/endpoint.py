"""Measure the cost of the endpoint for agents on SGLang: tokens/s through the endpoint against the plain path.

    python -m benchmarks.gpu.endpoint --shape 0.6B --requests 256 --json FILE
    python -m benchmarks.gpu.endpoint --shape tiny --requests 8 --tokens 32 --turns 2       a rehearsal on a CPU

The same load goes in turns through SGLangEngine with token ids, as on a worker's plain path, and through
/v1/chat/completions of the endpoint on the same engine. The clients of the endpoint are a separate process, as
harnesses are. --requests samples are always in flight. Their lengths are drawn around --tokens, in one call and in four
(--calls); every call but the first continues the answers before it. Only the time while all slots are taken counts,
without the first and the last answers. Each ratio is taken within one turn, and the median of the turns is reported.
The weights are random. The tokenizer has a word for each token id, so answers have about 8 characters per token, twice
as many as real ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.environments.agent.endpoint.chat_format import TemplateFormat
from asyncrl.environments.agent.endpoint.server import EndpointServer
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.messages import SamplingParams
from asyncrl.messages.control import ServerAddress
from asyncrl.messages.images import ImageRef
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES, make_model

CHAT: Final = "/v1/chat/completions"
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QUESTION_WORDS: Final = 60
_FOLLOW_UP: Final = "and then?"


def make_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of bytes, two tokens of the template, and a word of 7 or 8 characters for every other id."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number:06d}" for number in range(vocabulary - len(letters) - len(special))]
    ids = {word: number for number, word in enumerate([*special, *letters, *words])}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def question(number: int) -> dict[str, str]:
    """Return a question of about 130 bytes, and as many tokens; the first ones differ between questions."""
    random = np.random.default_rng(number)
    return {"role": "user", "content": " ".join([str(number), *random.choice(["a", "of"], _QUESTION_WORDS - 10)])}


class Calls:
    """A ``Generate`` on the engine, with ``num_tokens`` sampled tokens per call."""

    attempt = 1
    context_tokens = 10**9
    images = None
    servers = MappingProxyType[str, ServerAddress]({})

    def __init__(self, engine: SGLangEngine, *, num_tokens: int) -> None:
        self._engine = engine
        self._sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)

    async def __call__(
        self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None, images: Sequence[ImageRef] | None = None
    ) -> Generation:
        assert max_new_tokens in (None, self._sampling.max_new_tokens)
        return await self._engine.generate(tokens, self._sampling, seed=0)


Ends = list[tuple[float, int]]
"""(end in seconds, number of tokens) of calls. All processes of a machine read the same clock."""


def steady(ends: Ends, *, skipped: int) -> float:
    """Return tokens/s without the first and the last ``skipped`` ends.

    >>> steady([(0.0, 9), (1.0, 9), (2.0, 4), (3.0, 4), (4.0, 9)], skipped=2)
    4.0
    """
    (began, _), *measured = sorted(ends)[skipped - 1 : len(ends) - skipped + 1]
    return sum(tokens for _, tokens in measured) / (measured[-1][0] - began)


async def keep_busy(places: int, samples: int, play: Callable[[int], Awaitable[None]]) -> None:
    """Play each sample once, ``places`` samples at a time."""
    left = iter(range(samples))

    async def place() -> None:
        for number in left:
            await play(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(places):
            group.create_task(place())


def tokens_of_a_call(number: int, *, tokens: int, calls: int) -> int:
    """Draw the tokens per call of a sample, 0.5 to 1.5 times the mean, so that samples end at different times."""
    return max(1, int(np.random.default_rng(number).uniform(0.5, 1.5) * tokens / calls))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """
    places   samples in flight
    samples  number of samples in total
    tokens   average sampled tokens of a sample, in all its calls
    """

    places: int
    samples: int
    tokens: int
    calls: int

    def each(self, number: int) -> int:
        return tokens_of_a_call(number, tokens=self.tokens, calls=self.calls)


class Load:
    """Samples of one engine, on either path."""

    def __init__(self, engine: SGLangEngine, chat_format: TemplateFormat, scene: Scene) -> None:
        self._engine = engine
        self._chat_format = chat_format
        self._scene = scene
        self._follow_up = chat_format.encode(
            f"<|im_end|>\n<|im_start|>user\n{_FOLLOW_UP}<|im_end|>\n<|im_start|>assistant\n"
        )

    async def plain(self) -> dict[str, float]:
        """Run the load as calls with token ids."""
        ends: Ends = []

        async def play(number: int) -> None:
            text = f"<|im_start|>user\n{question(number)['content']}<|im_end|>\n<|im_start|>assistant\n"
            tokens = self._chat_format.encode(text)
            generate = Calls(self._engine, num_tokens=self._scene.each(number))
            for _ in range(self._scene.calls):
                answer = await generate(np.array(tokens, np.int32))
                ends.append((time.monotonic(), len(answer.tokens)))
                tokens += [*answer.tokens.tolist(), *self._follow_up]

        cpu = time.process_time()
        await keep_busy(self._scene.places, self._scene.samples, play)
        cpu = time.process_time() - cpu
        return {
            "plain_tokens_per_second": steady(ends, skipped=self._scene.places * self._scene.calls),
            "plain_cpu_ms_a_call": cpu / len(ends) * 1e3,
        }

    async def agents(self) -> dict[str, float]:
        """Run the load as chat completions."""
        sessions = [self._session(number) for number in range(self._scene.samples)]
        async with _serving(sessions) as server, _clients(server.url, sessions, self._scene) as go:
            cpu = time.process_time()
            ends = await go()
            cpu = time.process_time() - cpu
        assert all(len(session.turns.sequences()) == 1 for session in sessions)  # every call continued its history
        return {
            "tokens_per_second": steady(ends, skipped=self._scene.places * self._scene.calls),
            "cpu_ms_a_call": cpu / len(ends) * 1e3,
        }

    def _session(self, number: int) -> Session:
        generate = Calls(self._engine, num_tokens=self._scene.each(number))
        return Session(
            generate,
            chat_format=self._chat_format,
            name=str(number),
            max_tokens=10**9,
            context_tokens=generate.context_tokens,
        )


@contextlib.asynccontextmanager
async def _serving(sessions: Sequence[Session]) -> AsyncIterator[EndpointServer]:
    server = EndpointServer()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.close)
        for session in sessions:
            await stack.enter_async_context(server.session(session))
        yield server


@contextlib.asynccontextmanager
async def _clients(url: str, sessions: Sequence[Session], scene: Scene) -> AsyncIterator[Callable[[], Awaitable[Ends]]]:
    """Start a client process, and yield a function that lets it make all calls and returns when they ended."""
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    keys = [session.key for session in sessions]
    process = context.Process(target=_ask_there, args=(url, keys, scene, begin, results), daemon=True)
    process.start()
    try:
        await asyncio.to_thread(results.get)

        async def go() -> Ends:
            begin.set()
            ends: Ends | str = await asyncio.to_thread(results.get)
            if isinstance(ends, str):
                raise RuntimeError(ends)
            return ends

        yield go
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def _ask_there(url: str, keys: Sequence[str], scene: Scene, begin: Any, results: Any) -> None:
    ends: Ends = []

    async def play(http: aiohttp.ClientSession, number: int) -> None:
        messages = [question(number)]
        for _ in range(scene.calls):
            body = {"model": "m", "messages": messages, "max_tokens": scene.each(number)}
            async with http.post(url + CHAT, json=body, headers={"Authorization": f"Bearer {keys[number]}"}) as reply:
                said = await reply.json()
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {said}")
            ends.append((time.monotonic(), said["usage"]["completion_tokens"]))
            messages += [said["choices"][0]["message"], {"role": "user", "content": _FOLLOW_UP}]

    async def all_of_them() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            await keep_busy(scene.places, scene.samples, functools.partial(play, http))

    results.put("up")
    begin.wait()
    try:
        asyncio.run(all_of_them())
        results.put(ends)
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


def make_engine(model: Path, *, log: Path, arguments: Mapping[str, Any] | None = None) -> SGLangEngine:
    """Return an engine that is not started yet.

    arguments  server options that override those for a machine with GPUs
    """
    is_gpu = has_gpu()
    of_server = {**(GPU_ARGUMENTS if is_gpu else {}), **(arguments or {}), "skip-tokenizer-init": True}
    return SGLangEngine(
        model,
        device="cuda" if is_gpu else "cpu",
        dtype="bfloat16" if is_gpu else "float32",
        version=(0, 0),
        options=Options(stream_interval=16, version_source="stream", server_arguments=of_server),
        log_path=log,
    )


async def measure(options: argparse.Namespace, model: Path) -> AsyncGenerator[dict[str, Any]]:
    """Yield a row for each number of calls, on one server."""
    engine = make_engine(model, log=model.parent / "engine.log")
    began = time.monotonic()
    await engine.start()
    try:
        started = time.monotonic() - began
        chat_format = TemplateFormat(make_tokenizer(SHAPES[options.shape].vocabulary))
        for calls in options.calls:
            scene = Scene(
                places=options.requests,
                samples=options.requests * options.rounds,
                tokens=options.tokens,
                calls=calls,
            )
            load = Load(engine, chat_format, scene)
            await load.plain()  # compiles the kernels of these batch sizes
            turns = [await load.plain() | await load.agents() for _ in range(options.turns)]
            ratios = [turn["tokens_per_second"] / turn["plain_tokens_per_second"] for turn in turns]
            found = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
            about = {"calls": calls, "start_seconds": round(started, 1), "load": os.getloadavg()[0]}
            yield about | found | {"ratio": statistics.median(ratios), "ratios": ratios, "each": turns}
    finally:
        await engine.close()


async def report(options: argparse.Namespace, model: Path) -> None:
    """Print and save each row as it comes."""
    async with contextlib.aclosing(measure(options, model)) as rows:
        async for found in rows:
            row = {name: value for name, value in vars(options).items() if name != "json"}
            row |= found | {"command": command("benchmarks.gpu.endpoint"), **machine()}
            keep(row, options.json)
            print(json.dumps(row), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.endpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="0.6B")
    add("--requests", type=int, default=256, help="samples in flight")
    add("--rounds", type=int, default=5, help="samples that each of these places plays, one after another")
    add("--tokens", type=int, default=512, help="sampled for each on average, in all its calls together")
    add("--calls", type=int, nargs="+", default=[1, 4], help="of a sample; a row for each")
    add("--turns", type=int, default=3)
    add("--json", type=Path)
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="asyncrl-endpoint-") as folder:
        model = make_model(SHAPES[options.shape], Path(folder) / "model")
        asyncio.run(report(options, model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
