"""The memory that a rank of the learner needs, phase by phase: an estimate from the model's folder and the run file.

`asyncrl check` prints it and refuses what cannot fit, and an engine on the learner's GPU takes the rest. Bytes of state
are exact up to norms and padding. Constants of activations were fitted on an H200 (docs/results/performance.md, "One
GPU").
Test: tests/unit/backends/test_gpu_memory.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.backends.frozen import is_trained
from asyncrl.config.adapter import RunConfig
from asyncrl.config.layout import Layout
from asyncrl.config.learner import VISION_TOWER, LoraSection
from asyncrl.data.model_folder import decoder_config
from asyncrl.errors import ConfigError
from asyncrl.policies.batching import prefixes
from asyncrl.tensors.adapter_names import module_name
from asyncrl.tensors.model_tensors import read_shapes

_COPIES: Final = 3
"""Versions of adapters, or of everything with run.colocated, at most: the newest, the one being made, and an older one
still being written. Full training has one on the device, and the others on the host."""
_HOST_COPIES: Final = 2
"""Versions on the host, at most: one being written, and one that engines take."""
_CONTEXT_BYTES: Final = 5 * 2**30
"""CUDA context, NCCL's buffers, kernels' workspaces."""
_FRAGMENTED: Final = 1.1
"""What torch's allocator holds for each byte of activations."""
_HEAD_BYTES: Final = 2 * 2**30
"""Logits in float32, a chunk at a time."""
_LOGITS_BYTES: Final = 32
"""Of each logit, where a loss is over all of them: 24 for logits, their distribution and their gradients (counted on a
CPU, at their peak in the backward pass), and 8 for a loss such as a Kullback-Leibler divergence."""
_PATCHES_PER_TOKEN: Final = 1
"""Of images in a packed row, assumed: a quarter of its tokens stand for four patches each. There may be four times as
many."""
_RING_BYTES: Final = 3 * 2**30
"""Blocks for what an export does not copy on the device: 2 GiB for engines (weights/ring.py), and a tensor of up to
256 MiB for each of the four writers of folders (weights/files.py)."""
_PIECES_BYTES: Final = 2**30
"""Offloaded moments that are on the device during an update (megatron/stored_moments.py)."""
_SCALED_BYTES: Final = 2**29
"""Gradients in float32 on their way to an optimizer on the host, before and after scaling (megatron/host_update.py)."""
_BUFFER_BYTES: Final = 2 * (4 + 2)
"""On the host, of each number of the largest piece of an update there: two of gradients, and two of weights."""
_PIECE_NUMBERS: Final = 2**26
MOMENT_BYTES: Final = 8
"""AdamW's two moments of a parameter in float32."""
_COPIED_KEY_BYTES: Final = 12
"""Of each number of a key that sequences share, and of its value: both copies and their gradients in 16 bits, and one
gradient in float32."""
_CHOSEN_BYTES: Final = 4
"""Of the number of a key that sparse attention has chosen for a query."""
_FILLED: Final = 0.9
"""Of a GPU, by state, in a layout that is recommended: a row's passes need the rest."""
_MOST_RANKS: Final = 1024


ExportsTo = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Most bytes of one rank in a phase.  device: on its GPU.  host: besides, for a checkpoint (less, if less is free),
    versions, offloaded moments, and all that an optimizer on the host has"""

    name: str
    device: int
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Bytes of a rank that last. What is trained is of the policy and of a critic.

    weights    of the policy and its adapters
    gradients  of what is trained
    main       float32 copies of what is trained
    in_float32  copies of gradients, during an update, of those that are added up in 16 bits
    moments    of AdamW, in float32
    copy       one version of what an export copies
    others     weights of critic, reference and teacher
    saved      of a checkpoint
    largest    numbers of the largest weight that is trained, of each model
    """

    weights: float
    gradients: float
    main: float
    in_float32: float
    moments: float
    copy: float
    others: float
    saved: float
    largest: float

    @property
    def loaded(self) -> float:
        return self.weights + self.gradients + self.main + self.others

    @property
    def without_optimizer(self) -> _State:
        """What is on the device where the optimizer is on the host."""
        return dataclasses.replace(self, main=0.0, in_float32=0.0, moments=0.0)

    def with_critic(self, critic: _State) -> _State:
        """Add a critic, which nothing exports."""
        both = {
            name: getattr(self, name) + getattr(critic, name)
            for name in ("gradients", "main", "in_float32", "moments", "saved", "largest")
        }
        return dataclasses.replace(self, **both, others=self.others + critic.weights)


