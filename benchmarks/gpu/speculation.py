"""Compare an engine with and without speculative decoding: tokens per second with few and with many answers running.

    python -m benchmarks.gpu.speculation --model SMOLLM2 --json docs/results/gpu/speculation.jsonl     one GPU
    python -m benchmarks.gpu.speculation --shape 0.6B       random weights: nothing can be foreseen, what it costs
    python -m benchmarks.gpu.speculation --rehearse         the in-process engine, twice

All servers run on the same GPU and sample in turns. With a model's folder, prompts are chats of the mixed task
(reasoning.py), eight answers to each, which end where the model ends them; with a shape they are random, and every
answer has --length tokens. NGRAM drafts what followed the same tokens in earlier prompts and answers of this server.
NGRAM-log has those of another server, too, as a run's log has them of an earlier epoch: answers of plain to the same
prompts, sampled and fed before the windows (SGLang's /add_external_corpus).

running     answers at once: 1 to 16 are the tail of a batch, 256 a full engine
accepted    share of the drafted tokens that were sampled
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.generation import Generation
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.engines.port import Engine
from asyncrl.engines.sglang import engine as sglang
from asyncrl.errors import EngineError
from asyncrl.messages import SamplingParams
from benchmarks.gpu.fleet import GPU_ARGUMENTS, has_gpu
from benchmarks.gpu.learner import make_model
from benchmarks.gpu.modes import assignments
from benchmarks.gpu.reasoning import TASKS, write_exam
from benchmarks.gpu.rows import command, keep, machine
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.window import Row

Prompt = NDArray[np.int32]

_NGRAM: Final = {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 8}
FED: Final = "NGRAM-log"
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "NGRAM": _NGRAM,
    FED: {**_NGRAM, "speculative-ngram-external-sam-budget": 7},
}
SERVER: Final[Mapping[str, Any]] = {
    **GPU_ARGUMENTS,
    "disable-prefill-cuda-graph": True,
    "mem-fraction-static": 0.8,
    "max-total-tokens": 100_000,  # servers start at once, so none knows what the others will take
    "cuda-graph-max-bs": 256,
    "max-running-requests": 264,
}
REHEARSAL: Final[Mapping[str, Any]] = {"shape": "tiny", "running": [1, 4], "length": 16, "windows": 2, "answers": 8}
_OF_GROUP: Final = 8
_CONTEXT: Final = 64
"""Last tokens of a prompt that stand before its answer in what is fed."""
_EARLIER: Final = 10**6
"""Added to the seeds of those answers."""
HEAD: Final = "model        arm        running     tok/s   of plain  accepted  answers  length"


def line(row: Row) -> str:
    return (
        f"{row['model']:12s} {row['arm']:10s} {row['running']:7d}  {row['tokens_per_second']:8,.0f}"
        f"  {row['of_plain']:9.2f}  {row['accepted']:8.1%}  {row['answers']:7d}  {row['length_mean']:6.1f}"
    )


def prompts(folder: Path, options: argparse.Namespace, scratch: Path) -> list[Prompt]:
    """Return more prompts than any window asks for."""
    if options.model is None:
        generator = np.random.default_rng(0)
        return [generator.integers(4, 40, 96).astype(np.int32) for _ in range(4096)]
    tokenizer = load_tokenizer(folder)
    exam = write_exam(scratch / "exam.jsonl", tasks=TASKS / "mixed", problems=256)
    chats = [json.loads(row)["prompt"] for row in exam.read_text().splitlines()]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return [np.asarray(ids, np.int32) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def made_engine(folder: Path, arm: str, options: argparse.Namespace, log: Path) -> Engine:
    if options.rehearse:
        settings = inprocess.Options(threads=1)
        return inprocess.InProcessEngine(folder, device="cpu", dtype="float32", version=(0, 0), options=settings)
    arguments = sglang.Options(server_arguments={**SERVER, **ARMS[arm], **options.engine})
    return sglang.SGLangEngine(
        folder, device="cuda", dtype="bfloat16", version=(0, 0), options=arguments, log_path=log / f"{arm}.engine.log"
    )


class Bench:
    """The engines of one model, and the windows measured of each."""

    def __init__(
        self, engines: Mapping[str, Engine], asked: Sequence[Prompt], tokenizer: Any, options: argparse.Namespace
    ) -> None:
        self._engines, self._asked, self._tokenizer, self._options = engines, asked, tokenizer, options
        self._next = 0

    async def windows(self, running: int) -> dict[str, list[tuple[float, list[Generation]]]]:
        """Return seconds and answers of each window, arms in turns; the first window of each arm warms up."""
        found: dict[str, list[tuple[float, list[Generation]]]] = {arm: [] for arm in self._engines}
        number = max(running, self._options.answers)
        groups = max(1, number // _OF_GROUP)
        asked: list[list[Prompt]] = []
        for _ in range(self._options.windows + 1):
            chosen = [self._asked[(self._next + n) % len(self._asked)] for n in range(groups)]
            self._next += groups
            asked.append([chosen[n % groups] for n in range(number)])
        if FED in self._engines:
            await self._feed([one for each in asked for one in each], name=f"{running} running")
        for window, each in enumerate(asked):
            for arm, engine in self._engines.items():
                began = time.monotonic()
                answers = await self._answer(engine, each, running=running, seed=window * number)
                if window:
                    found[arm].append((time.monotonic() - began, answers))
        return found

    async def _answer(self, engine: Engine, asked: Sequence[Prompt], *, running: int, seed: int) -> list[Generation]:
        at_once = asyncio.Semaphore(running)

        async def answer(number: int, prompt: Prompt) -> Generation:
            async with at_once:
                return await engine.generate(prompt, self._sampling, seed=seed + number)

        return list(await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(asked))))

    async def _feed(self, asked: Sequence[Prompt], *, name: str) -> None:
        earlier = await self._answer(self._engines["plain"], asked, running=len(asked), seed=_EARLIER)
        pairs = zip(asked, earlier, strict=True)
        texts = [self._tokenizer.decode([*prompt[-_CONTEXT:], *answer.tokens]) for prompt, answer in pairs]
        fed = self._engines[FED]
        assert isinstance(fed, sglang.SGLangEngine)
        url, corpus = f"{fed.url}/add_external_corpus", {"corpus_id": name, "documents": texts}
        async with aiohttp.ClientSession() as http, http.post(url, json=corpus) as said:
            if said.status != HTTPStatus.OK:
                raise EngineError(f"{url}: {await said.text()}")

    @property
    def _sampling(self) -> SamplingParams:
        options = self._options
        return SamplingParams(max_new_tokens=options.length, ignore_eos=options.model is None)


def rows_of(found: Mapping[str, Sequence[tuple[float, Sequence[Generation]]]]) -> dict[str, Row]:
    """Return each arm's median window, and its ratio to that of the plain engine."""
    made: dict[str, Row] = {}
    for arm, windows in found.items():
        speeds = [sum(len(one.tokens) for one in answers) / seconds for seconds, answers in windows]
        answers = [one for _, its in windows for one in its]
        drafted = sum(one.report.drafted_tokens for one in answers)
        made[arm] = {
            "tokens_per_second": statistics.median(speeds),
            "windows": [round(speed, 1) for speed in speeds],
            "accepted": sum(one.report.accepted_tokens for one in answers) / max(1, drafted),
            "drafted": drafted,
            "answers": len(answers),
            "length_mean": statistics.fmean(len(one.tokens) for one in answers),
        }
    plain = made["plain"]["tokens_per_second"]
    return {arm: row | {"of_plain": row["tokens_per_second"] / plain} for arm, row in made.items()}


