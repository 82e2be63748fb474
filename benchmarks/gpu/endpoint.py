"""What the endpoint for agents costs an engine: tokens/s through it against the plain path, on SGLang.

    python -m benchmarks.gpu.endpoint --shape 0.6B --requests 256 --json FILE
    python -m benchmarks.gpu.endpoint --calls 4        conversations of four calls instead of one
    python -m benchmarks.gpu.endpoint --shape tiny --requests 8 --tokens 32 --turns 2       a rehearsal on a CPU

In turns, the same load goes through SGLangEngine as a worker's plain path asks for it (token ids), and through
/v1/chat/completions of the endpoint on the same engine, whose clients are a process of their own, as harnesses are.
--requests samples are in flight, each of --tokens sampled tokens in --calls calls; every call but the first continues
the answers before it. A ratio is taken within one turn, the median of the turns is reported. The weights are random;
the tokenizer has a word for each id of theirs, so answers are some 8 characters a token, twice what real ones are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.messages import SamplingParams
from asyncrl.protocols import Generation
from asyncrl.rollouts.agent.endpoint.chat_format import TemplateFormat
from asyncrl.rollouts.agent.endpoint.parsers import PlainParser
from asyncrl.rollouts.agent.endpoint.server import EndpointServer
from asyncrl.rollouts.agent.endpoint.session import Session
from asyncrl.rollouts.agent.endpoint.template import Template
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
    """Bytes, two tokens of the template, and a word of seven or eight characters for every other id."""
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
    """Of some 130 bytes, and so as many tokens, the first of which differ."""
    random = np.random.default_rng(number)
    return {"role": "user", "content": " ".join([str(number), *random.choice(["a", "of"], _QUESTION_WORDS - 10)])}


class Calls:
    """``Generate`` on the engine, of ``num_tokens`` sampled tokens each."""

    attempt = 1
    context_tokens = 10**9

    def __init__(self, engine: SGLangEngine, *, num_tokens: int) -> None:
        self._engine = engine
        self._sampling = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        assert max_new_tokens in (None, self._sampling.max_new_tokens)
        return await self._engine.generate(tokens, self._sampling, seed=0)


class Load:
    """One engine's samples, on either path."""

    def __init__(self, engine: SGLangEngine, template: Template, options: argparse.Namespace) -> None:
        self._template = template
        self._samples: int = options.requests
        self._calls: int = options.calls
        self._each = options.tokens // options.calls
        self._generate = Calls(engine, num_tokens=self._each)
        self._follow_up = template.encode(
            f"<|im_end|>\n<|im_start|>user\n{_FOLLOW_UP}<|im_end|>\n<|im_start|>assistant\n"
        )

    async def plain(self) -> float:
        """Tokens/s of calls with token ids."""

        async def one(number: int) -> int:
            text = f"<|im_start|>user\n{question(number)['content']}<|im_end|>\n<|im_start|>assistant\n"
            tokens, count = self._template.encode(text), 0
            for _ in range(self._calls):
                answer = await self._generate(np.array(tokens, np.int32))
                count += len(answer.tokens)
                tokens += [*answer.tokens.tolist(), *self._follow_up]
            return count

        began = time.monotonic()
        done = await asyncio.gather(*map(one, range(self._samples)))
        return sum(done) / (time.monotonic() - began)

    async def agents(self) -> dict[str, float]:
        """Tokens/s of chat completions, and the CPU seconds of this process a call."""
        sessions = [self._session(number) for number in range(self._samples)]
        async with _serving(sessions) as server, _clients(server.url, sessions, self._calls, self._each) as go:
            began, cpu = time.monotonic(), time.process_time()
            count = await go()
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        assert all(len(session.turns.sequences()) == 1 for session in sessions)  # no history began anew
        return {"tokens_per_second": count / seconds, "cpu_ms_a_call": cpu / (self._samples * self._calls) * 1e3}

    def _session(self, number: int) -> Session:
        return Session(
            self._generate,
            chat_format=TemplateFormat(self._template, PlainParser(self._template.source)),
            name=str(number),
            max_tokens=10**9,
            context_tokens=self._generate.context_tokens,
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
async def _clients(url: str, sessions: Sequence[Session], calls: int, tokens: int) -> AsyncIterator[Any]:
    """Gives a function that lets a process that is up make all calls, and returns the tokens of its answers."""
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    keys = [session.key for session in sessions]
    process = context.Process(target=_ask_there, args=(url, keys, calls, tokens, begin, results), daemon=True)
    process.start()
    try:
        await asyncio.to_thread(results.get)

        async def go() -> int:
            begin.set()
            count = await asyncio.to_thread(results.get)
            if isinstance(count, str):
                raise RuntimeError(count)
            return int(count)

        yield go
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def _ask_there(url: str, keys: Sequence[str], calls: int, tokens: int, begin: Any, results: Any) -> None:
    async def one(http: aiohttp.ClientSession, key: str, number: int) -> int:
        messages, count = [question(number)], 0
        for _ in range(calls):
            body = {"model": "m", "messages": messages, "max_tokens": tokens}
            async with http.post(url + CHAT, json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
                said = await reply.json()
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {said}")
            count += said["usage"]["completion_tokens"]
            messages += [said["choices"][0]["message"], {"role": "user", "content": _FOLLOW_UP}]
        return count

    async def all_of_them() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            return sum(await asyncio.gather(*(one(http, key, number) for number, key in enumerate(keys))))

    results.put("up")
    begin.wait()
    try:
        results.put(asyncio.run(all_of_them()))
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")


async def measure(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    is_gpu = has_gpu()
    engine = SGLangEngine(
        model,
        device="cuda" if is_gpu else "cpu",
        dtype="bfloat16" if is_gpu else "float32",
        version=(0, 0),
        options=Options(
            stream_interval=16,
            version_source="stream",
            server_arguments={**(GPU_ARGUMENTS if is_gpu else {}), "skip-tokenizer-init": True},
        ),
        log_path=model.parent / "engine.log",
    )
    began = time.monotonic()
    await engine.start()
    try:
        started = time.monotonic() - began
        load = Load(engine, Template(make_tokenizer(SHAPES[options.shape].vocabulary)), options)
        await load.plain()  # kernels of these batch sizes are compiled
        turns = []
        for _ in range(options.turns):
            plain = await load.plain()
            turns.append({"plain_tokens_per_second": plain} | await load.agents())
    finally:
        await engine.close()
    found = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    ratio = statistics.median(turn["tokens_per_second"] / turn["plain_tokens_per_second"] for turn in turns)
    return {"start_seconds": started, **found, "ratio": ratio, "each": turns, "load": os.getloadavg()[0]}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.endpoint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="0.6B")
    add("--requests", type=int, default=256, help="samples in flight")
    add("--tokens", type=int, default=512, help="that are sampled for each, in all calls together")
    add("--calls", type=int, default=1)
    add("--turns", type=int, default=4)
    add("--json", type=Path)
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="asyncrl-endpoint-") as folder:
        model = make_model(SHAPES[options.shape], Path(folder) / "model")
        row = {name: value for name, value in vars(options).items() if name != "json"}
        row |= asyncio.run(measure(options, model)) | {"command": command("benchmarks.gpu.endpoint"), **machine()}
    keep(row, options.json)
    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
