"""Check every row of the data before a run starts: it must be a valid prompt, and must fit into a message."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl import config
from asyncrl.config import tables
from asyncrl.data import chat
from asyncrl.errors import ConfigError, MessageError
from asyncrl.images.parts import PART, has_images
from asyncrl.messages.codec import encode

LabelCheck = Callable[[Any, Mapping[str, Any]], None]
"""Raises ValueError for a row's label and metadata that a reward cannot use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReward:
    """Requirements of a reward on the rows that it grades. ``needs_label``: it compares with a label"""

    needs_label: bool = False
    check_label: LabelCheck = lambda label, metadata: None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """Requirements of the rest of the run on every row.

    prompt_tokens  limit of a prompt, so that the model's context has room for an answer; longer prompts are dropped,
                   like those over data.max_prompt_tokens
    row_bytes      limit of label, metadata, response and messages together, so that they fit into a message of the bus
    labelled_for   the reward.kind if it compares with a label; otherwise ""
    check_label    of reward.kind
    rewards        names that data.reward_key may hold -> requirements of that reward
    sampling       the run's SAMPLING of [rollout], which a row may override, and what must fit to it
    vocabulary     size of the model's vocabulary; stop_token_ids must be below it
    end_tokens     tokens that end an answer in the model's configuration
    keeps_messages whether a prompt group carries the chat messages that its prompt was rendered from
    teacher        name of the server that is the teacher of rows that choose none; "": each must choose
    teacher_key    teacher.key; "": rows choose no teacher
    teachers       servers that a row may choose
    reads_images   whether the model reads images
    keys           prefix of keys in errors: "data.", or "" if the error names the data set itself
    """

    prompt_tokens: int = 2**31
    row_bytes: int = 2**31
    labelled_for: str = ""
    check_label: LabelCheck = lambda label, metadata: None
    rewards: Mapping[str, RowReward] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"max_new_tokens": 2**31})
    vocabulary: int = 2**31
    end_tokens: frozenset[int] = frozenset()
    keeps_messages: bool = False
    teacher: str = ""
    teacher_key: str = ""
    teachers: frozenset[str] = frozenset()
    reads_images: bool = False
    keys: str = "data."


_OF_SOME_ROWS: Final = ("reward_key", "sampling_key", "tools_key", "image_key")
"""Columns that single rows may lack, but that at least one row must have if the run file names them."""
_MAYBE_IN_TABLES: Final = ("reward_key", "sampling_key")
"""Of these, what may be a key in the table of a column, too: "metadata.rm_type"."""