async def measure(folder: Path, asked: Sequence[Prompt], options: argparse.Namespace, log: Path) -> int:
    """Print and keep the rows. Return the exit code."""
    arms = [arm for arm in ARMS if not (options.rehearse and arm == FED)]  # the in-process engine drafts nothing
    engines = {arm: made_engine(folder, arm, options, log) for arm in arms}
    about = {"model": options.model.name if options.model else options.shape}
    about |= {"command": command("benchmarks.gpu.speculation"), **machine()}
    try:
        starts = await asyncio.gather(*(engine.start() for engine in engines.values()), return_exceptions=True)
        problems = {arm: error for arm, error in zip(engines, starts, strict=True) if error is not None}
        for arm, error in problems.items():
            print(f"{arm}: {error}", flush=True)
            keep({"arm": arm, "error": f"{type(error).__name__}: {error}"[:2000], **about}, options.json)
        if "plain" in problems:
            return 1
        there = {arm: engine for arm, engine in engines.items() if arm not in problems}
        bench = Bench(there, asked, load_tokenizer(folder), options)
        print(HEAD, flush=True)
        for running in options.running:
            for arm, row in rows_of(await bench.windows(running)).items():
                row = {"arm": arm, "running": running, **row, **about}
                print(line(row), flush=True)
                keep(row, options.json)
    finally:
        for engine in engines.values():
            await engine.close()
    return int(bool(problems))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a model that has learned something, such as SmolLM2-135M")
    add("--shape", choices=SHAPES, default="0.6B", help="without --model: random weights (default 0.6B)")
    add("--running", nargs="+", type=int, default=[1, 4, 16, 256], help="answers at once (default 1 4 16 256)")
    add("--windows", type=int, default=3, help="of each arm and number (default 3)")
    add("--answers", type=int, default=32, help="of a window at least (default 32)")
    add("--length", type=int, default=96, help="most tokens of an answer (default 96)")
    add("--engine", nargs="+", default=[], metavar="OPTION=VALUE", help="options of all servers")
    add("--json", type=Path, metavar="FILE", help="rows are added there, one object a line")
    add("--out", type=Path, metavar="FOLDER", help="for the servers' logs")
    add("--rehearse", action="store_true", help="tiny, on a CPU")
    options = parser.parse_args(given)
    if options.rehearse:
        parser.set_defaults(**REHEARSAL)
        options = parser.parse_args(given)
    options.engine = assignments(options.engine)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if has_gpu() else None) as scratch:
        folder = options.model or Path(scratch, "model")
        if options.model is None:
            make_model(options.shape, folder, dtype="float32" if options.rehearse else "bfloat16")
        log = options.out or Path(scratch)
        log.mkdir(parents=True, exist_ok=True)
        return asyncio.run(measure(folder, prompts(folder, options, Path(scratch)), options, log))


if __name__ == "__main__":
    sys.exit(main())
