"""Helpers for testing an agent's endpoint: a tokenizer with several tokenizations per text, and a scripted engine."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.engines.generation import Generation, RequestReport
from asyncrl.environments.agent.endpoint.chat_format import ChatFormat, TemplateFormat
from asyncrl.environments.agent.endpoint.server import EndpointServer
from asyncrl.environments.agent.endpoint.session import Session
from asyncrl.messages import VersionSpan
from asyncrl.messages.control import ServerAddress

# Similar to Qwen's: thinking is left out of turns before the last question, and arguments are rendered again.
CHAT_TEMPLATE = """
{%- set last = namespace(at=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}
{%- if m.reasoning_content and loop.index0 > last.at -%}
{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
{%- endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\n</tool_call>' }}{% endfor -%}
{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
CALLED = '{"name": "add", "arguments": {"b":2,  "a": 40}}'
CALL = f"<think>\nUse the tool.\n</think>\n\nLet me see.\n<tool_call>\n{CALLED}\n</tool_call>"
ANSWER = "<think>\nThe tool says 42.\n</think>\n\nThe answer is 42."


def tokenizer() -> Any:
    """Bytes, a few merges of them, and the tokens of a chat template. "the" may be three tokens, two, or one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("i", "s"), ("4", "2"), ("o", "o"), ("Ġ", "the")]
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {piece: place for place, piece in enumerate([*names, *letters, *("".join(pair) for pair in merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        additional_special_tokens=names[:2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


TOKENIZER = tokenizer()


def pieces(text: str) -> list[int]:
    """Return the tokens of a text as a policy may sample them: without merges, except for tags."""
    whole = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    made: list[int] = []
    for token in whole:
        piece = TOKENIZER.convert_ids_to_tokens(token)
        split = len(piece) > 1 and not piece.startswith("<")
        made += [TOKENIZER.convert_tokens_to_ids(letter) for letter in piece] if split else [token]
    return made


class Scripted:
    """``Generate`` that returns the given texts, one per call, in a tokenization that no tokenizer would produce.

    The weights change in the middle of each answer.
    """

    attempt = 1
    context_tokens = 100_000

    def __init__(
        self, said: Sequence[str] | Callable[[str, int], str], *, seconds: float = 0.0, ends: bool = True
    ) -> None:
        """ends   answers end with the model's end token; else with their text, as with a stop string"""
        self._said, self._seconds, self._ends = said, seconds, ends
        self.given: list[list[int]] = []
        self.answers: list[Generation] = []
        self.limits: list[int | None] = []
        self.servers: dict[str, ServerAddress] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, tokens: NDArray[np.int32], *, max_new_tokens: int | None = None) -> Generation:
        number = len(self.given)
        self.given.append(tokens.tolist())
        self.limits.append(max_new_tokens)
        await self.gate.wait()
        await asyncio.sleep(self._seconds)
        said = self._said(TOKENIZER.decode(tokens), number) if callable(self._said) else self._said[number]
        ids = [*pieces(said), *([TOKENIZER.eos_token_id] if self._ends else [])]
        is_cut = max_new_tokens is not None and len(ids) > max_new_tokens
        ids = ids[:max_new_tokens]
        spans = [VersionSpan(start=0, incarnation=0, policy_version=2 * number)]
        if len(ids) > 2:
            spans.append(VersionSpan(start=len(ids) // 2, incarnation=0, policy_version=2 * number + 1))
        answer = Generation(
            tokens=np.array(ids, np.int32),
            logprobs=-(np.arange(1, len(ids) + 1) / 1000 + number).astype(np.float32),
            version_spans=tuple(spans),
            finish_reason="length" if is_cut else "stop",
            report=RequestReport(cached_tokens=len(self.given[number - 1]) if number else 0),
        )
        self.answers.append(answer)
        return answer


def chat_format(tokenizer: Any = TOKENIZER, *, keeps_thinking: bool = True) -> ChatFormat:
    return TemplateFormat(tokenizer, keeps_thinking=keeps_thinking)


def session(engine: Any, **changes: Any) -> Session:
    settings: dict[str, Any] = {"max_tokens": 10_000, "context_tokens": 100_000, "name": "0/0"}
    return Session(engine, **(settings | {"chat_format": chat_format()} | changes))


class Client:
    """An agent's client: sends requests with its session's key. Open it with ``async with``."""

    def __init__(self, engine: Any, **changes: Any) -> None:
        self.engine = engine
        self.session = session(engine, **changes)
        self.server = EndpointServer()

    async def __aenter__(self) -> Client:
        self._open = self.server.session(self.session)
        await self._open.__aenter__()
        self.http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.session.key}"})
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.http.close()
        try:
            await self._open.__aexit__(*error)
        finally:
            await self.server.close()

    async def post(self, path: str, body: Any, *, status: int = 200, **headers: str) -> Any:
        """Return the reply; for a stream, its events as (name, data)."""
        sent = {"headers": headers} | ({"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body})
        async with self.http.post(self.server.url + path, **sent) as reply:
            text = await reply.text()
            assert reply.status == status, text
            return events(text) if reply.content_type == "text/event-stream" else await reply.json()

    async def chat(self, messages: list[Any], *, status: int = 200, **body: Any) -> Any:
        return await self.post("/v1/chat/completions", {"model": "m", "messages": messages, **body}, status=status)

    async def say(self, messages: list[Any], **body: Any) -> Any:
        """Return the message of the answer."""
        return (await self.chat(messages, **body))["choices"][0]["message"]

    def check(self) -> int:
        """Check that the training data is what the engine received and returned, with each sampled token once.

        Return the number of sequences.
        """
        left = {number: answer.tokens.tolist() for number, answer in enumerate(self.engine.answers)}
        sequences = self.session.turns.sequences()
        for sequence in sequences:
            made = sequence.trajectory
            whole = [*sequence.prompt_tokens.tolist(), *made.tokens.tolist()]
            starts = dict(sequence.turns)
            trained = np.zeros(len(made.tokens), bool)
            for number, start in starts.items():
                at, answer = start + len(sequence.prompt_tokens), self.engine.answers[number]
                end = start + len(answer.tokens)
                assert whole[:at] == self.engine.given[number]
                assert whole[at : at + len(answer.tokens)] == left.pop(number)
                assert made.behavior_logprobs[start:end].tolist() == answer.logprobs.tolist()
                assert versions(made.version_spans, start, end) == versions(answer.version_spans, 0, end - start)
                trained[start:end] = True
            assert made.response_mask.tolist() == trained.tolist()
            assert not made.behavior_logprobs[~trained].any()
        assert not left, f"answers {sorted(left)} are not trained"
        return len(sequences)


def versions(spans: Sequence[VersionSpan], start: int, end: int) -> list[int]:
    """Return the policy version of each token."""
    return [[span.policy_version for span in spans if span.start <= place][-1] for place in range(start, end)]


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            data = lines["data"]
            found.append((lines.get("event", ""), None if data == "[DONE]" else json.loads(data)))
    return found
