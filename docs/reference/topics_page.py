"""docs/reference/topics.md: what travels on the bus, from the topics and their messages."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Final

from asyncrl.messages import topics

HEAD: Final = """# Topics

What travels on the bus, generated from `asyncrl/messages/topics.py` by `python docs/reference/make.py`. Subjects are
`asyncrl.RUN.TOPIC.KEY`; messages are msgpack, arrays raw little-endian bytes.

- **work**: each message goes to one consumer, and is delivered again until that consumer acknowledges it.
- **log**: every message is kept; readers hold a cursor, and nobody acknowledges.
- **state**: the last value per key; a watcher gets the present value first, then every change.

Besides its readers, operators and observers read every log and state; the learner may do everything.

A key that a worker writes begins with its name, and the server lets it write no other
([security](../guides/deploy.md#security)).

| topic | kind | message | published by | read by | kept |
|---|---|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| `{topic.name}` | {topic.kind} | {_link(topic.message_type)} | {', '.join(topic.publishers)} "
        f"| {', '.join(topic.readers) or '-'} | {_kept(topic)} |"
        for topic in topics.ALL
    ]
    services = topics.ALL_SERVICES
    asked = [
        f"| `{one.name}` | {_link(one.question_type)} | {_link(one.answer_type)} | {', '.join(one.asked_by)} "
        f"| {', '.join(one.served_by)} |"
        for one in services
    ]
    types = {topic.message_type for topic in topics.ALL}
    types |= {kind for one in services for kind in (one.question_type, one.answer_type)}
    messages = [_message(kind) for kind in sorted(types, key=lambda kind: kind.__name__)]
    service_head = (
        "\n\n## Services\n\nA process that serves a question answers it at once; nothing is stored.\n\n"
        "| service | question | answer | asked by | served by |\n|---|---|---|---|---|\n"
    )
    message_head = (
        "\n\n## Messages\n\nTypes and meanings of the fields: `asyncrl/messages/`.\n\n"
        "| message | what it is | fields |\n|---|---|---|\n"
    )
    return HEAD + "\n".join(rows) + service_head + "\n".join(asked) + message_head + "".join(messages)


def _kept(topic: topics.Topic[Any]) -> str:
    if not topic.seconds_to_live:
        return "until removed"
    hours = topic.seconds_to_live / 3600
    return f"{topic.seconds_to_live:g} s" if hours < 1 else f"{hours:g} h" if hours < 24 else f"{hours / 24:g} days"


def _link(kind: type) -> str:
    return f"`{kind.__name__}`"


def _message(kind: type) -> str:
    """A row with the message's purpose and its fields; their meaning is in the docstring of the type."""
    purpose = inspect.cleandoc(kind.__doc__ or "").split("  Topic")[0].split("\n\n")[0]
    fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
    return f"| `{kind.__name__}` | {_cell(' '.join(purpose.split()))} | {fields} |\n"


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")
