"""Every formula against independent float64 vectors, through the functions that users call.

The vectors are those of ``ASYNCRL_ORACLES``, a file like tests/data/oracles.json, which is the default. An adapter per
formula (oracle_adapters_*.py) turns a vector's arrays into a call and the results back; it holds no formula of its own.

A vector *passes* when every number it expects is given and met, and *fails* when one given is not met. It is *not
offered*, never passed, when nobody knows its formula, when it sets a parameter that the adapter does not read, or when
it expects something the adapter does not give.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import oracle_adapters_a, oracle_adapters_b

DEFAULT_FILE = Path(__file__).parent / "data" / "oracles.json"
FILE = Path(os.environ.get("ASYNCRL_ORACLES") or DEFAULT_FILE)
VECTORS = json.loads(FILE.read_text())["vectors"]
FORMULAS = oracle_adapters_a.FORMULAS | oracle_adapters_b.FORMULAS


class Params(Mapping[str, Any]):
    """A vector's parameters, and which of them nobody has read; ``id`` is the vector's, which at times says more."""

    def __init__(self, vector: Mapping[str, Any]) -> None:
        self._values = {"id": vector["id"], **vector["params"]}
        self.unread = set(vector["params"])

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def run(vector: Mapping[str, Any]) -> tuple[str, str]:
    """("passed" | "failed" | "not offered", why)."""
    adapter = FORMULAS.get(vector["formula"])
    if adapter is None:
        return "not offered", f"formula {vector['formula']}"
    params = Params(vector)
    try:
        given = adapter(params, vector["inputs"])
    except (NotImplementedError, KeyError) as error:  # KeyError: the vector lacks what the call needs
        return "not offered", repr(error)
    except Exception as error:
        return "failed", repr(error)
    if params.unread:
        return "not offered", f"parameters {sorted(params.unread)}"
    expected = vector["expected"]
    wrong = [name for name in expected if name in given and not _is_met(given[name], expected[name], vector["atol"])]
    if wrong:
        return "failed", "; ".join(f"{name}: expected {expected[name]}, got {given[name]}" for name in wrong)
    missing = sorted(set(expected) - set(given))
    return ("not offered", f"expects {missing}") if missing else ("passed", "")


def _is_met(given: Any, expected: Any, atol: float) -> bool:
    """A tuple given holds one result in several forms (per token and per sequence, unreduced and its mean)."""
    if isinstance(given, tuple):
        return any(_is_met(form, expected, atol) for form in given)
    if isinstance(given, torch.Tensor | np.ndarray | np.generic):
        given = given.tolist()
    if isinstance(expected, Mapping):
        return all(name in given and _is_met(given[name], value, atol) for name, value in expected.items())
    if isinstance(expected, list):
        is_as_long = isinstance(given, list) and len(given) == len(expected)
        return is_as_long and all(_is_met(one, other, atol) for one, other in zip(given, expected, strict=True))
    if isinstance(expected, float | int) and isinstance(given, float | int):
        # The last digits of numbers like e^20 depend on the order of summation.
        return given == expected or abs(given - expected) <= atol + 1e-12 * abs(expected)
    return bool(given == expected)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["id"] for vector in VECTORS])
def test_a_formula_gives_the_numbers_of_its_source(vector: dict[str, Any]) -> None:
    outcome, reason = run(vector)
    if outcome == "not offered":
        pytest.skip(f"not offered: {reason}")
    assert outcome == "passed", reason


def test_most_vectors_are_offered_and_none_of_those_fails(capsys: pytest.CaptureFixture[str]) -> None:
    count = Counter(run(vector)[0] for vector in VECTORS)
    with capsys.disabled():
        print(
            f"\noracles: {count['passed']} passed, {count['failed']} failed, {count['not offered']} not offered",
            flush=True,
        )
    assert count["failed"] == 0
    if FILE == DEFAULT_FILE:
        assert count["passed"] >= 80


def test_a_wrong_number_fails_a_vector_and_an_unknown_formula_or_parameter_never_passes_one() -> None:
    vector = next(
        vector for vector in json.loads(DEFAULT_FILE.read_text())["vectors"] if vector["id"] == "opo/length_weighted"
    )
    assert run(vector)[0] == "passed"
    assert run({**vector, "expected": _shifted(vector["expected"], 1e-3)})[0] == "failed"
    assert run({**vector, "formula": "nobody knows it"})[0] == "not offered"
    assert run({**vector, "params": {**vector["params"], "not ours": 1}})[0] == "not offered"
    assert run({**vector, "expected": {**vector["expected"], "not ours": 1.0}})[0] == "not offered"


def _shifted(value: Any, by: float) -> Any:
    if isinstance(value, dict):
        return {name: _shifted(item, by) for name, item in value.items()}
    return [_shifted(item, by) for item in value] if isinstance(value, list) else value + by