def phases(
    run: RunConfig,
    *,
    recomputes_all: bool,
    offloads_moments: bool = False,
    updates_on_host: bool = False,
    moment_bytes: int = MOMENT_BYTES,
    shares_prefixes: bool = False,
    needs_logits: bool = False,
    exports_to: ExportsTo = "device",
) -> tuple[Phase, ...]:
    """Return what a rank needs. Raises WeightsError.

    recomputes_all   only one activation per layer is kept
    updates_on_host  main weights and moments are on the host, and AdamW runs there
    moment_bytes     in which AdamW's moments of a parameter are kept between updates
    shares_prefixes  a layer copies keys and values of tokens that sequences share
    needs_logits     the loss is over the whole vocabulary
    exports_to       where a version of full training is copied
    """
    folder = Path(run.model.path)
    shapes = read_shapes(folder)
    state = _state(run, shapes, run.learner.layout)
    whole = json.loads((folder / "config.json").read_text())
    config = decoder_config(whole)
    passes, of_layer = _passes(run, config, recomputes_all=recomputes_all)
    passes += _passes_of_tower(run, whole, shapes) + _chosen_keys(run, config)
    of_layer += _copied_keys(run, config) if shares_prefixes else 0.0
    of_head = _logits(run, config) if needs_logits else _HEAD_BYTES
    passes += max(of_head, of_layer) if recomputes_all else of_head + of_layer  # a layer is recomputed after the head
    passes *= _FRAGMENTED
    held = state.without_optimizer if updates_on_host else state
    loaded = held.loaded + _CONTEXT_BYTES
    versions, host_versions = _versions(run, state, exports_to)
    kept = state.moments * moment_bytes / MOMENT_BYTES
    at_load, in_passes = (kept, 0.0) if offloads_moments or updates_on_host else (0.0, kept)
    in_update = in_passes + held.in_float32
    in_update += _pieces(held, offloads_moments=offloads_moments, moment_bytes=moment_bytes)
    moving = 0.0
    if updates_on_host:
        at_load += state.main + _BUFFER_BYTES * max(state.largest, _PIECE_NUMBERS)
        moving = max(0.0, state.main - state.gradients)  # until they are on the host, gradients have no memory
        in_update += _SCALED_BYTES
    host = at_load + host_versions
    saved = state.saved - (state.moments if not run.checkpoint.optimizer else state.moments - kept)
    return (
        Phase(name="load", device=int(loaded + moving), host=int(at_load)),
        Phase(name="step", device=int(loaded + versions + in_passes + passes), host=int(host)),
        Phase(name="update", device=int(loaded + versions + in_update), host=int(host)),
        Phase(name="checkpoint", device=int(loaded + versions + in_passes), host=int(host + saved)),
    )


def has_room_for_copy(run: RunConfig, *, total: int, **settings: Any) -> bool:
    """Return whether a rank with ``total`` bytes of a GPU can copy a version there. Raises WeightsError.

    settings  see phases
    """
    return max(phase.device for phase in phases(run, exports_to="device", **settings)) <= total


def describe_shortage(run: RunConfig, *, total: int, **settings: Any) -> str:
    """Return one line if the estimate of a phase with its activations exceeds ``total`` bytes; "" if all are below.

    settings  see phases
    """
    largest = max(phases(run, **settings), key=lambda phase: phase.device)
    if largest.device <= total:
        return ""
    recompute = "" if settings["recomputes_all"] else 'learner.options.recompute = "full" or '
    return (
        f"learner: in its {largest.name} a rank needs about {largest.device / 2**30:.0f} GiB, and its GPU has "
        f"{total / 2**30:.0f} GiB; if it runs out of memory, use {recompute}fewer learner.micro_batch_tokens"
    )


def learner_bytes(
    run: RunConfig,
    *,
    recomputes_all: bool,
    offloads_moments: bool = False,
    updates_on_host: bool = False,
    moment_bytes: int = MOMENT_BYTES,
    shares_prefixes: bool = False,
    needs_logits: bool = False,
    exports_to: ExportsTo = "device",
) -> int:
    """Return the peak bytes of one rank whose GPU an engine shares."""
    found = phases(
        run,
        recomputes_all=recomputes_all,
        offloads_moments=offloads_moments,
        updates_on_host=updates_on_host,
        moment_bytes=moment_bytes,
        shares_prefixes=shares_prefixes,
        needs_logits=needs_logits,
        exports_to=exports_to,
    )
    handed_over = 0.0  # an engine beside it maps a whole version
    if _is_kept(run) or (exports_to == "host" and not _copies_beside(run)):
        handed_over = _state(run, read_shapes(Path(run.model.path)), run.learner.layout).weights
    return int(max(phase.device for phase in found) + handed_over)


