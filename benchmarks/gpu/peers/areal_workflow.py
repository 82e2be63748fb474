"""Length-controlled rollout for AReaL: an answer of exactly the length drawn for (seed, group, index)."""

from __future__ import annotations

import uuid
import zlib
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.lengths import Lengths

try:
    from areal.api import RolloutWorkflow
except ImportError:  # anywhere but in AReaL's own processes
    RolloutWorkflow = object


class DrawnLengths(RolloutWorkflow):  # type: ignore[misc]
    """lengths: as keywords of Lengths."""

    def __init__(self, **lengths: Any) -> None:
        self._lengths = Lengths(**lengths)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
        from areal.api import ModelRequest
        from areal.api.cli_args import GenerationHyperparameters

        index = data.get("next_index", 0)  # the samples of a group share this dict
        data["next_index"] = index + 1
        sampling = GenerationHyperparameters(
            n_samples=1,
            max_new_tokens=self._lengths.of(group_id=int(data["group"]), index=index),
            ignore_eos=True,
            temperature=1.0,
            skip_special_tokens=False,
            top_k=-1,
        )
        request = ModelRequest(rid=uuid.uuid4().hex, input_ids=list(data["input_ids"]), gconfig=sampling)
        answer = await engine.agenerate(request)
        tokens = [*answer.input_tokens, *answer.output_tokens]
        first = np.array(answer.output_tokens[:16], np.int32).tobytes()
        prompt, response = answer.input_len, answer.output_len
        fields = {
            "input_ids": torch.tensor(tokens, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * prompt + [1] * response, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * prompt + answer.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * prompt + answer.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(len(tokens), dtype=torch.bool),
            "rewards": torch.tensor(zlib.crc32(first) / 2**32, dtype=torch.float32),
        }
        return {name: tensor.unsqueeze(0) for name, tensor in fields.items()}
