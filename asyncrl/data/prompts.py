"""The endless, shuffled sequence of prompts that a run draws from.

A *position* counts rows of that sequence from 0, over-long ones too, and depends on the data and the seed alone
(sources.py). A resumed run that stored its position goes on with the very next prompt and tokenises nothing again. Kept
by tests/unit/data/test_prompts.py::test_a_resumed_run_continues_exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl import config
from asyncrl.data import chat
from asyncrl.data.row_check import RowCheck, RowLimits, plain, sampling_of, short
from asyncrl.data.sources import Found, Positions, open_positions
from asyncrl.errors import ConfigError

_NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
_NO_MASK: NDArray[np.bool_] = np.zeros(0, np.bool_)
_SAMPLE = 256
"""Rows that ``PromptDataset.look`` tokenises of a large file."""
_LONGEST_TOKEN = 1024
"""Characters: no vocabulary has longer ones, so a text of megabytes is found too long without tokenising it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt.

    prompt         the text that was tokenised, chat template included
    tokens         i32[T]; empty when there are too many (PromptDataset.most_tokens)
    response       i32[R], the answer to imitate and <eos>, or the rest of a conversation; empty if the data has none
    response_mask  bool[R], which of it is trained; empty: all
    sampling       what the row overrides of [rollout]
    reward         name of the row's reward; empty: reward.kind
    dataset        name of the file of [[data.files]]; empty with one file
    key            the same for the same row in every pass
    messages       what the chat template made the prompt of, where RowLimits.keeps_messages; else empty
    """

    epoch: int
    prompt: str
    tokens: NDArray[np.int32]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    response: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    response_mask: NDArray[np.bool_] = field(default_factory=lambda: _NO_MASK)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    reward: str = ""
    dataset: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    key: tuple[int, int] = (0, 0)


def indexed(data: config.DataSection, *, seed: int, limits: RowLimits) -> Positions:
    """The rows of the run file's [data], each looked at but none tokenised. Raises ConfigError."""
    check = RowCheck(data, limits)
    rows = open_positions(data, seed=seed, check=check)
    if rows.num_rows:  # a source of the user's own is asked row by row
        check.require_seen()
    return rows


