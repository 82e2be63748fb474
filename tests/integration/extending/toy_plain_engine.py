"""A custom engine from nothing: transformers, one pass of the model for each token, as many answers at once as come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from asyncrl.engines.adapter import EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration, SpanRecorder, Version
from asyncrl.engines.port import EngineStats
from asyncrl.errors import PromptError, WeightsError
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.tensors import weight_files
from asyncrl.weights.port import LoadReport


class PlainEngine(EngineAdapter):
    """engine.kind = "tests.integration.extending.toy_plain_engine:PlainEngine" """

    def __init__(self, model_path: Path, *, device: str, dtype: str, version: Version, options: None) -> None:
        self._path, self._device, self._dtype = model_path, device, getattr(torch, dtype)
        self.version = version
        self._passing = asyncio.Lock()  # one pass of the model, or one load, at a time
        self._running = self._sampled = 0

    async def start(self) -> None:
        model: Any = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, self._path, dtype=self._dtype)
        self._model = model.to(self._device).eval()

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,  # ignored: what a dead worker had sampled is sampled again
    ) -> Generation:
        if sampling.stop or sampling.min_new_tokens or sampling.changes:  # see engines/stopping.py for stop texts
            raise PromptError("this engine knows no stop texts, min_new_tokens, top_p, top_k or penalties")
        ends = set() if sampling.ignore_eos else {self._model.config.eos_token_id, *sampling.stop_token_ids}
        random, cache, context = torch.Generator().manual_seed(seed % 2**63), DynamicCache(), prompt_tokens.tolist()
        tokens, logprobs, spans = list[int](), list[float](), SpanRecorder()
        self._running += 1
        try:
            while len(tokens) < sampling.max_new_tokens and not (tokens and tokens[-1] in ends):
                async with self._passing:
                    spans.mark(len(tokens), self.version)  # weights may have been loaded since the last token
                    distribution = await asyncio.to_thread(self._pass, context, cache, sampling.temperature)
                context = [int(torch.multinomial(distribution.exp(), 1, generator=random))]
                tokens += context
                logprobs.append(float(distribution[context[0]]))
                self._sampled += 1
        finally:
            self._running -= 1
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            version_spans=spans.spans(len(tokens)),
            finish_reason="stop" if tokens[-1] in ends else "length",
        )

    @torch.inference_mode()
    def _pass(self, tokens: list[int], cache: DynamicCache, temperature: float) -> torch.Tensor:
        """Return the logprobs f32[V] of the next token after ``tokens``, which the cache does not hold yet."""
        logits = self._model(torch.tensor([tokens], device=self._device), past_key_values=cache).logits[0, -1]
        return torch.log_softmax(logits.float() / temperature, -1).cpu()

    async def load(self, weights: WeightVersion) -> LoadReport:
        began = asyncio.get_running_loop().time()
        try:
            files = await asyncio.to_thread(weight_files.paths, Path(weights.uri))
            tensors = [await asyncio.to_thread(safetensors.torch.load_file, file) for file in files]
        except (OSError, safetensors.SafetensorError) as error:
            raise WeightsError(f"{weights.uri}: {error}") from error
        async with self._passing:
            paused = asyncio.get_running_loop().time()
            for one in tensors:
                self._model.load_state_dict(one, strict=False)
            self.version = weights.version
        now = asyncio.get_running_loop().time()
        return LoadReport(pause_seconds=now - paused, load_seconds=now - began)

    def stats(self) -> EngineStats:
        return EngineStats(running=self._running, tokens_generated=self._sampled, is_live=True)

    async def close(self) -> None:
        pass
