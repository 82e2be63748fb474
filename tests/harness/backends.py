"""Shared by the backend tests: sequences, tiny models, and a way to start every backend."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray

from asyncrl.backends import reference, weight_cuts
from asyncrl.backends.megatron import backend as megatron
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.models import AuxiliaryModel, with_policy
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.port import Backend
from asyncrl.config.layout import Layout
from asyncrl.messages.support import Support
from asyncrl.policies.algorithms.objective import ValueInputs
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, pack_for_ranks
from asyncrl.policies.corrections.diagnostics import Sums
from asyncrl.tensors.snapshot import PartWorker, Snapshot
from tests.harness import contract_adapters
from tests.harness.families import make_tiny_family

# Where flash-linear-attention is installed, transformers would run its CUDA kernels for models on the CPU as well.
transformers.utils.import_utils.is_flash_linear_attention_available = lambda: False

LAYOUTS = {
    "reference": Layout(),
    "megatron-1": Layout(),
    "megatron-2": Layout(ranks=2),
    "megatron-tp2": Layout(ranks=2, tensor=2, is_sequence_parallel=True),
    "megatron-4": Layout(ranks=4, tensor=2),
    "megatron-cp2": Layout(ranks=2, context=2),
    "megatron-cp4": Layout(ranks=4, context=4),
    "megatron-cp2-dp2": Layout(ranks=4, context=2),
    "megatron-cp2-tp2": Layout(ranks=4, context=2, tensor=2, is_sequence_parallel=True),
    "megatron-ep2": Layout(ranks=2, expert=2),
    "megatron-ep2-dp2": Layout(ranks=4, expert=2),
    "megatron-cp2-ep2": Layout(ranks=2, context=2, expert=2),
    "megatron-tp2-ep2": Layout(ranks=2, tensor=2, expert=2, is_sequence_parallel=True),
    "megatron-tp2-ep4": Layout(ranks=4, tensor=2, expert=4, is_sequence_parallel=True),
    "megatron-etp2": Layout(ranks=2, expert_tensor=2),
    "megatron-tp2-etp2": Layout(ranks=2, tensor=2, expert_tensor=2, is_sequence_parallel=True),
    "megatron-ep2-etp2": Layout(ranks=4, tensor=2, expert=2, expert_tensor=2, is_sequence_parallel=True),
    "megatron-pp2-ep2": Layout(ranks=4, pipeline=2, expert=2),
    "megatron-pp2": Layout(ranks=2, pipeline=2),
    "megatron-vpp2": Layout(ranks=2, pipeline=2, virtual_pipeline=2),
    "megatron-pp2-dp2": Layout(ranks=4, pipeline=2),
    "megatron-pp2-cp2": Layout(ranks=4, pipeline=2, context=2),
    "megatron-pp2-tp2": Layout(ranks=4, pipeline=2, tensor=2, is_sequence_parallel=True),
    "megatron-tp2-ep4-dp2": Layout(ranks=8, tensor=2, expert=4, is_sequence_parallel=True),
    "megatron-pp2-ep4": Layout(ranks=8, pipeline=2, expert=4),
}
KINDS = ("reference", *contract_adapters.extra("backend"), "megatron-1")
"""Backends of one process."""
RANKS = (pytest.mark.slow, pytest.mark.xdist_group("ranks"))
"""Marks of a test whose backend runs several processes. Their fork server imports for 10 s, once for all these
tests."""
KINDS_AND_RANKS = (*KINDS, pytest.param("megatron-2", marks=RANKS))
"""For promises that several ranks could break; the numbers of every layout are in test_layouts.py."""
VOCABULARY = 50
LEARNING_RATE = 2e-3

# An eps well above float32 noise. AdamW divides a gradient by its own magnitude. Where the true gradient is 0 (a key's
# bias: softmax does not depend on it), a smaller eps would turn rounding errors into full steps.
SETTINGS = OptimizerSettings(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5, max_grad_norm=0.5)


def num_ranks(kind: str) -> int:
    return LAYOUTS.get(kind, Layout()).ranks


def num_shares(kind: str) -> int:
    return LAYOUTS.get(kind, Layout()).data_parallel


def tiny_model(
    folder: Path,
    *,
    architecture: str = "qwen3",
    tied: bool = False,
    num_layers: int = 2,
    hidden_size: int = 64,
    initializer_range: float = 0.15,
    **sizes: Any,
) -> Path:
    """Write a model with logits far from uniform, biases and norms other than 0 and 1, and a nonzero pad embedding.

    transformers initializes the pad embedding to 0. There the gradient of RMSNorm is 1 / sqrt(eps), a thousand times
    larger than for other tokens.
    """
    make_tiny_family(
        folder,
        architecture=architecture,
        initializer_range=initializer_range,
        tie_word_embeddings=tied,
        num_layers=num_layers,
        hidden_size=hidden_size,
        **sizes,
    )
    model = hugging_face(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[0] = initializer_range * torch.randn(embedding.shape[1], generator=generator)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):  # gpt-oss has a bias for each expert
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def with_draft_layer(folder: Path, architecture: str, *, hidden_size: int = 64, **sizes: Any) -> Path:
    """Write a model of two layers and a draft layer: the third layer of a model of three, and what goes around it.

    The model of three is in ``folder`` / "three".  sizes: further arguments of tiny_model
    """
    three, layer = folder / "three", "model.layers.2."
    tiny_model(three, architecture=architecture, num_layers=3, hidden_size=hidden_size, **sizes)
    tensors = safetensors.torch.load_file(three / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = 1 + 0.3 * torch.randn(hidden_size, generator=generator)
    tensors[f"{layer}eh_proj.weight"] = 0.1 * torch.randn(hidden_size, 2 * hidden_size, generator=generator)
    made = shutil.copytree(three, folder / "drafting", ignore=shutil.ignore_patterns("*.safetensors"))
    safetensors.torch.save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((three / "config.json").read_text())
    settings |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    settings.pop("layer_types", None)
    (made / "config.json").write_text(json.dumps(settings))
    return made


def gradients_of_megatron(backend: Backend) -> dict[str, torch.Tensor]:
    """Return the gradients of a step of one rank by their Hugging Face names."""
    policy: Any = backend
    policy = policy._rank._loaded["policy"]
    found: dict[str, torch.Tensor] = {}
    for name, entry in policy._maps.items():
        if entry.is_router_bias:
            continue
        parts = weight_cuts.unfuse([policy._parameters[name].main_grad], entry.cut, policy._shape)
        found |= dict(zip(entry.huggingface, parts, strict=True))
    return found


def hugging_face(folder: Path) -> Any:
    """Load the published model, but train the pad token's embedding like any other."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.get_input_embeddings().padding_idx = None
    return model


