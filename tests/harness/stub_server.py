"""An OpenAI-compatible server of no model, as [servers.NAME] with kind = "tests.harness.stub_server:StubServer".

Its grade of an answer is the number in the question's last line, else 10. It gives token t of any text the logprob
-(t % 7) / 7, so that what reaches the learner can be recomputed.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import torch
import transformers
from aiohttp import web
from numpy.typing import NDArray

from asyncrl.config import ServerSection
from asyncrl.engines.port import ServedTo
from asyncrl.messages.control import ServerAddress

KEY = "a key"


def teacher_logprobs(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """i32[T] -> f32[T]"""
    return (-(tokens % 7) / 7).astype(np.float32)


def likeliest(token: int) -> list[tuple[int, float]]:
    """Return the two likeliest tokens where ``token`` was sampled, and their logprobs."""
    return [(token + 1, -0.5), (token + 2, -1.5)]


class StubServer:
    """See ModelServer in engines/port.py."""

    def __init__(
        self, name: str, section: ServerSection, options: None, *, to: ServedTo, texts: list[str] | None = None
    ) -> None:
        """texts: text of each token; None: each is its number in brackets, which no tokenizer is compared with"""
        self._name = name
        self._host = to.host
        self._texts = texts
        self.requests: list[tuple[str, Any]] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        application = web.Application()
        for path, answer in (("chat/completions", self._grade), ("completions", self._score)):
            application.router.add_post(f"/v1/{path}", answer)
        application.router.add_post("/generate", self._generate)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)

    async def start(self) -> ServerAddress:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        port = self._runner.addresses[0][1]
        return ServerAddress(name=self._name, url=f"http://{self._host}:{port}/v1", model="stub", key=KEY)

    async def answers(self) -> None:
        pass

    async def wait(self) -> str:
        return await self.ended

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _read(self, request: web.Request) -> Any:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            raise web.HTTPUnauthorized
        body = await request.json()
        self.requests.append((request.path, body))
        return body

    async def _grade(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        number = re.search(r"(\d+)\s*$", body["messages"][0]["content"])
        message = {"content": f"Score: {number[1] if number else 10}"}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def _score(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        ids = body["prompt"]
        found = {"token_logprobs": [*self._logprobs(ids), -1.0], "tokens": [*map(self._text, ids), "!"]}
        if body["logprobs"] > 1:
            found["tokens"] = [f"token_id:{token}" for token in [*ids, 0]]
            tables = map(self._table, ids[1:], self._tops(ids, body["logprobs"]))
            found["top_logprobs"] = [None, *tables, {}]
        return web.json_response({"choices": [{"logprobs": found}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._read(request)
        ids, start = body["input_ids"], body["logprob_start_len"]
        entries = [[value, token, self._text(token)] for value, token in zip(self._logprobs(ids), ids, strict=True)]
        meta = {"input_token_logprobs": entries[start:]}
        if "top_logprobs_num" in body:
            tops = self._tops(ids, body["top_logprobs_num"])
            meta["input_top_logprobs"] = [None, *([[value, one, None] for one, value in top] for top in tops)][start:]
        return web.json_response({"meta_info": meta})

    def _table(self, token: int, top: list[tuple[int, float]]) -> dict[str, float]:
        """Return what vLLM says of a place: the likeliest by their ids, and the sampled token."""
        return {f"token_id:{one}": value for one, value in [(token, -9.0), *top]}

    def _tops(self, ids: list[int], count: int) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens at the place of each token but the first, with their logprobs."""
        return [likeliest(token) for token in ids[1:]]

    def _logprobs(self, ids: list[int]) -> list[float | None]:
        """Return the logprob of each token; none of the first."""
        return [None, *map(float, teacher_logprobs(np.array(ids[1:], np.int32)))]

    def _text(self, token: int) -> str:
        return f"<{token}>" if self._texts is None else self._texts[token]


class ModelOnACpu(StubServer):
    """The logprobs of the model in a folder, computed by Hugging Face."""

    def __init__(self, name: str, section: ServerSection, options: None, *, to: ServedTo) -> None:
        super().__init__(name, section, options, to=to)
        self._network = transformers.AutoModelForCausalLM.from_pretrained(section.path, dtype=torch.float32).eval()

    def _logprobs(self, ids: list[int]) -> list[float | None]:
        found = self._distributions(ids).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        return [None, *found.tolist()]

    def _tops(self, ids: list[int], count: int) -> list[list[tuple[int, float]]]:
        values, tokens = self._distributions(ids).topk(count)
        return [list(zip(*both, strict=True)) for both in zip(tokens.tolist(), values.tolist(), strict=True)]

    def _distributions(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(self._network(torch.tensor([ids])).logits[0, :-1], -1)
