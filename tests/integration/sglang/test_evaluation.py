"""Evaluation on a real SGLang server during training: logprobs show that every token is from the evaluated weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.bus.memory.bus import MemoryBus
from asyncrl.engines.generation import Generation
from asyncrl.engines.sglang.engine import SGLangEngine
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.messages.topics import EVALUATION_ANSWERS
from asyncrl.policies.evaluation.questions import EvaluationSet, Question
from asyncrl.policies.evaluation.results import Measured
from asyncrl.tensors.snapshot import Snapshot
from tests.conftest import BUS_SIZES, MAX_MESSAGE_BYTES
from tests.harness import fakes
from tests.harness.engines import PROMPT, TOLERANCE, Model
from tests.harness.evaluation import evaluating_worker, section
from tests.integration.sglang.test_transfers import on_a_server

STEPS = 4


class SharedServer:
    """The session's server as a worker's engine, which neither starts nor closes it. Records its samples."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self.weight_updater = None
        self.sampled: list[tuple[NDArray[np.int32], Generation]] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate(self, prompt_tokens: NDArray[np.int32], *arguments: Any, **options: Any) -> Generation:
        answer = await self._engine.generate(prompt_tokens, *arguments, **options)
        self.sampled.append((prompt_tokens, answer))
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class TwoModels(fakes.Channel):
    """Even versions are the old model, odd versions the new one."""

    def __init__(self, old: Model, new: Model) -> None:
        self._models = (old, new)

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        return self.of(policy_version).version(policy_version, incarnation=incarnation)

    def of(self, policy_version: int) -> Model:
        return self._models[policy_version % 2]


@on_a_server
@pytest.mark.parametrize("place", ["shared", "dedicated"])
async def test_every_answer_is_of_the_evaluated_weights(
    place: Any, sglang_server: SGLangEngine, old_model: Model, new_model: Model, tmp_path: Path
) -> None:
    await sglang_server.load(old_model.version(0))
    bus = MemoryBus(**BUS_SIZES, max_message_bytes=MAX_MESSAGE_BYTES)
    channel = TwoModels(old_model, new_model)
    loop = fakes.Loop(bus, tmp_path, steps=STEPS, channel=channel)
    letter = old_model.text(np.array([PROMPT[1]], np.int32))
    loop.evaluation = section(place=place, every_steps=1)
    loop.evaluation_sets = [
        EvaluationSet(
            name="sums",
            questions=[Question(prompt="", tokens=PROMPT[: 2 + index % 3]) for index in range(6)],
            sampling=SamplingParams(max_new_tokens=24, stop=(letter,), is_trained=False),
            measured=Measured(num_prompts=6, num_samples=2),
        )
    ]
    server = SharedServer(sglang_server)
    if place == "shared":
        workers = [evaluating_worker(bus, server, name="w0")]
    else:
        workers = [
            fakes.worker(bus, fakes.Engine()),
            evaluating_worker(bus, server, name="e0", is_dedicated=True),
        ]
    await fakes.run_all(loop, *workers)
    results = {int(row["step"]): row for row in loop.recorder.rows if "evaluation/complete" in row}
    assert {0, STEPS} <= set(results)
    for version, row in results.items():
        assert row["evaluation/complete"] == 1.0
        assert row["evaluation/mixed"] == 0.0
        assert row["evaluation/sums/mean@2"] == version
    assert loop.backend.steps == STEPS
    async with bus.read(EVALUATION_ANSWERS) as records:
        for _ in range(6):
            said = (await anext(records)).message  # from the last evaluation
            for counted in said.answers:
                (span,) = counted.version_spans
                assert span.policy_version == STEPS
    asked = {tuple(PROMPT[: 2 + index]) for index in range(3)}
    of_evaluation = [one for one in server.sampled if tuple(one[0]) in asked and is_of(one[1], STEPS)]
    assert len(of_evaluation) >= 12
    model = channel.of(STEPS)
    for prompt, answer in of_evaluation:
        expected = model.logprobs(prompt, answer.tokens)
        assert np.abs(answer.logprobs - expected).max() < TOLERANCE
        text = model.text(answer.tokens)
        assert letter not in text[: -len(letter)]
        is_ended = text.endswith(letter) or answer.tokens[-1] == model.end_token
        assert (answer.finish_reason == "length") == (len(answer.tokens) == 24 and not is_ended)


def is_of(answer: Generation, policy_version: int) -> bool:
    return {span.policy_version for span in answer.version_spans} == {policy_version}
