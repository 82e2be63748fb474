"""A small language to choose recorded groups: 'task == "gsm8k" and step > 400 and worker in ("w3", "w4")'.

Python's comparisons over named fields, with and, or, not and parentheses. The text is parsed, checked and walked; it is
never run as code. Tests: tests/unit/policies/groups/test_predicate.py.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrl.errors import ConfigError

LONGEST: Final = 2000
"""Most characters of a predicate: a deeper one than these can hold would exhaust Python's stack."""

_OPERATORS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, values: value in values,
    ast.NotIn: lambda value, values: value not in values,
}
_MOST_DEPTH: Final = 50


class Predicate:
    """A checked predicate over fields.  fields: name -> its type, ``str`` or ``float``. Raises ConfigError."""

    def __init__(self, text: str, *, fields: Mapping[str, type], where: str) -> None:
        self.text, self._where, self._fields = text, f"{where} {text!r}", fields
        if len(text) > LONGEST:
            raise ConfigError(f"{where}: has {len(text):,} characters, and at most {LONGEST:,} are allowed")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigError(f"{self._where}: {what}; write comparisons such as 'step > 400'") from None
        self._check(self._tree, depth=0)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        """Return whether the predicate holds for a group, of which every field is known."""
        return self._holds(self._tree, values) is True

    def may_hold(self, values: Mapping[str, Any]) -> bool:
        """Return whether the predicate may hold for a group of which only some fields are known."""
        return self._holds(self._tree, values) is not False

    def _check(self, node: ast.expr, *, depth: int) -> None:
        if depth > _MOST_DEPTH:
            raise ConfigError(f"{self._where}: is nested more than {_MOST_DEPTH} deep")
        if isinstance(node, ast.BoolOp):
            for one in node.values:
                self._check(one, depth=depth + 1)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand, depth=depth + 1)
        elif isinstance(node, ast.Compare):
            left = self._type_of(node.left)
            for op, right_node in zip(node.ops, node.comparators, strict=True):
                if type(op) not in _OPERATORS:
                    raise ConfigError(f"{self._where}: compare with == != < <= > >= in, not in")
                right = self._type_of(right_node)
                self._check_types(op, left, right, ast.unparse(node))
                left = right
        else:
            raise ConfigError(
                f"{self._where}: {ast.unparse(node)!r} is no comparison; compare fields with numbers and texts, "
                "as in 'step > 400', joined by and, or, not"
            )

    def _check_types(self, op: ast.cmpop, left: object, right: object, text: str) -> None:
        if isinstance(op, ast.In | ast.NotIn):
            fits = (left is str and right is str) or (isinstance(right, frozenset) and right <= {left})
        else:
            fits = left == right
        if not fits:
            raise ConfigError(f"{self._where}: {text!r} compares a number with a text; texts are quoted, numbers not")

    def _type_of(self, node: ast.expr) -> object:
        """Return ``str`` or ``float`` for a value, and for a list the set of its elements' types."""
        if isinstance(node, ast.Name):
            if node.id not in self._fields:
                near = difflib.get_close_matches(node.id, self._fields, 3, cutoff=0.5)
                meant = f"did you mean {' or '.join(near)}" if near else f"fields are {', '.join(sorted(self._fields))}"
                raise ConfigError(f"{self._where}: there is no field {node.id!r}; {meant}")
            return self._fields[node.id]
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return frozenset(self._type_of(one) for one in node.elts)
        value = _constant(node)
        if value is None:
            raise ConfigError(f"{self._where}: {ast.unparse(node)!r} is neither a field, a number, nor a quoted text")
        return str if isinstance(value, str) else float

    def _holds(self, node: ast.expr, values: Mapping[str, Any]) -> bool | None:
        """Return the truth of a checked node; None if it depends on a field that is not in ``values``."""
        if isinstance(node, ast.BoolOp):
            found = [self._holds(one, values) for one in node.values]
            decisive = isinstance(node.op, ast.Or)  # one True decides an "or", one False an "and"
            return decisive if decisive in found else None if None in found else not decisive
        if isinstance(node, ast.UnaryOp):
            holds = self._holds(node.operand, values)
            return None if holds is None else not holds
        assert isinstance(node, ast.Compare)
        terms = [_value(one, values) for one in (node.left, *node.comparators)]
        results = [
            None if left is _UNKNOWN or right is _UNKNOWN else _OPERATORS[type(op)](left, right)
            for op, (left, right) in zip(node.ops, itertools.pairwise(terms), strict=True)
        ]
        return False if False in results else None if None in results else True


_UNKNOWN: Final = object()


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return values.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        found = tuple(_value(one, values) for one in node.elts)
        return _UNKNOWN if _UNKNOWN in found else found
    return _constant(node)


def _constant(node: ast.expr) -> str | float | None:
    """Return a text or a number, perhaps with a minus; None for anything else. True and False are 1 and 0."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand)
        return None if value is None or isinstance(value, str) else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
        return node.value
    return None
