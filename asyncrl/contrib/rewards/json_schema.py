"""reward.kind = "json_schema": the completion is JSON that is valid under a JSON Schema, as jsonschema judges.

The JSON is the last fenced block after </think> that is tagged as JSON (```json), else the last without a tag, else the
whole text after it. The schema is the label (a table or JSON text), or the file ``schema`` for all rows. The patterns
of a schema are regular expressions, which may never finish, so they run in a separate process with a time limit,
whose ``main`` is here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from asyncrl.config.checks import Positive, Range
from asyncrl.errors import ConfigError
from asyncrl.rewards.answers import last_block, marked
from asyncrl.rewards.judge_pool import BadLabel, JudgePool, serve
from asyncrl.rewards.port import Reward, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    schema: str = ""
    """JSON file with the schema of all rows; empty: each label is a schema."""
    processes: Positive[int] = 1
    """Number of judge processes per rollout worker."""
    timeout_seconds: Annotated[int, Range(low=1)] = 2
    """Time limit of one answer; an answer that takes longer is wrong. So is one that takes more than its share of
    reward.timeout_seconds."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("jsonschema") is None:
            raise ConfigError("reward.kind = \"json_schema\" needs jsonschema: pip install 'asyncrl[jsonschema]'")


class JsonSchemaReward:
    def __init__(self, options: Options) -> None:
        self.needs_label = not options.schema
        self._schema = _read(options.schema) if options.schema else None
        self._judges = JudgePool(
            "asyncrl.contrib.rewards.json_schema",
            [str(options.timeout_seconds)],
            name="json_schema",
            processes=options.processes,
        )

    async def __call__(self, samples: Sequence[Sample]) -> list[Reward]:
        """Return 1 for JSON that is valid under the schema, else 0; the part is_json says whether it is JSON at all."""
        texts = [_answer(marked(sample.answer)) for sample in samples]
        are_json = [_is_json(text) for text in texts]
        schema = self._schema if self._schema is not None else _schema_of(samples[0].label)
        valid = await self._judges.ask([[schema, text] for text in texts])
        return [
            Reward(value=value, parts={"is_json": float(is_json)})
            for value, is_json in zip(valid, are_json, strict=True)
        ]

    def check_label(self, label: Any, metadata: Mapping[str, Any]) -> None:
        if self._schema is None:
            validator_of(_schema_of(label))

    def limit_groups(self, seconds: float) -> None:
        self._judges.seconds = seconds

    async def close(self) -> None:
        await self._judges.close()


def _answer(text: str) -> str:
    block = last_block(text, "json")
    return text if block is None else block


def _is_json(text: str) -> bool:
    try:
        parsed(text)
    except (ValueError, RecursionError):
        return False
    return True


def _schema_of(label: Any) -> Any:
    """Return the schema of a label. Raises ValueError if the label is not a schema."""
    if isinstance(label, str):
        try:
            label = json.loads(label)
        except ValueError as error:
            raise ValueError(f"the label is not a JSON Schema: {error}") from None
    if not isinstance(label, Mapping | bool):
        raise ValueError(f"the label must be a JSON Schema, is {str(label)[:60]!r}")
    return dict(label) if isinstance(label, Mapping) else label


def _read(path: str) -> Any:
    try:
        return _schema_of(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"schema: {path}: {error}") from None


# -- in a judge's process: a question is [schema, answer] --------------------------------------------------------------


def main() -> None:
    serve(judge, warm_up=lambda: importlib.import_module("jsonschema"), limit=int(sys.argv[1]))


def judge(question: Sequence[Any]) -> float:
    """Return 1.0 for JSON that is valid, else 0.0. Raises BadLabel for a schema that is none."""
    from referencing.exceptions import Unresolvable

    schema, text = question
    validator = validator_of(schema)
    try:
        return float(validator.is_valid(parsed(text)))
    except Unresolvable as error:
        raise BadLabel(f"the schema refers to what is not in it: {error}"[:200]) from None
    except (ValueError, RecursionError):
        return 0.0


def validator_of(schema: Any) -> Any:
    """Return jsonschema's validator, which fetches nothing that the schema refers to. Raises BadLabel."""
    import jsonschema
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing.jsonschema import specification_with

    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise BadLabel(f"invalid schema: {error.message}"[:200]) from None
    if isinstance(schema, Mapping) and schema and not schema.keys() & kind.VALIDATORS.keys():
        raise BadLabel(
            f"the table {str(schema)[:60]!r} is no JSON Schema: it asks for nothing, so that any JSON would be valid"
        )
    root = specification_with(kind.META_SCHEMA["$schema"]).create_resource(schema)
    _check_references(root, REGISTRY.resolver_with_root(root))
    return kind(schema, registry=REGISTRY)


def _check_references(resource: Any, resolver: Any) -> None:
    """Raise BadLabel for a reference to what is not in the schema."""
    from referencing.exceptions import Unresolvable

    named = resource.contents if isinstance(resource.contents, Mapping) else {}
    for reference in (named[key] for key in ("$ref", "$dynamicRef") if isinstance(named.get(key), str)):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise BadLabel(f"the schema refers to what is not in it: {error}"[:200]) from None
    for inner in resource.subresources():
        _check_references(inner, resolver.in_subresource(inner))


def parsed(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and Infinity, which Python would accept, and RecursionError."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


if __name__ == "__main__":
    main()
