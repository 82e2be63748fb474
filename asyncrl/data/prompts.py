"""The endless, shuffled sequence of prompts that a run draws from.

A *position* counts the rows of the sequence from 0, including over-long rows. The row at a position depends only on the
data and the seed (sources.py). A resumed run that stored its position continues with the very next prompt and does not
tokenise earlier ones again (tests/unit/data/test_prompts.py::test_a_resumed_run_continues_exactly).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl import config
from asyncrl.data import chat
from asyncrl.data.oddities import Oddities
from asyncrl.data.row_check import RowCheck, RowLimits, metadata_of, sampling_of, short, value_at
from asyncrl.data.row_images import RowImages
from asyncrl.data.sources import Found, Positions, open_positions
from asyncrl.errors import ConfigError, ImageError
from asyncrl.images.parts import Source, take_images, without_images
from asyncrl.messages.images import ImageRef

log = logging.getLogger("asyncrl.data")

_NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
_NO_MASK: NDArray[np.bool_] = np.zeros(0, np.bool_)
_SAMPLE = 256
"""Number of rows of a large file that ``PromptDataset.check_first_rows`` tokenises."""
_MOST_EXPLAINED: Final = 10
"""Rows whose images cannot be shown that are named; a folder that is missing breaks all of them."""
_SHOWN: Final = 1500
"""Characters that are shown of each end of a long prompt."""
_REPEATED: Final = re.compile(r"(<[^<>\s]+>)\1{3,}")
_LONGEST_TOKEN = 1024
"""Maximum characters of a token in any vocabulary. So a text of megabytes is found too long without tokenising it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt.

    prompt         text that was tokenised, including the chat template
    tokens         i32[T]; empty if the prompt is too long (PromptDataset.most_tokens), or has a ``problem``
    response       i32[R], the answer to imitate and <eos>, or the rest of a conversation; empty if the data has none
    response_mask  bool[R], which response tokens are trained; empty: all
    sampling       the row's overrides of [rollout]
    reward         name of the row's reward; empty: reward.kind
    dataset        name of the file in [[data.files]]; empty for a single file
    messages       chat messages that the prompt was rendered from, with RowLimits.keeps_messages; else empty
    images         images that the prompt shows, in order
    problem        why its images cannot be shown; "" if they can
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
    images: tuple[ImageRef, ...] = ()
    problem: str = ""


def open_checked(data: config.DataSection, *, seed: int, limits: RowLimits) -> Positions:
    """Open the rows of the run file's [data]. Checks every row of its files, tokenises none. Raises ConfigError."""
    check = RowCheck(data, limits)
    rows = open_positions(data, seed=seed, check=check)
    if rows.num_rows:  # a user's source is checked row by row, later
        check.require_seen()
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompts:
    """What was found by looking at the first rows that a run draws.

    num_rows    number of rows looked at
    has_labels  whether one of them has a label
    shown       the first prompt as the model sees it, and its label or answer: pairs of title and text
    oddities    one line for each thing that is hardly ever meant
    """

    num_rows: int
    has_labels: bool
    shown: tuple[tuple[str, str], ...]
    oddities: tuple[str, ...]


