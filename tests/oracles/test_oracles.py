"""Checks every formula against independent float64 vectors, through the functions that users call.

The vectors come from ``ASYNCRL_ORACLES``, a file like tests/data/oracles.json, which is the default. One adapter per
formula (tests/oracles/*.py) turns a vector's arrays into a call and the results back; adapters hold no formulas.

A vector *passes* when every number it expects is given and matches, and *fails* when a given number does not match. It
is *not offered*, and never passes, in these cases: no adapter knows its formula; it sets a parameter or input that the
adapter does not read; it expects an output that the adapter does not give; or it does not say which variant of the
formula it means and no variant of asyncrl matches it as a whole. A vector's id has no meaning.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.oracles import advantages, corrections, losses, staleness
from tests.oracles.dense import Inputs, NotOffered, Outputs, Params

DEFAULT_FILE = ROOT / "tests" / "data" / "oracles.json"
FILE = Path(os.environ.get("ASYNCRL_ORACLES") or DEFAULT_FILE)
VECTORS = json.loads(FILE.read_text())["vectors"]
FORMULAS = advantages.FORMULAS | losses.FORMULAS | corrections.FORMULAS | staleness.FORMULAS


def run(vector: Mapping[str, Any]) -> tuple[str, str]:
    """("passed" | "failed" | "not offered", why)."""
    adapter = FORMULAS.get(vector["formula"])
    if adapter is None:
        return "not offered", f"formula {vector['formula']}"
    params, inputs = Params(vector["params"]), Inputs(vector["inputs"])
    try:
        given = adapter(params, inputs)
    except NotOffered as error:
        return "not offered", repr(error)
    except Exception as error:
        return "failed", repr(error)
    if params.unread:
        return "not offered", f"parameters {sorted(params.unread)}"
    if inputs.unread:
        return "not offered", f"inputs {sorted(inputs.unread)}"
    if isinstance(given, dict):
        return _compared(given, vector)
    outcomes = [_compared(variant, vector) for variant in given]
    if "passed" in (outcome for outcome, _ in outcomes):
        return "passed", ""
    return "not offered", f"which of {len(given)} variants is meant; {outcomes[0][1]}"


def _compared(given: Mapping[str, Any], vector: Mapping[str, Any]) -> tuple[str, str]:
    expected = vector["expected"]
    wrong = [name for name in expected if name in given and not _is_met(given[name], expected[name], vector["atol"])]
    if wrong:
        return "failed", "; ".join(f"{name}: expected {expected[name]}, got {given[name]}" for name in wrong)
    missing = sorted(set(expected) - set(given))
    return ("not offered", f"expects {missing}") if missing else ("passed", "")


def _is_met(given: Any, expected: Any, atol: float) -> bool:
    """A tuple holds one result in several forms (per token and per sequence, unreduced and its mean)."""
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
        # The last digits of numbers like e^20 depend on the summation order.
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
    assert VECTORS, f"{FILE} holds no vectors: nothing was compared"
    assert count["failed"] == 0
    if FILE == DEFAULT_FILE:
        assert count["passed"] >= 92
        assert {vector["formula"] for vector in VECTORS if run(vector)[0] == "not offered"}.isdisjoint(FORMULAS)


def test_a_wrong_number_fails_a_vector_and_an_unknown_formula_or_parameter_never_passes_one() -> None:
    vector = next(
        vector for vector in json.loads(DEFAULT_FILE.read_text())["vectors"] if vector["id"] == "opo/length_weighted"
    )
    assert run(vector)[0] == "passed"
    assert run({**vector, "expected": _shifted(vector["expected"], 1e-3)})[0] == "failed"
    assert run({**vector, "formula": "nobody knows it"})[0] == "not offered"
    assert run({**vector, "params": {**vector["params"], "not ours": 1}})[0] == "not offered"
    assert run({**vector, "expected": {**vector["expected"], "not ours": 1.0}})[0] == "not offered"


@pytest.mark.parametrize("vector", json.loads(DEFAULT_FILE.read_text())["vectors"], ids=lambda vector: vector["id"])
def test_neither_its_id_decides_a_vector_nor_does_a_parameter_or_input_nobody_reads_pass(
    vector: dict[str, Any],
) -> None:
    outcome = run(vector)
    assert run({**vector, "id": "renamed"}) == outcome
    if outcome[0] == "passed":
        assert run({**vector, "params": {**vector["params"], "not ours": 1}})[0] == "not offered"
        assert run({**vector, "inputs": {**vector["inputs"], "not ours": [1.0]}})[0] == "not offered"


def test_an_input_within_a_row_that_nobody_reads_is_not_offered() -> None:
    vectors = json.loads(DEFAULT_FILE.read_text())["vectors"]
    vector = next(vector for vector in vectors if vector["formula"] == "prime_staleness")
    rows = [{**row, "not ours": 1} for row in vector["inputs"]["rows"]]
    assert run(vector)[0] == "passed"
    assert run({**vector, "inputs": {**vector["inputs"], "rows": rows}}) == (
        "not offered",
        "inputs ['rows.not ours']",
    )


def test_what_a_vector_lacks_is_not_offered_and_a_key_error_of_ours_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    vector: dict[str, Any] = {"formula": "ours", "params": {}, "inputs": {"x": 1}, "expected": {"y": 2}, "atol": 0}

    def adapted(params: Params, inputs: Inputs) -> Outputs:
        return {"y": inputs["x"] + inputs["not there"] if "more" in params else {}["our own"]}

    monkeypatch.setitem(FORMULAS, "ours", adapted)
    assert run(vector) == ("failed", "KeyError('our own')")
    assert run({**vector, "params": {"more": 1}}) == ("not offered", "NotOffered('not there')")


def test_a_copy_of_all_parameters_does_not_pass_for_reading_them() -> None:
    with pytest.raises(TypeError, match="read parameters and inputs by name"):
        dict(Params({"eps": 1}))


def _shifted(value: Any, by: float) -> Any:
    if isinstance(value, dict):
        return {name: _shifted(item, by) for name, item in value.items()}
    return [_shifted(item, by) for item in value] if isinstance(value, list) else value + by
