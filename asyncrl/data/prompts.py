"""The endless, shuffled sequence of prompts that a run draws from.

A *position* counts rows of that sequence from 0, over-long ones too, and depends on the data file and the seed alone:
position p is row p mod n of epoch p // n. A resumed run that stored its position goes on with the very next prompt and
tokenises nothing again. Kept by tests/unit/data/test_prompts.py::test_a_resumed_run_continues_exactly.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl import config
from asyncrl.data.row_files import Rows, open_rows
from asyncrl.errors import ConfigError

_NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
_SAMPLE = 256
"""Rows that ``PromptDataset.look`` tokenises of a large file."""
_LONGEST_TOKEN = 1024
"""Characters: no vocabulary has longer ones, so a text of megabytes is found too long without tokenising it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """What the rest of a run asks of every row.

    prompt_tokens  longer prompts leave no room for an answer in the model's context; they are dropped, as those over
                   data.max_prompt_tokens are
    row_bytes      of label, metadata and response: more does not fit into a message of the bus
    labelled_for   the reward.kind that compares with a label; "" for one that needs none
    """

    prompt_tokens: int = 2**31
    row_bytes: int = 2**31
    labelled_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt.

    prompt    the text that was tokenised, chat template included
    tokens    i32[T]; empty when there are too many (PromptDataset.most_tokens)
    response  i32[R], the answer to imitate and <eos>; empty without data.response_key
    """

    epoch: int
    prompt: str
    tokens: NDArray[np.int32]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    response: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)


class PromptDataset:
    """Prompts by position. One caller at a time: one actor owns it."""

    def __init__(
        self,
        rows: Rows,
        data: config.DataSection,
        *,
        tokenizer: Any,
        seed: int,
        limits: RowLimits,
        system_prompt: str = "",
    ) -> None:
        self._rows = rows
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._most_tokens = min(data.max_prompt_tokens, limits.prompt_tokens)
        self._data = data
        self._tokenizer = tokenizer
        self._seed = seed
        self._too_long: set[int] = set()
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.arange(len(rows))

    @classmethod
    def open(
        cls,
        data: config.DataSection,
        *,
        tokenizer: Any,
        seed: int,
        limits: RowLimits | None = None,
        system_prompt: str = "",
    ) -> PromptDataset:
        """The dataset of the run file's [data]. Raises ConfigError for the first row that cannot be a prompt.

        system_prompt: a message in front of every prompt, for a chat template
        """
        limits = limits or RowLimits()
        if data.chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError("data.chat_template is true but the model's tokenizer has no chat template; set it false")
        if data.response_key and tokenizer.eos_token_id is None:
            raise ConfigError(
                "data.response_key: the model's tokenizer has no eos token, so no answer could end; name one "
                "in its tokenizer_config.json"
            )
        rows = open_rows(Path(data.path), check=_RowCheck(data, limits))
        return cls(rows, data, tokenizer=tokenizer, seed=seed, limits=limits, system_prompt=system_prompt)

    @property
    def num_rows(self) -> int:
        """Rows of the file, and so positions of one epoch."""
        return len(self._rows)

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
        seen = min(self.num_rows, _SAMPLE)
        for position in range(seen):
            self.at(position)
        if self.dropped == seen:
            raise ConfigError(
                f"{self._data.path}: {self._all_too_long(f'{seen} prompts of the {self.num_rows} looked at')}"
            )
        return seen

    def at(self, position: int) -> PromptRow | None:
        """The row at ``position``; its tokens are empty when it is too long. None when the epochs are over.

        Raises ConfigError for a row that cannot be tokenised, and when every row has been found too long.
        """
        epoch, place = divmod(position, self.num_rows)
        if self._data.epochs and epoch >= self._data.epochs:
            return None
        index = self._row_index(epoch, place)
        row = self._read(index, epoch=epoch)
        if self.dropped == self.num_rows:
            raise ConfigError(f"{self._data.path}: {self._all_too_long(f'{self.num_rows} prompts')}")
        return row

    def _all_too_long(self, prompts: str) -> str:
        if self._most_tokens == self._data.max_prompt_tokens:
            return f"all {prompts} have more than data.max_prompt_tokens = {self._most_tokens} tokens"
        return (
            f"all {prompts} have more than {self._most_tokens} tokens, which is what rollout.max_new_tokens leaves of "
            "the model's context"
        )

    def _row_index(self, epoch: int, place: int) -> int:
        if self._data.shuffle and epoch != self._order_epoch:
            self._order = shuffled(self.num_rows, seed=self._seed, epoch=epoch)
            self._order_epoch = epoch
        return int(self._order[place])

    def _read(self, index: int, *, epoch: int) -> PromptRow:
        if index in self._too_long:
            return PromptRow(epoch=epoch, prompt="", tokens=_NO_TOKENS)
        row, where = self._rows.row(index), self._rows.where(index)
        text, has_template = self._text(row[self._data.prompt_key], where)
        if len(text) > _LONGEST_TOKEN * self._most_tokens:
            self._too_long.add(index)
            return PromptRow(epoch=epoch, prompt=text[:_LONGEST_TOKEN], tokens=_NO_TOKENS)
        tokens = self._tokenizer(text, add_special_tokens=not has_template, verbose=False)["input_ids"]
        if not tokens:
            raise ConfigError(f"{where}: the prompt {_short(text)} has no tokens")
        if len(tokens) > self._most_tokens:
            self._too_long.add(index)
            return PromptRow(epoch=epoch, prompt=text, tokens=_NO_TOKENS)
        label, metadata = row.get(self._data.label_key), row.get(self._data.metadata_key)
        return PromptRow(
            epoch=epoch,
            prompt=text,
            tokens=np.asarray(tokens, dtype=np.int32),
            label=_plain(label, where, self._data.label_key),
            metadata=_plain(metadata or {}, where, self._data.metadata_key),
            response=self._response(row),
        )

    def _response(self, row: dict[str, Any]) -> NDArray[np.int32]:
        """The answer's tokens and <eos>. Special tokens are the prompt's: the answer goes on where it ends."""
        if not self._data.response_key:
            return _NO_TOKENS
        tokens = self._tokenizer(row[self._data.response_key], add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray([*tokens, self._tokenizer.eos_token_id], dtype=np.int32)

    def _text(self, prompt: str | list[dict[str, Any]], where: str) -> tuple[str, bool]:
        """The text to tokenise, and whether the chat template made it (and put the special tokens in)."""
        if not self._data.chat_template:
            assert isinstance(prompt, str)  # _RowCheck saw to it
            return prompt, False
        import jinja2  # comes with transformers, which rendering needs anyway

        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*self._system, *asked]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: the chat template refuses these messages: {error}") from None
        return str(text), True


def shuffled(num_rows: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of one epoch, a permutation i64[num_rows] that is the same on every machine and numpy version.

    numpy promises the raw stream of PCG64, but not what Generator.permutation makes of it: so we sort the raw numbers.
    """
    numbers = np.random.PCG64(np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, epoch])).random_raw(num_rows)
    return np.argsort(numbers, kind="stable")