class PromptDataset:
    """Prompts by position. Not for concurrent use; one actor owns it."""

    def __init__(
        self,
        rows: Positions,
        data: config.DataSection,
        *,
        tokenizer: Any,
        limits: RowLimits,
        images: RowImages | None = None,
    ) -> None:
        self._rows = rows
        self._images = images
        self._system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        self._most_tokens = min(data.max_prompt_tokens, limits.prompt_tokens)
        self._limits = limits
        self._keeps_messages = limits.keeps_messages and data.chat_template and not data.conversation_key
        self._data = data
        self._tokenizer = tokenizer
        self._template = chat.ChatTemplate(tokenizer, data.chat_template_options)
        self._too_long: set[tuple[int, int]] = set()
        self._broken: dict[tuple[int, int], str] = {}
        """Rows whose images cannot be shown, and why."""

    @classmethod
    def open(
        cls,
        data: config.DataSection,
        *,
        tokenizer: Any,
        seed: int,
        limits: RowLimits | None = None,
        rows: Positions | None = None,
        images: RowImages | None = None,
    ) -> PromptDataset:
        """Open the dataset of the run file's [data]. Raises ConfigError for the first row that cannot be a prompt.

        rows    rows from ``open_checked``; None opens them
        images  reads the images of rows; None: the model reads none
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
        rows = open_checked(data, seed=seed, limits=limits) if rows is None else rows
        return cls(rows, data, tokenizer=tokenizer, limits=limits, images=images)

    @property
    def num_rows(self) -> int:
        """Positions per epoch; 0 for a user's source."""
        return self._rows.num_rows

    @property
    def dropped(self) -> int:
        """Number of rows found too long so far."""
        return len(self._too_long)

    @property
    def broken(self) -> int:
        """Number of rows found so far whose images cannot be shown."""
        return len(self._broken)

    @property
    def most_tokens(self) -> int:
        """Token limit of a prompt: data.max_prompt_tokens, or the context minus an answer, whichever is smaller."""
        return self._most_tokens

    def check_first_rows(self) -> FirstPrompts:
        """Tokenise the first rows that a run would draw, all of a small file, else 256, and look at them.

        ``dropped`` then counts those that are too long. Raises ConfigError as ``at`` does, and if all are too long.
        """
        looked = self.look(_SAMPLE)
        if not looked.num_rows:
            raise ConfigError(f"{self._data.where}: has no rows")
        if self.dropped + self.broken == looked.num_rows:
            of = f" of the {self.num_rows} looked at" if self.num_rows > looked.num_rows else ""
            raise ConfigError(f"{self._data.where}: {self._all_too_long(f'{looked.num_rows} prompts{of}')}")
        return looked

    def look(self, most: int) -> FirstPrompts:
        """Tokenise up to ``most`` of the first rows, each once. Raises ConfigError as ``at`` does."""
        oddities = Oddities(self._tokenizer, self._template, self._data, limits=self._limits)
        first: PromptRow | None = None
        has_labels, seen = False, set()
        num_rows = min(self.num_rows or most, most)
        for position in range(num_rows):
            if (found := self._rows.at(position)) is None:
                num_rows = position
                break
            row = self._make(found)
            has_labels = has_labels or row.label is not None
            if found.key in seen:  # a mixture may repeat a row
                continue
            seen.add(found.key)
            if not len(row.tokens):
                if not row.problem:  # which is a warning already
                    oddities.skip()
                continue
            first = first or row
            is_plain = not self._data.chat_template and not self._data.conversation_key
            oddities.see(
                row.prompt if is_plain else without_images(self._shown(found.row)[0]),
                rendered=row.prompt,
                tokens=row.tokens.tolist(),
                answer=row.response.tolist(),
                label=row.label,
                tools=chat.tools_of(found.row, self._data, found.where) or (),
                where=found.where,
                shown="".join(image.digest for image in row.images),
            )
        shown = () if first is None else self._show(first)
        return FirstPrompts(num_rows=num_rows, has_labels=has_labels, shown=shown, oddities=tuple(oddities.lines()))

    def _show(self, row: PromptRow) -> tuple[tuple[str, str], ...]:
        """Return the prompt as the model sees it, the answer to imitate, and the label, each with its title."""
        tokens = row.tokens.tolist()
        is_bare = (
            self._template.source
            and not self._data.chat_template
            and not {*tokens} & {*self._tokenizer.all_special_ids}
        )
        bare = ", without the model's chat template (data.chat_template = false)" if is_bare else ""
        shown = [("first prompt", self._quote(tokens) + bare)]
        if len(row.response):
            mask = row.response_mask if len(row.response_mask) else np.ones(len(row.response), np.bool_)
            shown.append(("what is trained", self._quote(row.response[mask].tolist())))
        elif row.label is not None:
            shown.append(("its label", short(row.label)))
        return tuple(shown)

    def _quote(self, tokens: list[int]) -> str:
        """Return the text of tokens in one line, special tokens included, shortened in its middle. A tag that is
        repeated, as an image's placeholder is, stands there once, with its number."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = _REPEATED.sub(lambda found: f"{found[1]} x {len(found[0]) // len(found[1]):,} ", text)
        quoted = json.dumps(text, ensure_ascii=False)
        quoted = "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in quoted)
        if len(quoted) > 2 * _SHOWN:
            quoted = f"{quoted[:_SHOWN]} ... {quoted[-_SHOWN:]}"
        return f"{quoted} ({len(tokens):,} tokens)"

    def at(self, position: int) -> PromptRow | None:
        """Return the row at ``position``, with empty tokens if it is too long; None after the last epoch.

        Raises ConfigError for a row that cannot be tokenised, and once every row was found too long.
        """
        if (found := self._rows.at(position)) is None:
            return None
        row = self._make(found)
        if self.num_rows and self.dropped + self.broken == self.num_rows:
            raise ConfigError(f"{self._data.where}: {self._all_too_long(f'{self.num_rows} prompts')}")
        return row

    def _all_too_long(self, prompts: str) -> str:
        if self._broken:
            return f"none of the {prompts} can be shown: {next(iter(self._broken.values()))}"
        if self._most_tokens == self._data.max_prompt_tokens:
            return f"all {prompts} have more than data.max_prompt_tokens = {self._most_tokens} tokens"
        return (
            f"all {prompts} have more than {self._most_tokens} tokens, which is what rollout.max_new_tokens leaves of "
            "the engine's context"
        )

    def _make(self, found: Found) -> PromptRow:
        row, where, data = found.row, found.where, self._data
        if found.key in self._too_long:
            return PromptRow(epoch=found.epoch, prompt="", tokens=_NO_TOKENS)
        images: tuple[ImageRef, ...] = ()
        tokens: list[int] = []
        try:
            text, response, sources = self._texts(row, where)
            if len(text) <= _LONGEST_TOKEN * self._most_tokens:
                tokens = self._tokens_of(text)
                if not tokens:
                    raise ConfigError(f"{where}: the prompt {short(text)} has no tokens")
                if self._images is not None:
                    tokens, images = self._images.expand(tokens, sources)
        except ImageError as error:
            return self._without(found, error)
        if not 0 < len(tokens) <= self._most_tokens:
            self._too_long.add(found.key)
            return PromptRow(epoch=found.epoch, prompt=text[:_LONGEST_TOKEN], tokens=_NO_TOKENS)
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
            label=value_at(row, data.label_key),
            metadata=metadata_of(row, data),
            response=answer,
            response_mask=mask,
            sampling=sampling_of(row, data, where, limits=self._limits),
            reward=(value_at(row, data.reward_key) or "") if data.reward_key else "",
            dataset=found.dataset,
            messages=tuple(self._shown(row)[0]) if self._keeps_messages else (),
            images=images,
        )

    def _without(self, found: Found, error: ImageError) -> PromptRow:
        """Leave a row out whose images cannot be shown, and say why once."""
        problem = f"{found.where}: {error}"
        if found.key not in self._broken:
            self._broken[found.key] = problem
            if len(self._broken) <= _MOST_EXPLAINED:
                log.warning("%s; the row is left out", problem)
            if len(self._broken) == _MOST_EXPLAINED:
                log.warning("further such rows are left out and counted (data/overlong_prompts), and not named")
        return PromptRow(epoch=found.epoch, prompt="", tokens=_NO_TOKENS, problem=problem)

    def _tokens_of(self, text: str) -> list[int]:
        """Tokenise a prompt. A text without a chat template gets the tokenizer's special tokens, but no second start
        token if it is rendered already, and no end token, behind which there would be nothing to answer."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=not self._data.chat_template, verbose=False)[
            "input_ids"
        ]
        begin, end = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if begin is not None and tokens[:2] == [begin, begin]:
            del tokens[0]
        if len(tokens) > 1 and tokens[-1] == end and not text.rstrip().endswith(self._tokenizer.eos_token):
            del tokens[-1]
        return tokens

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        prompt = chat.read_prompt(row[self._data.conversation_key or self._data.prompt_key])
        return [*self._system, *([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)]

    def _shown(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Source]]:
        """Return the messages with their images as parts for the chat template, and where these images are."""
        return take_images(self._messages(row), [] if self._images is None else self._images.column(row))

    def _texts(self, row: Mapping[str, Any], where: str) -> tuple[str, list[tuple[str, bool]], list[Source]]:
        """Return the text of the prompt, the parts of the response, each with whether it is trained, and the images."""
        data = self._data
        response = [(row[data.response_key], True)] if data.response_key else []
        if not data.chat_template and not data.conversation_key:
            prompt = row[data.prompt_key]
            if self._images is None:
                return prompt, response, []
            return self._images.mark(prompt, self._tokenizer), response, self._images.column(row)
        messages, sources = self._shown(row)
        tools = chat.tools_of(row, data, where)
        if data.conversation_key:
            return (*self._template.conversation(messages, tools=tools, where=where), sources)
        return self._template.text(messages, tools=tools, where=where), response, sources

    def _response(self, parts: list[tuple[str, bool]]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the response's tokens i32[R], and which are trained, bool[R].

        No special tokens are added at the start, because the response continues the prompt. A response from a column
        gets <eos> at its end. In a turn that the template ends, tokens after <eos> are not trained.
        """
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
