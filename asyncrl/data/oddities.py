"""Finds what is odd about the first prompts of a run: possible, but hardly ever what a person means.

Nothing here is refused, because all of it may be meant. `asyncrl check` and the learner say each oddity in one line.
Tests: tests/unit/data/test_oddities.py.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from asyncrl import config
from asyncrl.data import chat
from asyncrl.data.row_check import RowLimits, find_media_place
from asyncrl.errors import ConfigError

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u2028-\u202e\u2060\u2066-\u2069\ufeff\ufffc\ufffd\U000e0000-\U000e007f]"
)
"""Control characters (the end of a line as Windows has it, too), spaces without width, what reorders text, a byte-order
mark, and what stands for images and broken letters."""
_MARK: Final = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?INST\]|<</?SYS>>|\[gMASK\]|\A<s>|</s>(?=\s*\Z)"
    r"|<(?:bos|eos|start_of_turn|end_of_turn)>"
)
"""Marks with which chat templates of all families frame messages."""
_OPENS_ANSWER: Final = re.compile(r"(?:\b(?:Assistant|ASSISTANT)|### ?(?:Response|Assistant)) ?:\s*\Z")
"""Words with which prompts of models without a chat template end."""
_LAST_TAG: Final = re.compile(r"(<[^<>\s]+>)[^<>]*\Z")
_MISREAD: Final = re.compile("â€[\x80-\uffff]|Ã[\x80-\xbf]|Â[\xa0-\xbf]")
"""UTF-8 that was read as Latin-1 or Windows-1252, such as â€™."""
_UNFILLED: Final = re.compile(r"(?<![\w\"'}$])\{\{? ?(?:question|problem|prompt|query|input|instruction|text) ?\}?\}")
_NO_TEXT: Final = ("nan", "NaN", "None", "null", "<NA>")
_AFTER_LABEL: Final = " \t\n.*}$)]\"'"
"""What may stand behind an answer: \\boxed{5}, **5**"""
_SENTINEL: Final = "\u241eANSWER\u241e"
_ENOUGH: Final = 8
"""Fewest prompts that may be called much alike."""


class Oddities:
    """Collects oddities of prompts that a run would draw first. Call ``see`` for each prompt, then ``lines``."""

    def __init__(
        self, tokenizer: Any, template: chat.ChatTemplate, data: config.DataSection, *, limits: RowLimits
    ) -> None:
        self._tokenizer, self._template, self._data, self._limits = tokenizer, template, data, limits
        self._is_for_agent = limits.keeps_messages  # a harness writes the model's prompts itself
        self._specials = {
            str(token)
            for token in getattr(tokenizer, "added_tokens_decoder", {}).values()
            if token.special and "think" not in str(token)
        }
        self._ends = limits.end_tokens | {tokenizer.eos_token_id}
        self._num, self._num_skipped = 0, 0
        self._found: dict[str, tuple[int, str]] = {}
        self._of_template: list[str] = []
        self._labels: dict[str, set[str]] = {}
        self._num_labelled_at_end = 0

    def see(
        self,
        prompt: str | Sequence[chat.Message],
        *,
        rendered: str,
        tokens: Sequence[int],
        answer: Sequence[int],
        label: Any,
        tools: Sequence[Any],
        where: str,
        shown: str = "",
    ) -> None:
        """Look at a prompt.

        prompt    as the row has it, with data.system_prompt: a text, or messages
        rendered  the text that was tokenised
        answer    tokens of the answer to imitate; empty if there is none
        shown     tells the images of one prompt from those of another
        """
        messages = [] if isinstance(prompt, str) else list(prompt)
        if not self._num and self._data.chat_template:
            self._of_template = list(self._find_in_template(messages))
        self._num += 1
        texts = chat.texts_of(prompt)
        found = [*self._find_in_text(texts), *self._find_in_tokens(rendered, tokens)]
        found += self._find_in_messages(messages, rendered, tools) if messages else []
        found += self._find_in_answer(messages, rendered, answer) if len(answer) else []
        for oddity in dict.fromkeys(found):
            count, first = self._found.get(oddity, (0, where))
            self._found[oddity] = (count + 1, first)
        self._labels.setdefault(rendered + shown, set()).add(repr(label))
        self._num_labelled_at_end += bool(texts) and _ends_with(texts[-1], label)

    def skip(self) -> None:
        """Count a prompt that is too long."""
        self._num_skipped += 1

    def lines(self) -> list[str]:
        """Return each oddity in a line, with the number of prompts that have it and the first of them."""
        return [
            *self._of_template,
            *(f"{first}: {text}{self._of_how_many(count)}" for text, (count, first) in self._found.items()),
            *self._find_in_all(),
        ]

    def _of_how_many(self, count: int) -> str:
        return "" if self._num == 1 else f" (so in {count} of {self._num} prompts)"

    def _find_in_all(self) -> Iterator[str]:
        where, differ = self._data.where, len(self._labels)
        if self._num_skipped > 0.1 * (self._num + self._num_skipped):
            yield f"{where}: {self._num_skipped} of {self._num + self._num_skipped} prompts are too long, and skipped"
        end, ends = self._tokenizer.eos_token_id, self._limits.end_tokens
        if self._data.response_key and ends and end not in ends:
            yield (
                f"{where}: answers are trained to end with {self._name(end)} (eos_token of tokenizer_config.json), "
                "which does not end one when sampling (eos_token_id of config.json and generation_config.json)"
            )
        if self._num and self._num_labelled_at_end > 0.9 * self._num:
            yield f"{where}: prompts end with their label: does {self._data.prompt_key!r} hold the answer, too?"
        if count := sum(len(labels) > 1 for labels in self._labels.values()):
            yield f"{where}: {count} of {differ} prompts have several labels: is the question in another column?"
        elif self._num >= _ENOUGH and 2 * differ <= self._num:
            yield f"{where}: only {differ} of {self._num} prompts differ; rollout.group_size repeats each already"

    def _find_in_text(self, texts: Sequence[str]) -> Iterator[str]:
        for text in texts:
            if found := _INVISIBLE.search(text):
                yield f"has the invisible character U+{ord(found[0]):04X} in its text; remove it"
            if (mark := find_media_place(text)) and not self._limits.reads_images:
                yield f"has {mark} in its text, and this model reads text alone"
            if wrong := _MISREAD.search(text):
                yield f"has {wrong[0]} in its text: UTF-8 that was read as another encoding?"
            if text.strip() in _NO_TEXT:
                yield f"is {text.strip()!r}, which a missing value may have become"
            if unfilled := _UNFILLED.search(text):
                yield f"has {unfilled[0]} in its text: is it a pattern that was not filled in?"
            if "\n" not in text and len(re.findall(r"\\n(?![a-z])", text)) > 1:
                yield "has \\n in its text, a backslash and a letter: is it meant as the end of a line?"
            if self._data.chat_template and (opens := _OPENS_ANSWER.search(text)):
                yield (
                    f"ends with {opens[0].strip()!r}, and the chat template is written around it: is the text rendered "
                    f"already? Then set {self._limits.keys}chat_template = false"
                )
            marks = [mark for mark in self._marks(text) if not find_media_place(mark)]
            if unknown := next((mark for mark in marks if mark not in self._vocabulary), ""):
                yield f"has {unknown} in its text, which is no token of this model: was it rendered for another one?"
            elif marks and self._data.chat_template:
                yield (
                    f"has {marks[0]} in its text, and the chat template is written around it: is the text rendered "
                    f"already? Then set {self._limits.keys}chat_template = false"
                )

    def _marks(self, text: str) -> list[str]:
        return [found[0] for found in _MARK.finditer(text)] + [mark for mark in self._specials if mark in text]

    @functools.cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        known: Mapping[str, int] = self._tokenizer.get_vocab()
        return known

    @functools.cached_property
    def _first_of_text(self) -> int | None:
        """The token that the tokenizer puts before a text without a chat template, if any."""
        tokens: list[int] = self._tokenizer("a", verbose=False)["input_ids"]
        return tokens[0] if len(tokens) > 1 else None

    def _find_in_tokens(self, rendered: str, tokens: Sequence[int]) -> Iterator[str]:
        begin, unknown = self._tokenizer.bos_token_id, self._tokenizer.unk_token_id
        if not rendered.strip():
            yield "is blank"
        elif not self._data.chat_template and rendered[-1] in " \t":
            yield "ends with a space, which most tokenizers join with the word after it: remove it"
        last = rendered if self._data.chat_template else rendered.rstrip()
        end = next((name for name in self._names_of_ends if last.endswith(name)), "")
        if end and not self._data.conversation_key:
            yield f"ends with {end}, which ends an answer, so there is nothing left to answer"
        if begin is not None and begin not in self._ends and self._begins_twice(rendered, tokens):
            yield f"has {self._name(begin)}, which begins a text, {tokens.count(begin)} times"
        if self._data.chat_template and begin is not None and begin not in tokens and begin == self._first_of_text:
            yield f"has no {self._name(begin)}, with which the tokenizer begins a text: the chat template leaves it out"
        if unknown is not None and unknown not in (begin, *self._ends) and unknown in tokens:
            yield f"has letters that the tokenizer does not know (it makes {self._name(unknown)} of them)"
        elif lost := sorted(_letters(rendered) - _letters(self._text_of(tokens))):
            yield f"has letters that the tokenizer does not know (it leaves out or changes {lost[0]!r})"
        if rendered.rstrip().endswith("<think>") and not self._is_for_agent:
            yield (
                "ends with <think>, so an answer begins inside the thought and has no <think> itself: built-in rewards "
                "give 0 to one that never ends it, and a reward of yours must look for </think> alone"
            )

    def _find_in_answer(self, messages: Sequence[chat.Message], rendered: str, answer: Sequence[int]) -> Iterator[str]:
        """Look at what is imitated: an answer of a column, or the rest of a conversation."""
        if self._data.conversation_key:
            said = "".join(self._text_of(answer).split())
            for message in filter(chat.is_trained, messages):
                text = "".join((message.get("content") or "").split())
                if not text and not message.get("tool_calls"):
                    yield "has an empty answer, which is trained"
                elif text not in said:
                    yield "has an answer that the chat template leaves out or changes, and what it writes is trained"
            return
        text, end = self._text_of(answer[:-1]), self._tokenizer.eos_token_id
        if not text.strip():
            yield "has a blank answer"
        if end in answer[:-1]:
            yield f"has an answer that ends with {self._name(end)} already; it is added, so remove it"
        if unknown := next((mark for mark in self._marks(text) if mark not in self._vocabulary), ""):
            yield f"has {unknown} in its answer, which is no token of this model: was it rendered for another one?"
        tag = _LAST_TAG.search(rendered)
        if tag and text.lstrip().startswith(tag[1]):
            yield f"has an answer that begins with {tag[1]}, and the prompt ends with that already"

    def _begins_twice(self, rendered: str, tokens: Sequence[int]) -> bool:
        """Whether a text begins more than once.

        Some templates open each message with the token that begins a text (SmolLM2: "<|im_start|>user"), and some each
        exchange but the first (Llama 2: "</s><s>[INST]"); neither counts.
        """
        begin = self._tokenizer.bos_token_id
        num = sum(token == begin and last not in self._ends for last, token in itertools.pairwise((None, *tokens)))
        num_messages = sum(rendered.count(f"{self._name(begin)}{role}") for role in ROLES)
        return bool(num - num_messages > (0 if num_messages else 1))

    def _find_in_messages(self, messages: Sequence[chat.Message], rendered: str, tools: Sequence[Any]) -> Iterator[str]:
        roles = [message["role"] for message in messages]
        if unknown := next((role for role in roles if role not in ROLES), ""):
            yield f"has a message of {unknown!r}; the roles that chat templates know are system, user, assistant, tool"
        if roles.count("system") > 1:
            more = f" (one of them is {self._limits.keys}system_prompt)" if self._data.system_prompt else ""
            yield f"has {roles.count('system')} system messages{more}"
        if not set(roles) & {"user", "tool", "function", "ipython"} and set(roles) <= set(ROLES):
            yield "has no message of the user"
        if any(
            role == "user" and not (message["content"] or "").strip()
            for role, message in zip(roles, messages, strict=True)
        ):
            yield "has an empty message of the user"
        if roles[-1] == "assistant" and not self._data.conversation_key:
            yield "ends with a message of the assistant: does it hold the answer?"
        if self._data.conversation_key or self._is_for_agent:  # only the part before the first answer is rendered
            return
        for role, message in zip(roles, messages, strict=True):
            said = (message.get("content") or "").strip()
            if role in ("system", "developer", "user") and said not in rendered:
                yield f"has a message of the {role} that the chat template leaves out or changes"
            names = [call.get("function", call).get("name") for call in message.get("tool_calls") or []]
            if any(isinstance(name, str) and name not in rendered for name in names):
                yield "has a tool call that the chat template leaves out"
            said_none = sum(text.count("None") for text in chat.texts_of(messages))
            if message.get("content", "") is None and rendered.count("None") > said_none:
                yield "has a message without content, for which the chat template writes None"
        names = [tool.get("function", tool).get("name") for tool in tools]
        if any(isinstance(name, str) and name not in rendered for name in names):
            yield f"has tools ({self._data.tools_key}) that the chat template leaves out"

    def _find_in_template(self, messages: Sequence[chat.Message]) -> Iterator[str]:
        source, where = self._template.source, f"{self._limits.keys}chat_template"
        yield from chat.options_without_effect(source, self._data.chat_template_options, where=f"{where}_options")
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}]
        try:
            opened, closed = (self._template.text(asked[:1], tools=None, where="", asks=asks) for asks in (True, False))
            answered = self._template.text(asked, tools=None, where="", asks=False)
        except ConfigError:  # a template for other conversations
            return
        if opened == closed and not self._is_for_agent:
            yield (
                f"{where}: the model's template does not open an answer (it has no add_generation_prompt), so the "
                "model may go on as the user"
            )
        yield from self._find_wrong_end(answered.partition(_SENTINEL)[2], where=where)

    def _find_wrong_end(self, after: str, *, where: str) -> Iterator[str]:
        """Compare the token with which the template ends an answer with those that end one in training or sampling.

        after  what the template writes after an answer, "<|im_end|>\n"; some templates write nothing
        """
        tokens = self._tokenizer(after, add_special_tokens=False, verbose=False)["input_ids"] if after.strip() else []
        special = {self._vocabulary.get(mark) for mark in self._specials}
        own = self._tokenizer.eos_token_id
        if not tokens or tokens[0] not in {*special, own}:
            if self._data.conversation_key and own not in tokens:
                yield f"{where}: the model's template writes no end token behind an answer, so none is trained to end"
            return
        sampling = self._limits.sampling
        is_stopped = tokens[0] in sampling.get("stop_token_ids", ()) or any(
            s in after for s in sampling.get("stop", ())
        )
        name = self._name(tokens[0])
        if (self._data.response_key or self._data.conversation_key) and tokens[0] != own:
            yield (
                f"{where}: the model's template ends an answer with {name}, and the end token that answers are trained "
                f"with is {self._name(own)} (eos_token of tokenizer_config.json); set that to {name}"
            )
        elif tokens[0] not in self._ends and not is_stopped:
            yield (
                f"{where}: the model's template ends an answer with {name}, which does not end one when sampling; add "
                f"{'rollout.' if self._limits.keys else ''}stop_token_ids = [{tokens[0]}]"
            )

    @functools.cached_property
    def _names_of_ends(self) -> Sequence[str]:
        return [self._name(token) for token in self._ends if token is not None]

    def _name(self, token: int | None) -> str:
        return "none" if token is None else str(self._tokenizer.convert_ids_to_tokens(token))

    def _text_of(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ends_with(text: str, label: Any) -> bool:
    """Whether a prompt ends with its label, or with one of several: an answer of a data set, not the question."""
    text = text.rstrip(_AFTER_LABEL)
    labels = label if isinstance(label, list | tuple) else [label]
    words = [str(one).strip(_AFTER_LABEL) for one in labels if isinstance(one, str | int | float)]
    return any(word and re.search(rf"(?<!\w){re.escape(word)}\Z", text) for word in words)


def _letters(text: str) -> set[str]:
    """Return the letters of a text but for spaces, in one form for those that Unicode has in several."""
    return {*unicodedata.normalize("NFKC", text)} - {*string.whitespace}