def refuse(
    run: RunConfig,
    *,
    total: int,
    offloads_moments: bool,
    updates_on_host: bool = False,
    moment_bytes: int = MOMENT_BYTES,
    exports_to: ExportsTo = "host",
) -> None:
    """Raise ConfigError if weights, optimizer and, unless it can be on the host, one version cannot be in ``total``
    bytes of a GPU, whatever the row.

    The error names the smallest layout that would fit.
    """
    shapes = read_shapes(Path(run.model.path))
    versions = 0 if exports_to == "host" and not _copies_beside(run) else 1
    state = _state(run, shapes, run.learner.layout)
    least = functools.partial(
        _least,
        offloads_moments=offloads_moments,
        updates_on_host=updates_on_host,
        moment_bytes=moment_bytes,
        versions=versions,
    )
    needed = least(state)
    if needed <= total:
        return
    remedies = [] if run.learner.lora.rank else ["learner.lora"]
    if versions and not _copies_beside(run) and needed - state.copy <= total:
        remedies.append('learner.options.exports = "host"')
    if not updates_on_host:
        if not offloads_moments and least(state, offloads_moments=True) <= total:
            remedies.append("learner.options.offload_optimizer = true")
        elif run.model.dtype == "bfloat16" and least(state, updates_on_host=True) <= total:
            remedies.append('learner.options.optimizer_device = "cpu"')
    has_experts = any(".experts." in name for name in shapes)
    key = "expert_parallel" if has_experts else "tensor_parallel"
    ranks = 2 * run.learner.ranks
    while ranks <= _MOST_RANKS:
        split = ranks if has_experts else min(ranks, 8)
        changes: dict[str, Any] = {"ranks": ranks, key: split}
        try:
            learner = dataclasses.replace(run.learner, **changes)
        except ConfigError:
            break
        if least(_state(run, shapes, learner.layout)) <= _FILLED * total:
            remedies.append(f"learner.ranks = {ranks} with {key} = {split}")
            break
        ranks *= 2
    what = "weights, optimizer and one version" if versions else "weights, gradients and optimizer"
    raise ConfigError(
        f"learner: a rank needs {needed / 2**30:.0f} GiB for {what} without any activation, and its GPU has "
        f"{total / 2**30:.0f} GiB; use {' or '.join(remedies) or 'a smaller model'}"
    )


def refuse_host(run: RunConfig, *, total: int, **settings: Any) -> None:
    """Raise ConfigError if a machine with ``total`` bytes cannot hold what its ranks keep on the host, without the
    copies for a checkpoint, which take what is free.

    settings  see phases
    """
    (needed,) = (phase.host for phase in phases(run, **settings) if phase.name == "update")
    ranks = run.learner.ranks // run.learner.machines
    if needed * ranks > total:
        raise ConfigError(
            f"learner: {ranks} ranks keep {needed * ranks / 2**30:.0f} GiB of optimizer and versions in host memory, "
            f"and this machine has {total / 2**30:.0f} GiB; use more learner.machines, or learner.lora"
        )


def _least(state: _State, *, offloads_moments: bool, updates_on_host: bool, moment_bytes: int, versions: int) -> float:
    if updates_on_host:
        held = state.without_optimizer
        return held.loaded + max(versions * state.copy + _SCALED_BYTES, state.main - state.gradients)
    kept = 0.0 if offloads_moments else state.moments * moment_bytes / MOMENT_BYTES
    pieces = _pieces(state, offloads_moments=offloads_moments, moment_bytes=moment_bytes)
    return state.loaded + state.in_float32 + versions * state.copy + kept + pieces


def _versions(run: RunConfig, state: _State, exports_to: ExportsTo) -> tuple[float, float]:
    """Return the bytes of versions on the device, with blocks for what passes through it, and on the host."""
    if _copies_beside(run):
        return _COPIES * state.copy + _is_kept(run) * _RING_BYTES, 0.0
    on_device = int(exports_to == "device")
    return on_device * state.copy + _RING_BYTES, (_HOST_COPIES - on_device) * state.copy


def _copies_beside(run: RunConfig) -> bool:
    """Whether all versions are on the device: the copies of adapters, and everything where models leave it in turns."""
    return bool(run.learner.lora.rank) or run.run.colocated


def _pieces(state: _State, *, offloads_moments: bool, moment_bytes: int) -> float:
    """Return the bytes of moments that an update brings to the device in float32, if they are kept otherwise."""
    is_in_pieces = offloads_moments or moment_bytes < MOMENT_BYTES
    return min(_PIECES_BYTES, state.moments) if is_in_pieces else 0.0