class _RowCheck:
    """Looks at each row while the file is indexed: is there a prompt, of a kind that can be tokenised?"""

    def __init__(self, data: config.DataSection, limits: RowLimits) -> None:
        self._data = data
        self._limits = limits
        self._seen_first = False

    def __call__(self, row: dict[str, Any], where: str) -> None:
        data = self._data
        if data.prompt_key not in row:
            raise _missing(row, data.prompt_key, "prompt_key", where)
        if not self._seen_first:
            default = config.DataSection(path="")
            for name in ("label_key", "metadata_key"):
                key = getattr(data, name)
                if key != getattr(default, name) and key not in row:  # written in the run file, so meant
                    raise _missing(row, key, name, where)
            self._seen_first = True
        self._check_prompt(row[data.prompt_key], where)
        if data.response_key:
            self._check_response(row, where)
        metadata = row.get(data.metadata_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise ConfigError(f"{where}: {data.metadata_key!r} must be an object, got {_short(metadata)}")
        self._check_label(row.get(data.label_key), where)
        parts = {data.label_key: row.get(data.label_key), data.metadata_key: metadata}
        parts |= {data.response_key: row[data.response_key]} if data.response_key else {}
        try:
            _check_text(row[data.prompt_key])
            size = sum(map(_size, parts.values()))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}; no message can carry it") from None
        if size > self._limits.row_bytes:
            names = " and ".join(repr(name) for name, value in parts.items() if value is not None)
            raise ConfigError(
                f"{where}: {names} take {size:,} bytes, and a message of the bus has room for "
                f"{self._limits.row_bytes:,} of them; shorten them or raise bus.max_message_bytes"
            )

    def _check_label(self, label: Any, where: str) -> None:
        key = self._data.label_key
        if isinstance(label, float) and math.isnan(label):
            raise ConfigError(f"{where}: {key!r} is NaN; write the label, or leave the row out")
        if label is None and self._limits.labelled_for:
            raise ConfigError(
                f"{where}: no label (data.label_key = {key!r}), and reward.kind = {self._limits.labelled_for!r} "
                "compares with one"
            )

    def _check_response(self, row: dict[str, Any], where: str) -> None:
        key = self._data.response_key
        if key not in row:
            raise _missing(row, key, "response_key", where)
        if not isinstance(row[key], str):
            raise ConfigError(f"{where}: {key!r} must be text, the answer to imitate, got {_short(row[key])}")
        if not row[key]:
            raise ConfigError(f"{where}: {key!r} is empty; there is no answer to imitate")

    def _check_prompt(self, prompt: Any, where: str) -> None:
        key = self._data.prompt_key
        if isinstance(prompt, str):
            if not prompt:
                raise ConfigError(f"{where}: {key!r} is empty")
            return
        if not isinstance(prompt, list):
            raise ConfigError(f"{where}: {key!r} must be text or a list of chat messages, got {_short(prompt)}")
        if not self._data.chat_template:
            raise ConfigError(
                f"{where}: {key!r} is a list of chat messages, which only a chat template turns into text; "
                "set data.chat_template = true"
            )
        if not prompt:
            raise ConfigError(f"{where}: {key!r} is an empty list of messages")
        for message in prompt:
            if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
                raise ConfigError(
                    f"{where}: a chat message is an object with text role and content, got {_short(message)}"
                )