@contextlib.contextmanager
def started(kind: str, folder: Path, **overrides: Any) -> Iterator[Backend]:
    """A started backend; closed on exit. options={...} are its Options."""
    options = overrides.pop("options", {})
    arguments: dict[str, Any] = {
        "algorithm": resolve(ALGORITHMS["grpo"]),
        "optimizer": SETTINGS,
        "temperature": 1.0,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
    } | overrides
    backend: Backend
    if kind == "reference":
        backend = reference.ReferenceBackend(folder, options=reference.Options(), **arguments)
    elif contract_adapters.is_extra(kind):
        adapter = contract_adapters.load(kind)
        backend = adapter(folder, options=adapter.options_type(), **arguments)
    else:
        made = megatron.Options(**({"timeout_seconds": 60.0} | options))
        policy = AuxiliaryModel(path=folder, objective=arguments.pop("algorithm"), optimizer=arguments.pop("optimizer"))
        models = with_policy(policy, arguments.pop("auxiliary", {}))
        backend = megatron.MegatronBackend(Job(models=models, options=made, layout=LAYOUTS[kind], **arguments))
    try:
        backend.start()
        yield backend
    finally:
        backend.close()


@dataclasses.dataclass(frozen=True)
class SquaredError:
    """A critic's objective without clipping: (value - return)^2 / 2. Its sums are the loss and the number of tokens."""

    needs_logits = False

    def objective(self, inputs: ValueInputs) -> tuple[torch.Tensor, Sums]:
        assert len(inputs.values), "an objective is never asked about no tokens"
        loss = ((inputs.values - inputs.returns).square() / 2 * inputs.loss_weights).sum()
        count = torch.ones_like(inputs.values).sum()
        return loss, Sums(sums=torch.stack([loss.detach(), count]).double(), maxima=loss.new_zeros(0).double())

    def zero(self, device: torch.device) -> Sums:
        zeros = torch.zeros(2, dtype=torch.float64, device=device)
        return Sums(sums=zeros, maxima=zeros[:0])

    def gradient_scale(self, totals: Sums) -> float | None:
        return None

    def learning_rate_share(self, totals: Sums) -> float:
        return 1.0

    def metrics(self, totals: Sums) -> Mapping[str, float]:
        loss, tokens = totals.sums.tolist()
        return {"critic/loss": loss, "critic/tokens": tokens}


def critic(path: Path) -> AuxiliaryModel:
    return AuxiliaryModel(path=path, head="values", objective=SquaredError(), optimizer=SETTINGS)