class RowCheck:
    """Checks each row while the file is indexed. Raises ConfigError for a row that the run cannot use."""

    def __init__(self, data: config.DataSection, limits: RowLimits) -> None:
        self._data = data
        self._limits = limits
        self._seen_first = False
        self._unseen = {name for name in _OF_SOME_ROWS if getattr(data, name)}
        self._columns: tuple[str, ...] = ()
        self._chooses_teacher = False

    def __call__(self, row: dict[str, Any], where: str) -> None:
        data = self._data
        prompt_key, name = (
            (data.conversation_key, "conversation_key")
            if data.conversation_key
            else (
                data.prompt_key,
                "prompt_key",
            )
        )
        if prompt_key not in row:
            raise self._missing(row, prompt_key, name, where)
        if not self._seen_first:
            default = config.DataSection()
            named = [(name, getattr(data, name)) for name in ("label_key", "metadata_key")]
            named = [(name, key) for name, key in named if key != getattr(default, name)]
            for name, key in (*named, *(("metadata_columns", key) for key in data.metadata_columns)):
                if value_at(row, key, _ABSENT) is _ABSENT:  # set in the run file, so required
                    raise self._missing(row, key, name, where)
            self._seen_first, self._columns = True, tuple(row)
        self._unseen -= {name for name in self._unseen if self._has(row, name)}
        prompt = chat.read_prompt(row[prompt_key])
        self._check_prompt(prompt, where, key=prompt_key)
        _refuse_media(row, prompt, where, image_key=data.image_key if self._limits.reads_images else None)
        if data.response_key:
            self._check_response(row, where)
        if self._limits.teacher_key:
            self._check_teacher(row, where)
        metadata, label = value_at(row, data.metadata_key), value_at(row, data.label_key)
        if metadata is not None and not isinstance(metadata, dict):
            raise ConfigError(f"{where}: {data.metadata_key!r} must be an object, got {short(metadata)}")
        name, reward = self._reward_of(row, where)
        self._check_label(label, where, reward=name if reward.needs_label else "")
        try:
            reward.check_label(label, metadata_of(row, data))
        except ValueError as error:
            raise ConfigError(f"{where}: {data.label_key!r}: {error}") from None
        sampling_of(row, data, where, limits=self._limits)
        if tools := chat.tools_of(row, data, where):
            message_bytes(tools, f"{where}: {data.tools_key!r}")
        shown = _without_images(prompt)
        message_bytes(shown, f"{where}: {prompt_key!r}")
        parts = [(data.label_key, label), (data.metadata_key, metadata_of(row, data) or None)]
        parts += [(data.response_key, row[data.response_key])] if data.response_key else []
        parts += [(prompt_key, shown)] if self._limits.keeps_messages and data.chat_template else []
        size = sum(message_bytes(value, f"{where}: {key!r}") for key, value in parts)
        if size > self._limits.row_bytes:
            names = " and ".join(repr(name) for name, value in parts if value is not None)
            raise ConfigError(
                f"{where}: {names} take {size:,} bytes, and a message of the bus has room for "
                f"{self._limits.row_bytes:,} of them; shorten them or raise bus.max_message_bytes"
            )

    def _has(self, row: Mapping[str, Any], name: str) -> bool:
        key = getattr(self._data, name)
        return key in row or (name in _MAYBE_IN_TABLES and value_at(row, key, _ABSENT) is not _ABSENT)

    def _check_teacher(self, row: dict[str, Any], where: str) -> None:
        key, known = self._limits.teacher_key, ", ".join(sorted(self._limits.teachers))
        name = metadata_of(row, self._data).get(key, _ABSENT)
        if name is _ABSENT and not self._limits.teacher:
            raise ConfigError(
                f"{where}: its metadata has no {key!r} (teacher.key); write one of {known}, or set teacher.server"
            )
        if name is not _ABSENT and name not in self._limits.teachers:
            raise ConfigError(f"{where}: {key!r} names the teacher {short(name)}, which is none of [servers]: {known}")
        self._chooses_teacher |= name is not _ABSENT

    def require_seen(self) -> None:
        """Raise ConfigError if the run file names a column that no row has. Call it after the last row."""
        if self._limits.teacher_key and not self._chooses_teacher:
            raise ConfigError(
                f"teacher.key = {self._limits.teacher_key!r}: no row has it in its metadata; name its column in "
                "data.metadata_columns"
            )
        for name in sorted(self._unseen):
            there = ", ".join(map(repr, self._columns))
            key = getattr(self._data, name)
            raise ConfigError(f"{self._limits.keys}{name} = {key!r}: no row has this column; the first has {there}")

    def _reward_of(self, row: dict[str, Any], where: str) -> tuple[str, RowReward]:
        """Return the name of the row's reward and what it requires of the row."""
        key = self._data.reward_key
        name = value_at(row, key) if key else None
        if name in (None, ""):
            kind = self._limits.labelled_for
            return kind, RowReward(needs_label=bool(kind), check_label=self._limits.check_label)
        if not isinstance(name, str) or name not in self._limits.rewards:
            known = ", ".join(self._limits.rewards)
            raise ConfigError(
                f"{where}: {key!r} names the reward {short(name)}, which is none of {known}; add it to reward.rows"
            )
        return name, self._limits.rewards[name]

    def _check_label(self, label: Any, where: str, *, reward: str) -> None:
        key = self._data.label_key
        if isinstance(label, float) and not math.isfinite(label):
            raise ConfigError(f"{where}: {key!r} is {label}; write the label, or leave the row out")
        if label is None and reward:
            raise ConfigError(
                f"{where}: no label ({self._limits.keys}label_key = {key!r}), and reward.kind = {reward!r} compares "
                "with one"
            )

    def _check_response(self, row: dict[str, Any], where: str) -> None:
        key = self._data.response_key
        if key not in row:
            raise self._missing(row, key, "response_key", where)
        if not isinstance(row[key], str):
            raise ConfigError(f"{where}: {key!r} must be text, the answer to imitate, got {short(row[key])}")
        if not row[key]:
            raise ConfigError(f"{where}: {key!r} is empty; there is no answer to imitate")

    def _check_prompt(self, prompt: Any, where: str, *, key: str) -> None:
        if isinstance(prompt, str) and not self._data.conversation_key:
            if not prompt:
                raise ConfigError(f"{where}: {key!r} is empty")
            if _PRINTED.match(prompt):
                raise ConfigError(
                    f"{where}: {key!r} is the printed form of chat messages, {short(prompt)}: the model would read it "
                    "as text; write a list of messages, or its JSON text"
                )
            return
        if not isinstance(prompt, list):
            kinds = "a list of chat messages" if self._data.conversation_key else "text or a list of chat messages"
            raise ConfigError(f"{where}: {key!r} must be {kinds}, got {short(prompt)}")
        if prompt and all(type(one) is int for one in prompt):
            raise ConfigError(
                f"{where}: {key!r} is a list of token ids, and asyncrl tokenises the text itself; name it"
            )
        if not self._data.chat_template:
            raise ConfigError(
                f"{where}: {key!r} is a list of chat messages, which only a chat template turns into text; "
                f"set {self._limits.keys}chat_template = true"
            )
        if not prompt:
            raise ConfigError(f"{where}: {key!r} is an empty list of messages")
        for message in prompt:
            if problem := chat.find_problem(message):
                raise ConfigError(f"{where}: {problem}, got {short(message)}")
        if not self._data.conversation_key and prompt[-1]["role"] == "assistant" and not self._limits.keeps_messages:
            raise ConfigError(
                f"{where}: {key!r} ends with a message of the assistant, {short(prompt[-1].get('content'))}, so the "
                "prompt would hold an answer already; remove that message (to imitate it: data.conversation_key)"
            )
        if self._data.conversation_key and not any(map(chat.is_trained, prompt)):
            raise ConfigError(f"{where}: {key!r} has no message of the assistant that is trained")
        if self._data.conversation_key and chat.is_trained(prompt[0]):
            raise ConfigError(
                f"{where}: {key!r} begins with an answer, and nothing asks for it; put a message before it, or mark it "
                '"train": false'
            )

    def _missing(self, row: dict[str, Any], key: str, name: str, where: str) -> ConfigError:
        inner = [f"{column}.{name}" for column, table in row.items() if isinstance(table, dict) for name in table]
        near = difflib.get_close_matches(key, [*row, *inner], 1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        there = ", ".join(repr(k) for k in row) or "none"
        return ConfigError(f"{where}: no column {key!r} ({self._limits.keys}{name}){hint}; there is {there}")


_PRINTED: Final = re.compile(
    r"""[\s\ufeff]*"?(array\()?(
        \[?\s*\{\s*\\?['"](role|content|from|messages|conversations)\\?['"]\s*:
        | [\[{].{0,200}?\\?['"](role|from)\\?['"]\s*:\s*\\?['"](system|developer|user|human|assistant|gpt)\\?['"]
        | \[\s*[\[(]\s*['"](system|user|human)['"]\s*,
        | \[?\s*\w*Message\(\w+=
    )""",
    re.VERBOSE | re.DOTALL,
)
"""The beginning of chat messages that Python, numpy or LangChain printed, or of JSON that is no list of messages."""
_PLACE_OF_MEDIA: Final = re.compile(
    r"<(image|video|audio)([_ ]?(\d+|soft_token|pad|here))?>|<start_of_image>|<\|(image|video|audio|vision)(_\w+)?\|>"
    r"|\[IMG\]|data:(image|video|audio)/\w+;base64,",
    re.IGNORECASE,
)
_NAME_OF_MEDIA: Final = re.compile(
    r"(image|img|picture|photo|video|audio|jpe?g$|png$|webp$|mp4$|wav$|mp3$)", re.IGNORECASE
)
"""Beginning of the names that columns of images and the like have."""
_FILE_OF_MEDIA: Final = re.compile(
    r"data:(image|video|audio)/.*|[^\n]+\.(png|jpe?g|gif|webp|bmp|tiff?|mp4|avi|mov|mkv|webm|wav|mp3|flac|ogg|m4a)(\?\S*)?",
    re.IGNORECASE | re.DOTALL,
)


def find_media_place(text: str) -> str:
    """Return the first mark in ``text`` where an image or the like is meant to be; "" if there is none."""
    found = _PLACE_OF_MEDIA.search(text)
    return found[0] if found else ""


def _refuse_media(row: Mapping[str, Any], prompt: Any, where: str, *, image_key: str | None) -> None:
    """Raise ConfigError if the row has images or the like that the model would be asked without.

    image_key  data.image_key, if the model reads images; None: it reads text alone
    """
    alone = "this model reads text alone" if image_key is None else "no key of [data] says what it is"
    if image_key is None and isinstance(prompt, list) and has_images(prompt):
        raise ConfigError(f"{where}: the prompt shows an image, and {alone}; take a vision-language model")
    texts = chat.texts_of(prompt)
    mark = "" if image_key is not None else next(filter(None, map(find_media_place, texts)), "")
    for name, value in row.items():
        if name == image_key:
            continue
        if _has_bytes(value) or (value and _NAME_OF_MEDIA.match(name) and (mark or _is_media(value))):
            is_named = image_key is None or image_key in row
            mend = "leave such rows out, or remove the column" if is_named else "name the column in data.image_key"
            raise ConfigError(
                f"{where}: {name!r} holds {'what ' + mark + ' stands for' if mark else 'no text'}, and {alone}, so the "
                f"model would be asked without it; {mend}"
            )


def _without_images(prompt: Any) -> Any:
    """Return the prompt with its images taken out of its messages: they travel apart."""
    is_chat = isinstance(prompt, list) and all(isinstance(one, Mapping) for one in prompt)
    return [_without(one) for one in prompt] if is_chat and has_images(prompt) else prompt


def _without(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = [one if "text" in one else dict(PART) for one in content] if isinstance(content, list) else content
    return {**message, "content": parts}


def _is_media(value: Any) -> bool:
    """Whether ``value`` is an image or the like as data sets hold it: its bytes, its file, or a table with those."""
    if isinstance(value, list):
        return any(map(_is_media, value))
    if isinstance(value, str):
        return bool(_FILE_OF_MEDIA.fullmatch(value.strip()))
    return isinstance(value, bytes) or (
        isinstance(value, dict) and any(value.get(name) for name in ("bytes", "path", "url"))
    )


def _has_bytes(value: Any) -> bool:
    """Whether ``value`` is what Hugging Face's data sets write for an image or a sound, whatever the column's name."""
    if isinstance(value, list):
        return any(map(_has_bytes, value))
    return isinstance(value, dict) and value.keys() == {"bytes", "path"} and any(value.values())


_ABSENT: Final = object()


def value_at(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a column, or of a key in its table ("reward_model.ground_truth"); ``default`` if the row has
    neither."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def metadata_of(row: Mapping[str, Any], data: config.DataSection) -> dict[str, Any]:
    """Return the row's metadata: its table, and the further columns that it has, under their names."""
    columns = {key: value_at(row, key, _ABSENT) for key in data.metadata_columns}
    found = {key: value for key, value in columns.items() if value is not _ABSENT}
    return {**(value_at(row, data.metadata_key) or {}), **found}


SAMPLING: Final = (
    *("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids"),
    *("temperature", "top_p", "top_k", "max_context_tokens"),
)
"""Sampling settings that a row may override."""
_NOT_OF_A_ROW: Final = dict.fromkeys(
    ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    " (the trainer cannot recompute what a penalty took from the logits)",
)
"""Why a row cannot override settings that other frameworks allow."""


def sampling_of(row: dict[str, Any], data: config.DataSection, where: str, *, limits: RowLimits) -> dict[str, Any]:
    """Return the row's overrides of [rollout]. Raises ConfigError."""
    made = value_at(row, data.sampling_key) if data.sampling_key else None
    if made is None:
        return {}
    at = f"{where}: {data.sampling_key!r}"
    if not isinstance(made, dict):
        raise ConfigError(f"{at} must be an object of {', '.join(SAMPLING)}, got {short(made)}")
    made = {name: value for name, value in made.items() if value is not None}  # every Parquet row has all columns
    if unknown := sorted(made.keys() - set(SAMPLING)):
        why = _NOT_OF_A_ROW.get(unknown[0], "")
        raise ConfigError(f"{at}: a row cannot set {unknown[0]}{why}, only {', '.join(SAMPLING)}")
    section = tables.build(config.RolloutSection, {**limits.sampling, **made}, at)  # checks them together with the rest
    if section.max_new_tokens > (most := limits.sampling["max_new_tokens"]):
        raise ConfigError(f"{at}: max_new_tokens {section.max_new_tokens} is over rollout.max_new_tokens ({most})")
    if unknown_ids := [token for token in section.stop_token_ids if not 0 <= token < limits.vocabulary]:
        raise ConfigError(f"{at}: {unknown_ids[0]} is not a token of the model's {limits.vocabulary:,}")
    message_bytes(section.stop, f"{at}: stop")
    return {name: getattr(section, name) for name in made}


def message_bytes(value: Any, at: str) -> int:
    """Return the bytes of a value in a message. Raises ConfigError if none can carry it, such as Parquet's dates."""
    try:
        return len(encode(value))
    except MessageError as error:
        raise ConfigError(f"{at}: {error}; write it as text or a number") from None


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
