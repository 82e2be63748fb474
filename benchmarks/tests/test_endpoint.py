"""Malformed requests are refused with a reason: part of ``python -m benchmarks.endpoint fuzz``."""

from __future__ import annotations

from asyncrl.environments.agent.endpoint.template import Template
from benchmarks.endpoint import fuzz
from tests.harness.agents import TOKENIZER


async def test_requests_that_make_no_sense_are_refused_with_a_reason_or_answered() -> None:
    found = await fuzz(Template(TOKENIZER), requests=300, seed=1)
    assert sum(found["statuses"].values()) == 300
    assert {200, 400} <= set(found["statuses"]) <= {200, 400, 404}