def sequence(length: int, *, seed: int, num_sequences: int = 8) -> TrainingSequence:
    """Return random tokens. The response is the second half; if it is long enough, it contains one observation
    token."""
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= max(1, length // 2)
    if length > 8:
        mask[-2] = False
    return TrainingSequence(
        tokens=random.integers(0, VOCABULARY, length).astype(np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, -3.0 + random.standard_normal(length), 0).astype(np.float32),
        advantages=np.where(mask, random.standard_normal(), 0).astype(np.float32),
        loss_weights=np.where(mask, 1 / (num_sequences * mask.sum()), 0).astype(np.float32),
        staleness=np.where(mask, seed % 3, 0).astype(np.int32),
    )


def sequences(seed: int = 0, lengths: Sequence[int] = (12, 30, 2, 17, 9, 23, 12, 5)) -> list[TrainingSequence]:
    return [sequence(length, seed=100 * seed + i, num_sequences=len(lengths)) for i, length in enumerate(lengths)]


def cut(batch: Sequence[TrainingSequence], *, seed: int = 0) -> list[TrainingSequence]:
    """Return sequences of which every second was sampled at a temperature of its own, from a few tokens each."""
    random = np.random.default_rng(seed)

    def supports(one: TrainingSequence) -> Support:
        others = [random.choice(VOCABULARY, random.integers(0, 6), replace=False) for _ in one.tokens]
        pairs = zip(one.tokens, others, one.response_mask, strict=True)
        return Support.of([np.union1d(rest, [token]).astype(np.int32) if is_in else [] for token, rest, is_in in pairs])

    return [
        dataclasses.replace(one, support=supports(one), temperature=0.5 + 0.25 * i) if i % 2 else one
        for i, one in enumerate(batch)
    ]


def shares(kind: str, batch: Sequence[TrainingSequence], *, max_tokens: int = 64) -> list[list[MicroBatch]]:
    return pack_for_ranks(batch, ranks=num_shares(kind), max_tokens=max_tokens)


def forward(backend: Backend, kind: str, micro_batch: MicroBatch, *, model: str = "policy") -> NDArray[np.float32]:
    """Return a model's outputs of one micro-batch. The micro-batch is the last share, so that another rank has it if
    possible."""
    return backend.forward([*[[]] * (num_shares(kind) - 1), [micro_batch]], model=model)[-1][0]


def with_returns(cut: Sequence[Sequence[MicroBatch]], returns: float | None = None) -> list[list[MicroBatch]]:
    """Add targets for a critic: the same number everywhere, or a different number for each token."""

    def outputs(micro_batch: MicroBatch) -> dict[str, NDArray[np.float32]]:
        own = np.sin(micro_batch.tokens).astype(np.float32)
        wanted = own if returns is None else np.full_like(own, returns)
        return {"old_values": np.zeros_like(own), "returns": wanted}

    return [[dataclasses.replace(one, model_outputs=outputs(one)) for one in share] for share in cut]


def learned(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step that describe the batch and the model, without those that describe the machine, and
    those that only the megatron backend has (test_load_balance.py)."""
    machine = ("learner/step_tokens_per_second", "learner/mfu", "learner/memory_bytes")
    of_megatron = ("learner/expert_load_max", "learner/experts_unused", "learner/aux_loss")
    return {name: value for name, value in metrics.items() if name not in (*machine, *of_megatron)}


def expected_logprobs(model: Any, tokens: NDArray[np.int32], *, temperature: float = 1.0) -> NDArray[np.float32]:
    """Return Hugging Face's logprobs of one sequence alone: log_softmax(logits / temperature); 0 for its first
    token."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        distribution = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)
    rest = distribution.gather(-1, ids[1:, None])[:, 0]
    return np.concatenate([[0.0], rest.numpy()]).astype(np.float32)


class PartBytes(PartWorker):
    """A part of the weights as the bytes of a safetensors file."""

    def __call__(self, snapshot: Snapshot, order: bytes) -> bytes:
        return safetensors.torch.save(dict(snapshot.tensors()))


def parts(exported: Snapshot) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of every rank's part, this rank's part first."""
    answers = exported.run_on_parts(PartBytes(), [b""] * (1 + len(exported.others)))
    return [safetensors.torch.load(answer) for answer in answers]


def weights(backend: Backend) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model. Checks that no tensor is in two parts."""
    found = parts(backend.export())
    whole = {name: tensor for part in found for name, tensor in part.items()}
    assert len(whole) == sum(map(len, found))
    return whole


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any weight. Both must have the same names."""
    assert first.keys() == second.keys()
    return max(float((first[name].detach().float() - second[name].detach().float()).abs().max()) for name in first)