def _is_kept(run: RunConfig) -> bool:
    """Whether exports are of adapters merged into weights that are not copied."""
    return bool(run.learner.lora.rank) and run.learner.lora.publish == "merged" and not run.run.colocated


def _state(run: RunConfig, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> _State:
    policy = _state_of(run, shapes, layout, lora=run.learner.lora)
    policy = dataclasses.replace(policy, others=_frozen(run, shapes, layout))
    if (folder := _critic(run)) is None:
        return policy
    own = shapes if folder == Path(run.model.path) else read_shapes(folder)
    values = {name: shape for name, shape in own.items() if "lm_head" not in name}
    return policy.with_critic(_state_of(run, values, layout, lora=LoraSection(), is_whole=True))


def _critic(run: RunConfig) -> Path | None:
    """Return the folder of the critic; None without one. An algorithm of your own is known by its [critic]."""
    from asyncrl.policies.advantages.table import ADVANTAGES  # imports torch
    from asyncrl.policies.algorithms.table import ALGORITHMS

    spec, name = ALGORITHMS.get(run.algorithm.name), run.algorithm.advantage
    advantage = ADVANTAGES.get(name) if name else spec and spec.advantage
    if run.critic is None and not getattr(advantage, "learns_values", False):
        return None
    return Path(run.critic.path if run.critic and run.critic.path else run.model.path)


def _state_of(
    run: RunConfig,
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
    *,
    lora: LoraSection,
    is_whole: bool = False,
) -> _State:
    """Return the state of one trained model.  is_whole: nothing of it is frozen, as of a critic"""
    width = 2 if run.model.dtype == "bfloat16" else 4
    learner = run.learner
    main = 4 if width == 2 else 0
    has_small_gradients = width == 2 and learner.options.get("gradients_dtype") == "bfloat16"
    own = adapters = copied = gradients = mains = in_float32 = moments = saved = 0.0
    weights = dict[str, float]()
    for name, shape in shapes.items():
        numbers = math.prod(shape) * _share(name, shapes, layout)
        is_expert = ".experts." in name
        replicas = layout.ranks // (
            layout.pipeline * (layout.expert * layout.expert_tensor if is_expert else layout.tensor)
        )
        if not _shares_optimizer(run):
            replicas = 1
        own += numbers
        is_free = is_whole or is_trained(name, freeze=learner.frozen, train_only=learner.train_only)
        trained = numbers if is_free else 0.0
        if lora.rank:
            module = module_name(name)
            is_decoder = not re.match(VISION_TOWER, name)
            is_adapted = (
                is_decoder
                and len(shape) == 2
                and bool(module)
                and ("all-linear" in lora.modules or module in lora.modules)
            )
            trained = lora.rank * sum(shape) * _share(name, shapes, layout) if is_adapted else 0.0
            adapters += trained
        gradients += trained * (2 if has_small_gradients else 4)
        mains += trained * main / replicas
        layer, _, of_expert = name.partition(".experts.")  # the experts of a layer are two weights
        weight = f"{layer}.{'down' in of_expert}" if of_expert else name
        weights[weight] = weights.get(weight, 0.0) + trained
        in_float32 += trained * 4 / replicas if has_small_gradients else 0.0
        moments += trained * MOMENT_BYTES / replicas
        saved += (
            (0 if lora.rank else width * numbers) + trained * (width * bool(lora.rank) + main + MOMENT_BYTES)
        ) / replicas
        # A rank copies its share of what its stage's ranks export: trained, or gathered from them.
        is_gathered = (layout.expert_tensor if is_expert else layout.tensor) > 1 or run.run.colocated
        if lora.rank and lora.publish == "adapter":
            is_gathered = False
        of_stage = layout.expert * layout.expert_tensor if is_expert else layout.tensor
        copied += (numbers if is_gathered else trained) * of_stage / layout.exporters_of_stage
    return _State(
        weights=width * (own + adapters),
        gradients=gradients,
        main=mains,
        in_float32=in_float32,
        moments=moments,
        copy=width * copied,
        others=0.0,
        saved=saved,
        largest=max(weights.values(), default=0.0),
    )


