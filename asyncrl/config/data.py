"""[data] of the run file: where the prompts are, and what each column contains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrl.config.checks import NonNegative, Positive, require

_TEMPLATES_OWN: Final = frozenset(
    ("tokenize", "add_generation_prompt", "conversation", "messages", "tools", "continue_final_message")
)
"""Arguments of a chat template that asyncrl sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One entry of [[data.files]]."""

    path: str
    """File, as in data.path."""
    name: str = ""
    """Value of Sample.dataset for these prompts; empty: the name of the file."""
    weight: NonNegative[float] = 0.0
    """Share of prompts drawn from this file, relative to the sum of all weights, in whole rows of an epoch and at least
    one. 0 in all files: every row once per epoch."""
    weights: tuple[float, ...] = ()
    """Weights by epoch, instead of ``weight``: a curriculum. The last one stays, and in an epoch with 0 the file rests.
    An epoch has as many rows as all files together."""
    function: str = ""
    """Rollout function of these prompts, as rollout.function; empty: that one."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of ``function``, as rollout.options."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path is empty; name a file")
        require(not (self.weight and self.weights), "weight and weights are both there; keep one")
        require(
            not self.weights or (min(self.weights) >= 0 and max(self.weights) > 0),
            f"weights must be >= 0, and one of them above 0, got {list(self.weights)}",
        )

    @property
    def by_epoch(self) -> tuple[float, ...]:
        """Its weights by epoch, of which the last one stays."""
        return self.weights or (self.weight,)


def weights_by_epoch(files: Sequence[DataFile]) -> list[list[float]]:
    """Return the weights of all files in each epoch until they stay.  -> [epochs][files]"""
    count = max((len(file.by_epoch) for file in files), default=0)
    return [[file.by_epoch[min(epoch, len(file.by_epoch) - 1)] for file in files] for epoch in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    path: str = ""
    """JSONL or Parquet file with one prompt per row. "FILE[a:b]" selects rows a to b - 1, counted from 0; negative
    numbers count from the end."""
    files: tuple[DataFile, ...] = ()
    """[[data.files]]: several files instead of one path, each with path, name and weight."""
    source: str = ""
    """"package.module:Class" of your own data source, instead of files."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the source."""
    prompt_key: str = "prompt"
    """Column with the prompt: text, or a list of chat messages (or its JSON text)."""
    label_key: str = "label"
    """Column with the value that the reward compares with, or a key in a column's table: "reward_model.ground_truth".
    Rows may lack "label"; a column of another name must be in the first row."""
    metadata_key: str = "metadata"
    """Column (or key in a column's table) with a table that is passed to the reward. As for label_key, only "metadata"
    may be absent."""
    metadata_columns: tuple[str, ...] = ()
    """Further columns for the reward. Each is added to the metadata under its name and takes precedence there."""
    image_key: str = ""
    """Column with an image, or a list of them, for a vision-language model: paths, bytes, base64 or data URLs, URLs,
    or Hugging Face's tables (docs/guides/images.md). Empty: images are in the chat messages themselves."""
    response_key: str = ""
    """Column with an answer to imitate, for rollout.function = "given"; empty: none."""
    conversation_key: str = ""
    """Column with a whole conversation (a list of chat messages), for rollout.function = "given". The assistant's
    messages are trained, except those with "train": false."""
    tools_key: str = ""
    """Column with a list of tools for the chat template (JSON schemas, or their JSON text); optional in each row."""
    sampling_key: str = ""
    """Column with a table of max_new_tokens, min_new_tokens, max_context_tokens, temperature, top_p, top_k, stop and
    stop_token_ids that override [rollout] for the row, or a key in a column's table; optional in each row."""
    reward_key: str = ""
    """Column with the name of the row's reward: a built-in reward that needs no options, or a name from reward.rows.
    Also a key in a column's table, "metadata.rm_type". A row without a value uses reward.kind."""
    chat_template: bool = False
    """Wrap a text prompt as one user message in the tokenizer's chat template."""
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of the chat template, such as {enable_thinking = false}."""
    system_prompt: str = ""
    """Message put before every prompt, with the role "system"; needs chat_template."""
    shuffle: bool = True
    """Shuffle the rows in every epoch, with run.seed."""
    epochs: NonNegative[int] = 0
    """Passes over the data; 0: repeat it until run.steps."""
    max_prompt_tokens: Positive[int] = 1024
    """Prompts longer than this many tokens are skipped and counted. So are prompts that leave less than
    rollout.max_new_tokens of the engine's context, which is the model's; SGLang's is 6 tokens shorter."""

    def __post_init__(self) -> None:
        given = [key for key in ("path", "files", "source") if getattr(self, key)]
        require(len(given) <= 1, f"{' and '.join(given)} are both there; say where the prompts are once")
        require(not self.options or bool(self.source), "options are of a source, and there is none")
        require(
            not self.source or not (self.epochs or not self.shuffle),
            "shuffle and epochs are for files; a source gives its rows in its own order, and None when it ends",
        )
        weights = [any(file.by_epoch) for file in self.files]
        require(
            all(weights) or not any(weights),
            "some of files have a weight and some have none; give each one, or none",
        )
        for epoch, each in enumerate(weights_by_epoch(self.files)):
            require(not any(weights) or any(each), f"files: all weights of epoch {epoch} are 0; give one a weight")
        require_template(self, "chat_template_options", "tools_key", "conversation_key", "system_prompt")
        require(
            not (self.conversation_key and self.response_key),
            "conversation_key has the answers in the conversation; remove response_key",
        )

    @property
    def where(self) -> str:
        """Readable name of the data."""
        return self.path or self.source or ", ".join(file.path for file in self.files)


def require_template(section: Any, *keys: str) -> None:
    """Check the settings of a chat template.

    ``keys`` need chat_template = true, and chat_template_options must not set arguments that asyncrl sets itself.
    """
    for key in keys:
        require(section.chat_template or not getattr(section, key), f"{key} needs chat_template = true")
    taken = sorted(_TEMPLATES_OWN & section.chat_template_options.keys())
    require(not taken, f"chat_template_options: {', '.join(taken)} is set by asyncrl; remove it")