class PromptDataset:
    """Prompts by position. One caller at a time: one actor owns it."""

    def __init__(
        self,
        rows: Positions,
        data: config.DataSection,
        *,
        tokenizer: Any,
        limits: RowLimits,
        system_prompt: str = "",
    ) -> None:
        self._rows = rows
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._most_tokens = min(data.max_prompt_tokens, limits.prompt_tokens)
        self._limits = limits
        self._keeps_messages = limits.keeps_messages and data.chat_template and not data.conversation_key
        self._data = data
        self._tokenizer = tokenizer
        self._template = chat.ChatTemplate(tokenizer, data.chat_template_options)
        self._too_long: set[tuple[int, int]] = set()

    @classmethod
    def open(
        cls,
        data: config.DataSection,
        *,
        tokenizer: Any,
        seed: int,
        limits: RowLimits | None = None,
        system_prompt: str = "",
        rows: Positions | None = None,
    ) -> PromptDataset:
        """The dataset of the run file's [data]. Raises ConfigError for the first row that cannot be a prompt.

        system_prompt: a message in front of every prompt, for a chat template
        rows: of ``indexed``; None opens them
        """
        limits = limits or RowLimits()
        if data.chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{limits.keys}chat_template is true but the model's tokenizer has no chat template; set it false"
            )
        if data.response_key and tokenizer.eos_token_id is None:
            raise ConfigError(
                "data.response_key: the model's tokenizer has no eos token, so no answer could end; name one "
                "in its tokenizer_config.json"
            )
        rows = indexed(data, seed=seed, limits=limits) if rows is None else rows
        return cls(rows, data, tokenizer=tokenizer, limits=limits, system_prompt=system_prompt)

    @property
    def num_rows(self) -> int:
        """Positions of one epoch; 0 of a source of the user's own."""
        return self._rows.num_rows

    @property
    def dropped(self) -> int:
        """Rows found too long so far."""
        return len(self._too_long)

    @property
    def most_tokens(self) -> int:
        """Of a prompt that is not too long: data.max_prompt_tokens, or what an answer leaves of the context."""
        return self._most_tokens

    def look(self) -> int:
        """Tokenise the first rows that a run would draw, and count them: all of a small file, 256 of a large one.

        ``dropped`` says how many of them are too long. Raises ConfigError as ``at`` does, and if all of them are.
        """
        seen = 0
        while seen < min(self.num_rows or _SAMPLE, _SAMPLE) and self.at(seen) is not None:
            seen += 1
        if not seen:
            raise ConfigError(f"{self._data.where}: has no rows")
        if self.dropped == seen:
            of = f" of the {self.num_rows} looked at" if self.num_rows else ""
            raise ConfigError(f"{self._data.where}: {self._all_too_long(f'{seen} prompts{of}')}")
        return seen

    def at(self, position: int) -> PromptRow | None:
        """The row at ``position``; its tokens are empty when it is too long. None when the epochs are over.

        Raises ConfigError for a row that cannot be tokenised, and when every row has been found too long.
        """
        if (found := self._rows.at(position)) is None:
            return None
        row = self._made(found)
        if self.num_rows and self.dropped == self.num_rows:
            raise ConfigError(f"{self._data.where}: {self._all_too_long(f'{self.num_rows} prompts')}")
        return row

    def _all_too_long(self, prompts: str) -> str:
        if self._most_tokens == self._data.max_prompt_tokens:
            return f"all {prompts} have more than data.max_prompt_tokens = {self._most_tokens} tokens"
        return (
            f"all {prompts} have more than {self._most_tokens} tokens, which is what rollout.max_new_tokens leaves of "
            "the model's context"
        )

    def _made(self, found: Found) -> PromptRow:
        row, where, data = found.row, found.where, self._data
        if found.key in self._too_long:
            return PromptRow(epoch=found.epoch, prompt="", tokens=_NO_TOKENS, key=found.key)
        text, response = self._texts(row, where)
        tokens: list[int] = []
        if len(text) <= _LONGEST_TOKEN * self._most_tokens:
            tokens = self._tokenizer(text, add_special_tokens=not data.chat_template, verbose=False)["input_ids"]
            if not tokens:
                raise ConfigError(f"{where}: the prompt {short(text)} has no tokens")
        if not 0 < len(tokens) <= self._most_tokens:
            self._too_long.add(found.key)
            return PromptRow(epoch=found.epoch, prompt=text[:_LONGEST_TOKEN], tokens=_NO_TOKENS, key=found.key)
        answer, mask = self._response(response)
        if (largest := max([*tokens, *answer.tolist()])) >= self._limits.vocabulary:
            raise ConfigError(
                f"{where}: the tokenizer makes token {largest} of it, and the model's last is "
                f"{self._limits.vocabulary - 1}; take both from the same model"
            )
        return PromptRow(
            epoch=found.epoch,
            prompt=text,
            tokens=np.asarray(tokens, dtype=np.int32),
            label=plain(row.get(data.label_key), where, data.label_key),
            metadata=plain(row.get(data.metadata_key) or {}, where, data.metadata_key),
            response=answer,
            response_mask=mask,
            sampling=sampling_of(row, data, where, limits=self._limits),
            reward=(row.get(data.reward_key) or "") if data.reward_key else "",
            dataset=found.dataset,
            key=found.key,
            messages=tuple(plain(self._messages(row), where, data.prompt_key)) if self._keeps_messages else (),
        )

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        prompt = row[self._data.prompt_key]
        return [*self._system, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)]

    def _texts(self, row: Mapping[str, Any], where: str) -> tuple[str, list[tuple[str, bool]]]:
        """The text of the prompt, and the parts of what is to be imitated, each with whether it is trained."""
        data = self._data
        if data.conversation_key:
            tools = chat.tools_of(row, data, where)
            return self._template.conversation([*self._system, *row[data.conversation_key]], tools=tools, where=where)
        prompt = row[data.prompt_key]
        if data.chat_template:
            tools = chat.tools_of(row, data, where)
            prompt = self._template.text(self._messages(row), tools=tools, where=where)
        return prompt, [(row[data.response_key], True)] if data.response_key else []

    def _response(self, parts: list[tuple[str, bool]]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens, and which are trained: i32[R], bool[R]. Special tokens are the prompt's: the answer goes on where it
        ends. An answer in a column gets <eos>; of a turn that the template ended what follows <eos> is not trained."""
        if not parts:
            return _NO_TOKENS, _NO_MASK
        end = self._tokenizer.eos_token_id
        pieces: list[tuple[list[int], list[bool]]] = []
        for text, is_trained in parts:
            tokens = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if not self._data.conversation_key:
                tokens = [*tokens, end]
            last = len(tokens) - tokens[::-1].index(end) if is_trained and end in tokens else len(tokens)
            pieces.append((tokens, [is_trained and place < last for place in range(len(tokens))]))
        ids = np.asarray([token for tokens, _ in pieces for token in tokens], dtype=np.int32)
        mask = np.asarray([one for _, masks in pieces for one in masks], dtype=np.bool_)
        return ids, _NO_MASK if mask.all() else mask