def _frozen(run: RunConfig, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> float:
    """Return the bytes of reference and teacher."""
    reference, lora = run.reference, run.learner.lora
    others = [] if run.teacher is None else [run.teacher.path]
    if reference is not None and reference.kl_coef and not (lora.rank and reference.path in ("", run.model.path)):
        others.append(reference.path or run.model.path)
    numbers = 0.0
    for path in others:
        sizes = shapes if path == run.model.path else read_shapes(Path(path))
        numbers += sum(math.prod(size) * _share(name, sizes, layout) for name, size in sizes.items())
    return (2 if run.model.dtype == "bfloat16" else 4) * numbers


def _share(name: str, shapes: Mapping[str, tuple[int, ...]], layout: Layout) -> float:
    """Return the share of a tensor that one rank holds; of embedding and output layer, the largest of any stage."""
    if ".experts." in name:
        return 1 / (layout.expert * layout.expert_tensor * layout.pipeline)
    if ".layers." in name:
        return 1 / (layout.tensor * layout.pipeline)
    if re.match(VISION_TOWER, name):  # every rank of the first stage has all of it
        return 1.0
    is_second = layout.pipeline > 1 and "lm_head" in name and any("embed_tokens" in other for other in shapes)
    return 0.0 if is_second else 1 / layout.tensor  # the first stage has the embedding, the last one the output layer


def _shares_optimizer(run: RunConfig) -> bool:
    return bool(run.learner.options.get("distributed_optimizer", True))


def _passes(run: RunConfig, config: dict[str, Any], *, recomputes_all: bool) -> tuple[float, float]:
    """Return the bytes of activations that one packed row keeps, with the output layer's gradient, if it is trained;
    and those of a layer that is recomputed."""
    hidden, layers = config.get("hidden_size", 0), config.get("num_hidden_layers", 0)
    heads, head = _heads(config)
    attention = head * (heads + 2 * config.get("num_key_value_heads", heads))
    experts = config.get("num_experts_per_tok") or 1
    feed_forward = config.get("moe_intermediate_size") or config.get("intermediate_size", 4 * hidden)
    # A layer keeps the inputs of its norms and products, the attention's inputs and output, the gate and its product.
    of_layer = 2 * (6 * hidden + 3 * attention + 3.6 * experts * feed_forward)
    kept = 2 * hidden if recomputes_all else of_layer
    layout = run.learner.layout
    tokens = run.learner.micro_batch_tokens / (layout.tensor * layout.context)
    of_head = 0 if run.learner.lora.rank else 6 * config.get("vocab_size", 0) * hidden / layout.tensor
    return float(tokens * kept * layers / layout.pipeline + of_head), tokens * of_layer * recomputes_all


def _passes_of_tower(run: RunConfig, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Return the bytes of activations that a trained vision tower keeps, whatever is recomputed. Every rank of a row
    has all its images."""
    learner, tower = run.learner, config.get("vision_config")
    is_kept = not learner.lora.rank and any(
        re.match(VISION_TOWER, name) and is_trained(name, freeze=learner.frozen, train_only=learner.train_only)
        for name in shapes
    )
    if not tower or not is_kept:
        return 0.0
    # Counted on a CPU in Qwen2.5-VL's layers (RMSNorm in float32, gated) and in Qwen3-VL's (LayerNorm, not gated).
    of_hidden, of_feed_forward = (30, 8) if tower.get("hidden_act") == "silu" else (22, 4)
    of_layer = of_hidden * tower.get("hidden_size", 0) + of_feed_forward * tower.get("intermediate_size", 0)
    return float(_PATCHES_PER_TOKEN * learner.micro_batch_tokens * tower.get("depth", 0) * of_layer)


def _logits(run: RunConfig, config: dict[str, Any]) -> float:
    """Return the bytes of all logits of a row, which every rank of a copy of the model has."""
    return float(_LOGITS_BYTES * run.learner.micro_batch_tokens * config.get("vocab_size", 0))


def _copied_keys(run: RunConfig, config: dict[str, Any]) -> float:
    """Return the bytes of the copies of keys and values in one layer, at most."""
    heads, head = _heads(config)
    layout = run.learner.layout
    tokens = prefixes.MOST_COPIES * run.learner.micro_batch_tokens / layout.tensor
    return _COPIED_KEY_BYTES * tokens * head * int(config.get("num_key_value_heads", heads))


def _chosen_keys(run: RunConfig, config: dict[str, Any]) -> float:
    """Return the bytes of the choices of sparse attention: of one layer, and of those that later layers use."""
    most, layout = config.get("index_topk") or 0, run.learner.layout
    tokens = run.learner.micro_batch_tokens
    if not 0 < most < tokens:
        return 0.0
    kinds = config.get("indexer_types") or []
    shared = sum(pair == ("full", "shared") for pair in itertools.pairwise(kinds)) / layout.pipeline
    return float(_CHOSEN_BYTES * most * tokens / layout.context * (1 + shared))


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    """Return the number of query heads and the size of a head."""
    heads = int(config.get("num_attention_heads", 1))
    return heads, int(config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1))
