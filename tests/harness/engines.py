"""Two tiny models on disk and Hugging Face's results for them: the numbers that every engine must reproduce."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from asyncrl.engines.generation import Generation
from asyncrl.engines.inprocess import engine as inprocess
from asyncrl.messages import SamplingParams, WeightVersion
from tests.harness.families import make_tiny_family

PROMPT = np.array([5, 9, 12, 7, 30], dtype=np.int32)
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=20, ignore_eos=True)
TOLERANCE = 1e-4


class Model:
    """A random model in a folder, and the same model loaded by Hugging Face."""

    def __init__(
        self, folder: Path, *, seed: int, architecture: str = "qwen3", tie_word_embeddings: bool = False
    ) -> None:
        self.folder = make_tiny_family(
            folder,
            architecture=architecture,
            seed=seed,
            max_positions=4096,
            initializer_range=0.2,
            tie_word_embeddings=tie_word_embeddings,
        )
        self.network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.end_token = self.network.config.eos_token_id

    def text(self, tokens: NDArray[np.int32]) -> str:
        """Return the text, special tokens included."""
        return str(self.tokenizer.decode(tokens))

    def probability_of(
        self, ids: list[int], prompt: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return the total probability that the model gives to ``ids`` before each of ``tokens``, f32[T]."""
        with torch.no_grad():
            logits = self.network(_ids(prompt, tokens)).logits[0, len(prompt) - 1 : -1]
        found: NDArray[np.float32] = torch.softmax(logits, -1)[:, ids].sum(-1).numpy()
        return found

    def distribution(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], *, temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Return the probability of every token after the prompt and ``tokens``, f32[V]."""
        with torch.no_grad():
            logits = self.network(_ids(prompt, tokens)).logits[0, -1]
        found: NDArray[np.float32] = torch.softmax(logits / temperature, -1).numpy()
        return found

    def version(self, policy_version: int, *, incarnation: int = 0) -> WeightVersion:
        """Return the message that announces these weights as a policy version."""
        return announce(self.folder, policy_version, incarnation=incarnation)

    def logprobs(
        self, prompt: NDArray[np.int32], tokens: NDArray[np.int32], *, temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Return log_softmax(logits / temperature) of each of ``tokens`` after the prompt, f32[T]."""
        with torch.no_grad():
            logits = self.network(_ids(prompt, tokens)).logits[0, len(prompt) - 1 : -1]
        return _gather(logits / temperature, tokens)


def announce(folder: Path, policy_version: int, *, incarnation: int = 0) -> WeightVersion:
    data = (folder / "model.safetensors").read_bytes()
    return WeightVersion(
        incarnation=incarnation,
        policy_version=policy_version,
        uri=str(folder),
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
    )


def switched_logprobs(
    old: Model, new: Model, prompt: NDArray[np.int32], tokens: NDArray[np.int32], *, boundary: int
) -> NDArray[np.float32]:
    """Return logprobs of ``tokens[boundary:]`` when weights change in flight: new weights use the old weights' KV
    cache.

    Token ``boundary`` is the first that the new weights sampled; the token before it is their first input.
    """
    ids = _ids(prompt, tokens)
    first = len(prompt) + boundary - 1
    with torch.no_grad():
        cache = old.network(ids[:, :first], use_cache=True).past_key_values
        logits = new.network(ids[:, first:-1], past_key_values=cache).logits[0]
    return _gather(logits, tokens[boundary:])


@dataclass(frozen=True)
class Check:
    """Largest difference between a generation's logprobs and the model's."""

    model: Model
    temperature: float = 1.0

    def __call__(self, generation: Generation, prompt: NDArray[np.int32] = PROMPT) -> float:
        expected = self.model.logprobs(prompt, generation.tokens, temperature=self.temperature)
        return float(np.abs(expected - generation.logprobs).max())


def _ids(prompt: NDArray[np.int32], tokens: NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]


def _gather(logits: torch.Tensor, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    index = torch.from_numpy(tokens.astype(np.int64))[:, None]
    values: NDArray[np.float32] = torch.log_softmax(logits.float(), -1).gather(1, index)[:, 0].numpy()
    return values


async def start_inprocess(model: Model, *, max_batch_size: int = 64) -> inprocess.InProcessEngine:
    options = inprocess.Options(max_batch_size=max_batch_size, threads=1)
    made = inprocess.InProcessEngine(model.folder, device="cpu", dtype="float32", version=(0, 1), options=options)
    await made.start()
    return made


def chosen_experts(model: Model, prompt: NDArray[np.int32], tokens: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the experts that transformers selects for prompt and tokens, [P + T, layers, k], sorted.

    The value is 255 in layers without experts.
    """
    found: dict[int, torch.Tensor] = {}
    layers = model.network.model.layers
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs, i=i: found.__setitem__(i, inputs[1]))
        for i, layer in enumerate(layers)
        if hasattr(layer.mlp, "experts")
    ]
    with torch.no_grad():
        model.network(_ids(prompt, tokens))
    for hook in hooks:
        hook.remove()
    none = torch.full_like(next(iter(found.values())), 255)
    stacked = torch.stack([found.get(i, none) for i in range(len(layers))], 1)
    return stacked.sort(-1).values.to(torch.uint8).numpy()