def _size(value: Any) -> int:
    """Bytes of a value in a message, about. Raises ValueError for what msgpack has no form for."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return _check_text(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"the whole number {str(value)[:30]}... has more than 64 bits")
    if isinstance(value, dict):
        return sum(_size(name) + _size(item) for name, item in value.items())
    if isinstance(value, list):
        return sum(map(_size, value))
    return 9


def _check_text(value: Any) -> int:
    """Bytes of a text, or of the texts of chat messages, as UTF-8. Raises ValueError."""
    if not isinstance(value, str):
        return sum(_check_text(text) for message in value for text in message.values() if isinstance(text, str))
    try:
        return len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"half of a surrogate pair, {value[error.start]!a}, is no text") from None


_PLAIN = (str, int, float, bool, bytes, type(None))


def _plain(value: Any, where: str, key: str) -> Any:
    """``value`` if a message can carry it. Parquet has dates and decimals, which it cannot."""
    if isinstance(value, list):
        return [_plain(item, where, key) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item, where, key) for name, item in value.items()}
    if not isinstance(value, _PLAIN):
        raise ConfigError(f"{where}: {key!r} holds a {type(value).__name__}; write it as text or a number")
    return value


def _missing(row: dict[str, Any], key: str, name: str, where: str) -> ConfigError:
    near = difflib.get_close_matches(key, row, 1)
    hint = f"; did you mean {near[0]!r}" if near else ""
    there = ", ".join(repr(k) for k in row) or "none"
    return ConfigError(f"{where}: no column {key!r} (data.{name}){hint}; there is {there}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
