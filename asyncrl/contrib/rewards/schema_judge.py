"""The judge process for JSON: a JSON line [seconds, [schema, answer]] in, {"reward": 1.0} out.

Python's regular expressions check for signals while they search, so a timer can end even an endless search. Signals
work only in a process's main thread, so judging has its own process. It ends when its standard input ends.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from asyncrl.rewards.judge_pool import within


def main() -> None:
    seconds = int(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # keep output of libraries out of the answers
    signal.signal(signal.SIGALRM, _too_long)
    import jsonschema  # noqa: F401 - before the first answer's time begins

    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        share, (schema, text) = json.loads(line)
        answer = within(share, functools.partial(judged, schema, text, seconds))
        print(json.dumps({"reward": None} if answer is None else answer), file=answers, flush=True)


def judged(schema: Any, text: str, seconds: float) -> dict[str, Any]:
    """Return the response to one answer; an error if the schema is invalid."""
    try:
        return {"reward": _valid(validator_of(schema), text, seconds)}
    except (InvalidSchema, Unreadable) as error:
        return {"error": str(error)}


def validator_of(schema: Any) -> Any:
    """Return jsonschema's validator, which fetches nothing that the schema refers to. Raises InvalidSchema."""
    import jsonschema
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
    from referencing.jsonschema import specification_with

    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise InvalidSchema(f"invalid schema: {error.message}"[:200]) from None
    if isinstance(schema, Mapping) and schema and not schema.keys() & kind.VALIDATORS.keys():
        raise InvalidSchema(
            f"the table {str(schema)[:60]!r} is no JSON Schema: it asks for nothing, so that any JSON would be valid"
        )
    root = specification_with(kind.META_SCHEMA["$schema"]).create_resource(schema)
    _check_references(root, REGISTRY.resolver_with_root(root))
    return kind(schema, registry=REGISTRY)


def _check_references(resource: Any, resolver: Any) -> None:
    """Raise InvalidSchema for a reference to what is not in the schema."""
    from referencing.exceptions import Unresolvable

    named = resource.contents if isinstance(resource.contents, Mapping) else {}
    for reference in (named[key] for key in ("$ref", "$dynamicRef") if isinstance(named.get(key), str)):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise InvalidSchema(f"the schema refers to what is not in it: {error}"[:200]) from None
    for inner in resource.subresources():
        _check_references(inner, resolver.in_subresource(inner))


def parsed(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN and Infinity, which Python would accept, and RecursionError."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class TooLong(Exception):
    """The time limit of one answer is exceeded."""


class InvalidSchema(ValueError):
    """The schema is not a JSON Schema."""


class Unreadable(Exception):
    """The schema has a reference that cannot be resolved."""


def _valid(validator: Any, text: str, seconds: float) -> float:
    from referencing.exceptions import Unresolvable

    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return float(validator.is_valid(parsed(text)))
    except (ValueError, RecursionError, TooLong):
        return 0.0
    except Unresolvable as error:
        raise Unreadable(f"the schema refers to what is not in it: {error}"[:200]) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


if __name__ == "__main__":
    main()
