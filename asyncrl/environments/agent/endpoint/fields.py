"""Request fields that would change sampling or the prompt. None of them is ignored silently.

Fields that clients send by default but the run decides, such as temperature, are recorded and named in the answer's
header ``x-not-obeyed``. Fields that a client relies on are obeyed or refused by name: stop strings, a JSON schema, a
forced tool call. Constrained decoding is always refused, because the trainer cannot recompute a masked distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrl.environments.agent.endpoint.refusal import Json, Refused, rows, short, table, text

RUNS_OWN: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "reasoning", "reasoning_effort", "thinking", "verbosity"),
    *("parallel_tool_calls", "chat_template_kwargs"),
)
"""Fields that the run file or the model's chat template decides."""

_TRAINER: Final = "it changes the sampling distribution in a way that the trainer cannot recompute"
_SAMPLED: Final = "only logprobs of sampled tokens are known"
_TEXT: Final = "answers are text"
_NO_PREFILL: Final = "an answer that your program begins cannot be continued; end with a message of another role"
_NO_EFFECT: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "response_format": (({"type": "text"},), f"{_TRAINER}; ask for JSON in the prompt"),
    "frequency_penalty": ((0,), _TRAINER),
    "presence_penalty": ((0,), _TRAINER),
    "repetition_penalty": ((1,), _TRAINER),
    "logit_bias": (({},), _TRAINER),
    "length_penalty": ((1,), _TRAINER),
    "typical_p": ((1,), _TRAINER),
    "no_repeat_ngram_size": ((0,), _TRAINER),
    "logits_processors": (([],), _TRAINER),
    "custom_logit_processor": ((), _TRAINER),
    "output_format": ((), f"{_TRAINER}; ask for JSON in the prompt"),
    "guided_json": ((), _TRAINER),
    "guided_regex": ((), _TRAINER),
    "guided_choice": ((), _TRAINER),
    "guided_grammar": ((), _TRAINER),
    "structured_outputs": ((), _TRAINER),
    "json_schema": ((), _TRAINER),
    "regex": ((), _TRAINER),
    "ebnf": ((), _TRAINER),
    "bad_words": (([],), _TRAINER),
    "allowed_token_ids": ((), _TRAINER),
    "min_tokens": ((0,), "set rollout.min_new_tokens in the run file"),
    "ignore_eos": ((False,), "answers end where the model ends them"),
    "stop_token_ids": (([],), "set rollout.stop_token_ids in the run file"),
    "stop_regex": ((), "set rollout.stop in the run file"),
    "continue_final_message": ((False,), _NO_PREFILL),
    "add_generation_prompt": ((True,), _NO_PREFILL),
    "echo": ((False,), "the prompt is not returned"),
    "chat_template": ((), "set rollout.options.chat_template in the run file"),
    "documents": (([],), "put them into a message"),
    "truncate_prompt_tokens": ((), "a prompt that does not fit is refused with context_length_exceeded"),
    "use_beam_search": ((False,), "answers are sampled"),
    "best_of": ((1,), "all answers are returned; use n"),
    "top_logprobs": ((0,), _SAMPLED),
    "prompt_logprobs": ((), _SAMPLED),
    "modalities": ((["text"],), _TEXT),
    "audio": ((), _TEXT),
    "prediction": ((), "predicted outputs are not supported"),
    "web_search_options": ((), "the endpoint has no web search; give the model your own tool"),
    "prompt": ((), "the endpoint stores no prompt templates; send the messages"),
    "background": ((False,), "use stream, or wait for the answer"),
    "truncation": (("disabled",), "a prompt that does not fit is refused with context_length_exceeded"),
    "max_tool_calls": ((), "your program runs the tools; count the calls there"),
    "context_management": (([],), "your program holds the history; send what the model should see"),
    "container": ((), "the endpoint runs no tools"),
    "mcp_servers": (([],), "the endpoint runs no tools"),
}
"""For each field: values that have no effect, besides null, and why other values are refused."""
_CHOICES: Final = ("auto", "none")
_ONE_CALL: Final = "disable_parallel_tool_use"


def wishes(body: Json, *, stop: Sequence[str]) -> Json:
    """Return the requested settings that are not obeyed because the run decides them. Raises Refused.

    stop  stop strings of this run
    """
    for name, (harmless, why) in _NO_EFFECT.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            raise Refused(f"{name} = {short(value)} is not served here: {why}")
    for name in ("stop", "stop_sequences"):
        _check_stop(body.get(name), name, stop)
    made = {name: body[name] for name in RUNS_OWN if body.get(name) is not None}
    made |= _format(body.get("text"), "text", ("verbosity",))
    made |= _format(body.get("output_config"), "output_config", ("effort",))
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get(_ONE_CALL) is not None:  # Anthropic's parallel_tool_calls
        made[_ONE_CALL] = choice[_ONE_CALL]
    return made


def stop_strings(value: Any, name: str) -> list[str]:
    """Return the stop strings of a field, which may be one text. Raises Refused."""
    asked = [value] if isinstance(value, str) else rows(value, name)
    return [text(one, f"{name}[{place}]") for place, one in enumerate(asked)]


def _check_stop(value: Any, name: str, stop: Sequence[str]) -> None:
    for one in stop_strings(value, name):
        if one not in stop:
            known = ", ".join(map(short, stop)) or "none"
            raise Refused(
                f"{name}: {short(one)} ends no answer of this run; rollout.stop has {known}; add it in the run "
                "file, or tokens that your program never sees would be trained"
            )


def _format(value: Any, where: str, names: Sequence[str]) -> Json:
    """Check a field such as ``text`` of the responses API: {"format": {"type": ...}, "verbosity": ...}.

    names  fields in it that the run decides; those that are given are returned
    """
    given = table(value or {}, where)
    kind = table(given.get("format") or {}, f"{where}.format").get("type", "text")
    if kind != "text":
        raise Refused(
            f"{where}.format of type {short(kind)} is not served here: {_TRAINER}; ask for JSON in the prompt"
        )
    return {name: given[name] for name in names if given.get(name) is not None}


def offers_tools(choice: Any) -> bool:
    """Whether a tool_choice, in any dialect's form, lets the model see the tools. Raises Refused."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind is not None and kind not in _CHOICES:
        raise Refused(
            f"tool_choice = {short(choice)} is not served here: a call cannot be forced, because {_TRAINER}; "
            f"use {' or '.join(_CHOICES)}"
        )
    return kind != "none"
