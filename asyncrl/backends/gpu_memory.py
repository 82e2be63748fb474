"""The memory that a rank of the learner needs, phase by phase: an estimate from the model's folder and the run file.

`asyncrl check` prints it and refuses what cannot fit, and an engine on the learner's GPU takes the rest. Bytes of state
are exact up to norms and padding. Constants of activations were fitted on an H200 (docs/results/performance.md, "One
GPU").
Test: tests/unit/backends/test_gpu_memory.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from asyncrl.backends.frozen import is_trained
from asyncrl.config.adapter import RunConfig
from asyncrl.config.layout import Layout
from asyncrl.config.learner import SMALLER_ROWS, VISION_TOWER, LearnerSection, LoraSection
from asyncrl.data.model_folder import context_of, decoder_config
from asyncrl.errors import ConfigError
from asyncrl.policies.batching import prefixes
from asyncrl.tensors import int4
from asyncrl.tensors.adapter_names import CUT_BY_INPUTS, module_name
from asyncrl.tensors.model_tensors import Shapes, read_shapes, trained_shapes

_COPIES: Final = 3
"""Versions of adapters that are merged later, or of everything with run.colocated, at most: the newest, the one being
made, and an older one still being written. Of other copies one is on the device, and the others on the host."""
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
_RANK: Final = 32
"""Of adapters that are recommended."""
_FILLED: Final = 0.95
"""Of a GPU in what is recommended, at most: peaks are estimated to a twentieth."""
_MOST_BESIDE: Final = 0.1
"""Of a GPU, for CUDA and blocks of exports, in a refusal: what is certain where nothing was measured."""
_MOST_RANKS: Final = 1024
_FIRST_STAGE: Final = "num_layers_in_first_pipeline_stage"
_LAST_STAGE: Final = "num_layers_in_last_pipeline_stage"
_REPLICATED: Final = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa|indexer|gate|router)\.")
"""Matrices of layers that every tensor-parallel rank has whole."""
_OF_MODEL: Final = (".embed_tokens.weight", ".shared_head.head.weight")
"""Of draft layers: copies of the model's own."""
_MOST_EXPERT_RANKS: Final = 32
"""Over which a recommended layout distributes experts: as many as published recipes for large mixtures."""


ExportsTo = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Most bytes of any rank in a phase.  device: on its GPU.  host: besides, for a checkpoint (less, if less is free),
    versions, offloaded moments, and all that an optimizer on the host has"""

    name: str
    device: int
    host: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Bytes of a rank of one stage that last. What is trained is of the policy and of a critic.

    weights    of the policy and its adapters
    gradients  of what is trained
    main       float32 copies of what is trained
    in_float32  copies of gradients, during an update, of those that are added up in 16 bits
    moments    of AdamW, in float32
    copy       one version of what an export copies
    kept       adapters of one version that is merged where it is sent, which are copied beside it
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
    kept: float
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a rank keeps, and where.

    recomputes_all    only one activation per layer is kept
    offloads_moments  AdamW's moments are on the host between updates
    updates_on_host   main weights and moments are on the host, and AdamW runs there
    moment_bytes      in which AdamW's moments of a parameter are kept between updates
    shares_prefixes   a layer copies keys and values of tokens that sequences share
    needs_logits      the loss is over the whole vocabulary
    exports_to        where a version of full training is copied
    """

    recomputes_all: bool
    offloads_moments: bool = False
    updates_on_host: bool = False
    moment_bytes: int = MOMENT_BYTES
    shares_prefixes: bool = False
    needs_logits: bool = False
    exports_to: ExportsTo = "device"


def phases(run: RunConfig, plan: MemoryPlan) -> tuple[Phase, ...]:
    """Return what the rank needs that needs most. Raises WeightsError."""
    shapes = _read_policy(run)
    return _most_of_stages(run, plan, shapes, _models(run, shapes))


def _most_of_stages(run: RunConfig, plan: MemoryPlan, shapes: Shapes, models: _Models) -> tuple[Phase, ...]:
    states = _states(run, models, run.learner)
    of_stages = [_phases(run, plan, state, _passes(run, plan, shapes, stage)) for stage, state in enumerate(states)]
    return tuple(
        Phase(name=same[0].name, device=max(one.device for one in same), host=max(one.host for one in same))
        for same in zip(*of_stages, strict=True)
    )


def _phases(run: RunConfig, plan: MemoryPlan, state: _State, passes: float) -> tuple[Phase, ...]:
    """Return what a rank of one stage needs.  passes: bytes of activations"""
    held = state.without_optimizer if plan.updates_on_host else state
    loaded = held.loaded + _CONTEXT_BYTES
    versions, host_versions = _versions(run, state, plan.exports_to)
    kept = state.moments * plan.moment_bytes / MOMENT_BYTES
    at_load, in_passes = (kept, 0.0) if plan.offloads_moments or plan.updates_on_host else (0.0, kept)
    in_update = in_passes + held.in_float32 + _pieces(held, plan)
    moving = 0.0
    if plan.updates_on_host:
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


def describe_shortage(run: RunConfig, plan: MemoryPlan, *, total: int) -> str:
    """Return one line if the estimate of a phase with its activations exceeds ``total`` bytes; "" if all are below."""
    shapes = _read_policy(run)
    models = _models(run, shapes)
    found = _most_of_stages(run, plan, shapes, models)
    largest = max(found, key=lambda phase: phase.device)
    if largest.device <= total:
        return ""
    longest = "max_context_tokens" if run.rollout.max_context_tokens else "max_new_tokens"
    remedy = f"fewer learner.micro_batch_tokens and rollout.{longest}"
    if (at_rest := max(phase.device for phase in found if phase.name != "step")) > total:
        remedy = f"more learner.ranks that share the model, as {at_rest / 2**30:.0f} GiB are without activations"
    fits = (
        words
        for words, smaller, its in _smaller_passes(run, plan)
        if max(phase.device for phase in _most_of_stages(smaller, its, shapes, models)) <= total
    )
    return (
        f"learner: in its {largest.name} a rank needs about {largest.device / 2**30:.0f} GiB, and its GPU has "
        f"{total / 2**30:.0f} GiB; if it runs out of memory, use {next(fits, remedy)}"
    )


def _smaller_passes(run: RunConfig, plan: MemoryPlan) -> Iterator[tuple[str, RunConfig, MemoryPlan]]:
    """Yield passes that need less memory, the fastest first, after the run's own: in words, the run, and its plan."""
    words = f"learner.micro_batch_tokens = {SMALLER_ROWS}", 'learner.options.recompute = "full"'
    rows = min(SMALLER_ROWS, run.learner.micro_batch_tokens)
    smaller = dataclasses.replace(run, learner=dataclasses.replace(run.learner, micro_batch_tokens=rows))
    recomputed = dataclasses.replace(plan, recomputes_all=True)
    yield "", run, plan
    yield words[0], smaller, plan
    yield words[1], run, recomputed
    yield " and ".join(words), smaller, recomputed


def learner_bytes(run: RunConfig, plan: MemoryPlan) -> int:
    """Return the peak bytes of one rank whose GPU an engine shares."""
    handed_over = 0.0  # an engine beside it maps a whole version
    if _is_kept(run) or (plan.exports_to == "host" and not run.learner.lora.rank and not run.run.colocated):
        models = _models(run, _read_policy(run))
        handed_over = max(state.weights for state in _states(run, models, run.learner))
    return int(max(phase.device for phase in phases(run, plan)) + handed_over)


def refuse(
    run: RunConfig,
    plan: MemoryPlan,
    *,
    total: int,
    is_possible: Callable[[LearnerSection], bool] = lambda learner: True,
) -> None:
    """Raise ConfigError if weights, optimizer and, unless it can be on the host, one version cannot be in ``total``
    bytes of a GPU beside what CUDA takes there, whatever the row.

    The error names what would fit, of layouts the smallest.

    is_possible  whether the model can be trained so
    """
    folder = Path(run.model.path)
    shapes = _read_policy(run)
    models = _models(run, shapes)
    versions = 0 if plan.exports_to == "host" and not run.run.colocated else 1
    # Less of a small GPU, where the same buffers were not seen.
    beside = min(_CONTEXT_BYTES + _ring_bytes(run), _MOST_BESIDE * total)

    def least(learner: LearnerSection) -> float:
        return beside + max(_least(state, plan, versions=versions) for state in _states(run, models, learner))

    def remedy(words: str, learner: LearnerSection = run.learner, **changes: Any) -> list[str]:
        """Return the words, with smaller passes where it needs them to fit; nothing where it does not fit."""
        changed = dataclasses.replace(run, learner=learner)
        its = models if learner.lora == run.learner.lora else _models(changed, shapes)
        for passes, smaller, found in _smaller_passes(changed, dataclasses.replace(plan, **changes)):
            if max(phase.device for phase in _most_of_stages(smaller, found, shapes, its)) <= _FILLED * total:
                return [words + (f" (with {passes})" if passes else "")]
        return []

    needed = least(run.learner)
    if needed <= total:
        return
    remedies = []
    if not run.learner.lora.rank:
        lora = dataclasses.replace(run.learner.lora, rank=_RANK)
        learner = dataclasses.replace(run.learner, lora=lora, freeze=(), train_only=())
        is_part = run.learner.freeze or run.learner.train_only
        remedies += remedy("learner.lora" + (" without freeze and train_only" if is_part else ""), learner)
    if versions and not run.run.colocated:
        remedies += remedy('learner.options.exports = "host"', exports_to="host")
    if not plan.updates_on_host:
        found = []
        if not plan.offloads_moments:
            found = remedy("learner.options.offload_optimizer = true", offloads_moments=True)
        if not found and run.model.dtype == "bfloat16":
            instead = " in place of offload_optimizer" if plan.offloads_moments else ""
            found = remedy(f'learner.options.optimizer_device = "cpu"{instead}', updates_on_host=True)
        remedies += found
    layers = decoder_config(json.loads((folder / "config.json").read_text())).get("num_hidden_layers", 1)
    # Nothing is divided by more than all ranks.
    fewest = least(LearnerSection(lora=run.learner.lora)) / total
    for learner in _layouts(run.learner, fewest=int(fewest), layers=layers, experts=_num_experts(shapes)):
        if (found := remedy(_describe_layout(learner, run.learner), learner)) and is_possible(learner):
            remedies += found
            break
    what = "weights, optimizer, one version and CUDA" if versions else "weights, gradients, optimizer and CUDA"
    raise ConfigError(
        f"learner: a rank needs {needed / 2**30:.0f} GiB for {what} without any activation, and its GPU has "
        f"{total / 2**30:.0f} GiB; use {' or '.join(remedies) or 'a smaller model or fewer rollout.max_new_tokens'}"
    )


def _layouts(learner: LearnerSection, *, fewest: int, layers: int, experts: int) -> Iterator[LearnerSection]:
    """Yield layouts, the fewest ranks first, and of these those with the fewest stages."""
    ranks = learner.ranks
    while ranks < fewest:
        ranks *= 2
    while ranks <= _MOST_RANKS:
        for pipeline, tensor in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
            if ranks % (pipeline * tensor) or pipeline > layers:
                continue
            changes: dict[str, Any] = {"ranks": ranks, "pipeline_parallel": pipeline, "tensor_parallel": tensor}
            changes["expert_parallel"] = _expert_parallel(ranks // pipeline, experts)
            changes["expert_tensor_parallel"], changes["virtual_pipeline"] = 1, 1
            changes["megatron"] = {name: its for name, its in learner.megatron.items() if name != _LAST_STAGE}
            if layers % pipeline:
                last = layers - (pipeline - 1) * math.ceil(layers / pipeline)
                changes["megatron"][_LAST_STAGE] = last
                if last < 1:
                    continue
            try:
                yield dataclasses.replace(learner, **changes)
            except ConfigError:
                continue
        ranks *= 2


def _expert_parallel(ranks: int, experts: int) -> int:
    """Return the most ranks that divide both, up to _MOST_EXPERT_RANKS."""
    both = math.gcd(ranks, experts) if experts else 1
    return max(size for size in range(1, min(both, _MOST_EXPERT_RANKS) + 1) if both % size == 0)


def _num_experts(shapes: Shapes) -> int:
    """Return the experts of a layer: tensors of their own, or all in one of three dimensions."""
    of_experts = {name: shape for name, shape in shapes.items() if ".experts." in name}
    numbers = {found[1] for name in of_experts if (found := re.search(r"\.experts\.(\d+)\.", name))}
    return max(len(numbers), *(shape[0] for shape in of_experts.values() if len(shape) == 3), 0)


def _describe_layout(learner: LearnerSection, before: LearnerSection) -> str:
    keys = ("tensor", "pipeline", "expert", "expert_tensor")
    sizes = {f"{key}_parallel": getattr(learner, f"{key}_parallel") for key in keys}
    said = [f"{key} = {size}" for key, size in sizes.items() if size > 1 or size != getattr(before, key)]
    if learner.virtual_pipeline != before.virtual_pipeline:
        said.append(f"virtual_pipeline = {learner.virtual_pipeline}")
    if learner.megatron != before.megatron:
        last = learner.megatron.get(_LAST_STAGE)
        said.append(f"megatron.{_LAST_STAGE} = {last}" if last else f"without megatron.{_LAST_STAGE}")
    return f"learner.ranks = {learner.ranks}" + (f" with {', '.join(said)}" if said else "")


def refuse_host(run: RunConfig, plan: MemoryPlan, *, total: int) -> None:
    """Raise ConfigError if a machine with ``total`` bytes cannot hold what its ranks keep on the host, without the
    copies for a checkpoint, which take what is free."""
    (needed,) = (phase.host for phase in phases(run, plan) if phase.name == "update")
    ranks = run.learner.ranks // run.learner.machines
    if needed * ranks > total:
        raise ConfigError(
            f"learner: {ranks} ranks keep {needed * ranks / 2**30:.0f} GiB of optimizer and versions in host memory, "
            f"and this machine has {total / 2**30:.0f} GiB; use more learner.machines, or learner.lora"
        )


def _least(state: _State, plan: MemoryPlan, *, versions: int) -> float:
    if plan.updates_on_host:
        held = state.without_optimizer
        return held.loaded + max(versions * state.copy + state.kept + _SCALED_BYTES, state.main - state.gradients)
    moments = 0.0 if plan.offloads_moments else state.moments * plan.moment_bytes / MOMENT_BYTES
    return state.loaded + state.in_float32 + versions * state.copy + state.kept + moments + _pieces(state, plan)


def _versions(run: RunConfig, state: _State, exports_to: ExportsTo) -> tuple[float, float]:
    """Return the bytes of versions on the device, with blocks for what passes through it, and on the host."""
    if run.run.colocated:
        return _COPIES * state.copy, 0.0
    on_device = int(exports_to == "device")
    return on_device * state.copy + _COPIES * state.kept + _ring_bytes(run), (_HOST_COPIES - on_device) * state.copy


def _ring_bytes(run: RunConfig) -> int:
    is_copied_whole = run.run.colocated or (run.learner.lora.rank and not _is_kept(run))
    return 0 if is_copied_whole else _RING_BYTES


def _pieces(state: _State, plan: MemoryPlan) -> float:
    """Return the bytes of moments that an update brings to the device in float32, if they are kept otherwise."""
    is_in_pieces = plan.offloads_moments or plan.moment_bytes < MOMENT_BYTES
    return min(_PIECES_BYTES, state.moments) if is_in_pieces else 0.0


def _is_kept(run: RunConfig) -> bool:
    """Whether exports are of adapters merged into weights that are not copied."""
    return bool(run.learner.lora.rank) and run.learner.lora.publish == "merged" and not _copies_all(run)


def _copies_all(run: RunConfig) -> bool:
    """Whether a version is a copy of frozen weights, too."""
    return run.run.colocated or bool(run.weights.quantization)


def _version_bytes(run: RunConfig, kind: _Divided, *, width: int) -> float:
    """Return the bytes of a number in a version, up to scales.  width: of one that is not quantized"""
    quantization = run.weights.quantization
    if quantization in int4.GROUPS:
        return 0.5 + 2 / int4.GROUPS[quantization] if kind == "experts" else width
    return 1 if quantization and kind in ("experts", "layers", "replicated") else width


@dataclass(slots=True, kw_only=True)
class _Numbers:
    """Numbers of a model's tensors that a layout divides alike.  largest: of a weight that is trained"""

    whole: float = 0.0
    trained: float = 0.0
    largest: float = 0.0

    def add(self, other: _Numbers) -> None:
        self.whole += other.whole
        self.trained += other.trained
        self.largest = max(self.largest, other.largest)


_Divided = Literal["experts", "layers", "replicated", "ends", "tower", "second end"]
_OUTSIDE: Final = -1
_Sizes = Mapping[tuple[_Divided, int], _Numbers]
"""By kind and number of the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """Sizes of the run's models, whatever the layout.  frozen: of reference and teacher"""

    policy: _Sizes
    critic: _Sizes | None
    frozen: Sequence[_Sizes]


def _read(folder: Path) -> Shapes:
    """Return the shapes of the tensors that a learner loads. Raises WeightsError."""
    return trained_shapes(read_shapes(folder), decoder_config(json.loads((folder / "config.json").read_text())))


def _read_policy(run: RunConfig) -> Shapes:
    """Return the shapes of the policy's tensors, those of draft layers that are trained as a part of the last layer."""
    folder = Path(run.model.path)
    shapes = _read(folder)
    if not run.learner.options.get("draft_coefficient"):
        return shapes
    layers = decoder_config(json.loads((folder / "config.json").read_text()))["num_hidden_layers"]
    drafts = {name: shape for name, shape in read_shapes(folder).items() if name not in shapes}
    own = {name: shape for name, shape in drafts.items() if not name.endswith(_OF_MODEL)}
    return {**shapes, **{f"model.layers.{layers - 1}.{name}": shape for name, shape in own.items()}}


def _models(run: RunConfig, shapes: Shapes) -> _Models:
    critic = None
    if (folder := _critic(run)) is not None:
        values = {name: (0,) if "lm_head" in name else shape for name, shape in _read(folder).items()}
        critic = _sizes(run, values, lora=LoraSection(), is_whole=True)
    return _Models(policy=_sizes(run, shapes, lora=run.learner.lora), critic=critic, frozen=_frozen(run))


def _states(run: RunConfig, models: _Models, learner: LearnerSection) -> list[_State]:
    """Return the state of a rank of each stage in that layout."""
    layout = learner.layout
    width = 2 if run.model.dtype == "bfloat16" else 4
    critics = _by_stage(models.critic, learner) if models.critic is not None else None
    frozen = [_by_stage(sizes, learner) for sizes in models.frozen]
    found = []
    for stage, sizes in enumerate(_by_stage(models.policy, learner)):
        others = width * sum(of.whole / _parts(kind, layout) for model in frozen for kind, of in model[stage].items())
        state = _state_of(run, sizes, layout, lora=learner.lora, is_exported=True)
        state = dataclasses.replace(state, others=others)
        if critics is not None:
            state = state.with_critic(_state_of(run, critics[stage], layout, lora=LoraSection(), is_exported=False))
        found.append(state)
    return found


def _by_stage(sizes: _Sizes, learner: LearnerSection) -> list[dict[_Divided, _Numbers]]:
    """Return the sizes of each stage. A last stage has its own copy of an embedding that is its output layer, too."""
    stages = _stages(learner, 1 + max(layer for _, layer in sizes))
    last = learner.layout.pipeline - 1
    ends = {0} if ("second end", _OUTSIDE) in sizes else {0, last}
    found: list[dict[_Divided, _Numbers]] = [{} for _ in range(last + 1)]
    for (kind, layer), numbers in sizes.items():
        outside = ends if kind == "ends" else {last if kind == "second end" else 0}
        for stage in outside if layer == _OUTSIDE else {stages[layer]}:
            found[stage].setdefault(kind, _Numbers()).add(numbers)
    return found


def _stages(learner: LearnerSection, layers: int) -> list[int]:
    """Return the stage of each layer."""
    stages, chunks = learner.layout.pipeline, learner.layout.virtual_pipeline
    said = {0: learner.megatron.get(_FIRST_STAGE), stages - 1: learner.megatron.get(_LAST_STAGE)}
    known = {stage: int(count) for stage, count in said.items() if count}
    others = math.ceil((layers - sum(known.values())) / max(1, stages - len(known)))
    one_round = [stage for stage in range(stages) for _ in range(math.ceil(known.get(stage, others) / chunks))]
    return (one_round * chunks + [stages - 1] * layers)[:layers]


def _critic(run: RunConfig) -> Path | None:
    """Return the folder of the critic; None without one. An algorithm of your own is known by its [critic]."""
    from asyncrl.policies.advantages.table import ADVANTAGES  # imports torch
    from asyncrl.policies.algorithms.table import ALGORITHMS

    spec, name = ALGORITHMS.get(run.algorithm.name), run.algorithm.advantage
    advantage = ADVANTAGES.get(name) if name else spec and spec.advantage
    if run.critic is None and not getattr(advantage, "learns_values", False):
        return None
    return Path(run.critic.path if run.critic and run.critic.path else run.model.path)


def _sizes(run: RunConfig, shapes: Shapes, *, lora: LoraSection, is_whole: bool = False) -> _Sizes:
    """Return the sizes of a model that is trained.  is_whole: nothing of it is frozen, as of a critic"""
    found, learner = dict[tuple[_Divided, int], _Numbers](), run.learner
    weights = dict[tuple[_Divided, int, str], float]()
    has_embedding = any("embed_tokens" in name for name in shapes)
    for (name, shape), count in _alike(shapes).items():
        kind = _kind(name, has_embedding=has_embedding)
        number = int(of_layer[1]) if (of_layer := re.search(r"\.layers\.(\d+)\.", name)) else _OUTSIDE
        numbers = math.prod(shape)
        found.setdefault((kind, number), _Numbers()).whole += count * numbers
        is_free = is_whole or is_trained(name, freeze=learner.frozen, train_only=learner.train_only)
        trained: Mapping[_Divided, float] = {kind: float(numbers * is_free)}
        if lora.rank:
            module = module_name(name)
            is_adapted = bool(module) and ("all-linear" in lora.modules or module in lora.modules)
            is_adapted = is_adapted and kind != "tower" and len(shape) == 2
            trained = _of_adapter(kind, shape, module, lora.rank) if is_adapted else {}
        layer, _, of_expert = name.partition(".experts.")  # the experts of a layer are two weights
        for part, of_one in trained.items():
            its = count * of_one
            found.setdefault((part, number), _Numbers()).trained += its
            weight = (part, number, f"{layer}.{'down' in of_expert}" if of_expert else name)
            weights[weight] = weights.get(weight, 0.0) + its
    for (kind, number, _), numbers_trained in weights.items():
        of_kind = found[kind, number]
        of_kind.largest = max(of_kind.largest, numbers_trained)
    return found


def _alike(shapes: Shapes) -> Mapping[tuple[str, tuple[int, ...]], int]:
    """Return the number of tensors by name and shape; those of a layer's experts, which all train or none, as tensors
    of its first: there may be tens of thousands."""
    found = Counter[tuple[str, tuple[int, ...]]]()
    for name, shape in shapes.items():
        layer, _, of_expert = name.partition(".experts.")
        number, _, rest = of_expert.partition(".")
        found[f"{layer}.experts.0.{rest}" if number.isdecimal() else name, shape] += 1
    return found


def _of_adapter(kind: _Divided, shape: tuple[int, ...], module: str, rank: int) -> Mapping[_Divided, float]:
    """Return the numbers of an adapter: [rank, in] and [out, rank], one of which tensor-parallel ranks divide."""
    outputs, inputs = shape
    cut, whole = (inputs, outputs) if module in CUT_BY_INPUTS else (outputs, inputs)
    if kind != "layers":
        return {kind: float(rank * (cut + whole))}
    return {kind: float(rank * cut), "replicated": float(rank * whole)}


def _state_of(
    run: RunConfig, sizes: Mapping[_Divided, _Numbers], layout: Layout, *, lora: LoraSection, is_exported: bool
) -> _State:
    """Return the state of one trained model on a stage."""
    width = 2 if run.model.dtype == "bfloat16" else 4
    main = 4 if width == 2 else 0
    has_small_gradients = width == 2 and run.learner.options.get("gradients_dtype") == "bfloat16"
    own = adapters = copied = kept = gradients = mains = in_float32 = moments = saved = largest = 0.0
    for kind, of_kind in sizes.items():
        is_expert, parts = kind == "experts", _parts(kind, layout)
        numbers, trained = of_kind.whole / parts, of_kind.trained / parts
        replicas = layout.ranks // (
            layout.pipeline * (layout.expert * layout.expert_tensor if is_expert else layout.tensor)
        )
        if not _shares_optimizer(run):
            replicas = 1
        own += numbers
        adapters += trained * bool(lora.rank)
        gradients += trained * (2 if has_small_gradients else 4)
        mains += trained * main / replicas
        largest = max(largest, of_kind.largest / parts)
        in_float32 += trained * 4 / replicas if has_small_gradients else 0.0
        moments += trained * MOMENT_BYTES / replicas
        saved += (
            (0 if lora.rank else width * numbers) + trained * (width * bool(lora.rank) + main + MOMENT_BYTES)
        ) / replicas
        # A rank copies its share of what its stage's ranks export: trained, or gathered from them.
        is_gathered = (layout.expert_tensor if is_expert else parts) > 1 or _copies_all(run)
        exported = parts / layout.exporters_of_stage
        if lora.rank and lora.publish == "merged" and not is_gathered:
            kept += trained * exported
        else:
            is_whole = is_gathered and not (lora.rank and lora.publish == "adapter")
            held = (numbers if is_whole else trained) * is_exported
            copied += _version_bytes(run, kind, width=width) * held * exported
    return _State(
        weights=width * (own + adapters),
        gradients=gradients,
        main=mains,
        in_float32=in_float32,
        moments=moments,
        copy=copied,
        kept=width * kept,
        others=0.0,
        saved=saved,
        largest=largest,
    )


def _frozen(run: RunConfig) -> Sequence[_Sizes]:
    """Return the sizes of reference and teacher that are loaded. One that is the policy without its adapters is not."""
    reference, teacher, base = run.reference, run.teacher, Path(run.model.path)
    paths = dict[str, Path]()
    if reference is not None and reference.kl_coef:
        paths["reference.path"] = Path(reference.path or base)
    if teacher is not None and not teacher.is_served:
        paths["teacher.path"] = Path(teacher.path)
    without_adapters = {key for key, path in paths.items() if path == base and key not in run.own_megatron}
    if reference is not None and reference.refresh_steps:
        without_adapters.discard("reference.path")
    others = [path for key, path in paths.items() if not (run.learner.lora.rank and key in without_adapters)]
    return [_sizes(run, _read(path), lora=LoraSection()) for path in others]


def _kind(name: str, *, has_embedding: bool) -> _Divided:
    if ".experts." in name:
        return "experts"
    if ".layers." in name:
        return "replicated" if _REPLICATED.search(name) else "layers"
    if re.match(VISION_TOWER, name):
        return "tower"
    return "second end" if "lm_head" in name and has_embedding else "ends"


def _parts(kind: _Divided, layout: Layout) -> int:
    """Return over how many ranks of a stage a tensor is divided."""
    if kind == "experts":
        return layout.expert * layout.expert_tensor
    return 1 if kind in ("replicated", "tower") else layout.tensor


def _shares_optimizer(run: RunConfig) -> bool:
    return bool(run.learner.options.get("distributed_optimizer", True))


def _passes(run: RunConfig, plan: MemoryPlan, shapes: Shapes, stage: int) -> float:
    """Return the bytes of a stage's activations, with the output layer's gradient, if it is trained."""
    whole = json.loads((Path(run.model.path) / "config.json").read_text())
    config, layout, recomputes_all = decoder_config(whole), run.learner.layout, plan.recomputes_all
    hidden, layers = config.get("hidden_size", 0), config.get("num_hidden_layers", 0)
    heads, head = _heads(config)
    attention = head * (heads + 2 * config.get("num_key_value_heads", heads))
    of_expert = config.get("moe_intermediate_size") or config.get("intermediate_size", 4 * hidden)
    shared = config.get("shared_expert_intermediate_size") or of_expert * (config.get("n_shared_experts") or 0)
    feed_forward = of_expert * (config.get("num_experts_per_tok") or 1) + shared
    # A layer keeps the inputs of its norms and products, the attention's inputs and output, the gate and its product.
    of_token = 2 * hidden if recomputes_all else 2 * (3 * hidden + 3.7 * attention + 3 * feed_forward)
    tokens, rows = _row_tokens(run, config) / (layout.tensor * layout.context), _rows_in_flight(layout, stage)
    kept = tokens * of_token * _stages(run.learner, layers).count(stage) * rows + _chosen_keys(run, config)
    kept += _passes_of_tower(run, whole, shapes) * rows if stage == 0 else 0.0
    # While a layer is differentiated:
    of_layer = tokens * 2 * (6 * hidden + 3 * attention + 3.6 * feed_forward) * recomputes_all
    of_layer += _copied_keys(run, config) if plan.shares_prefixes else 0.0
    of_head = 0.0
    if stage == layout.pipeline - 1:
        of_head = _logits(run, config) if plan.needs_logits else float(_HEAD_BYTES)
        kept += 0 if run.learner.lora.rank else 6 * config.get("vocab_size", 0) * hidden / layout.tensor
    # A layer is recomputed after the head.
    return float(_FRAGMENTED * (kept + (max(of_head, of_layer) if recomputes_all else of_head + of_layer)))


def _row_tokens(run: RunConfig, config: Mapping[str, Any]) -> int:
    """Return the tokens of the largest micro-batch: a trajectory that is longer than the others' has its own."""
    return max(run.learner.micro_batch_tokens, min(run.most_trajectory_tokens, context_of(config)))


def _rows_in_flight(layout: Layout, stage: int) -> float:
    """Return of how many rows a stage keeps activations, where a batch has enough of them: in Megatron's schedules
    (arXiv:2104.04473) a stage begins a row for itself and each stage after it before its first backward pass."""
    after, chunks = layout.pipeline - 1 - stage, layout.virtual_pipeline
    if chunks == 1:
        return 1.0 + after
    return (1 + 2 * after + (chunks - 1) * layout.pipeline) / chunks


def _passes_of_tower(run: RunConfig, config: dict[str, Any], shapes: Shapes) -> float:
    """Return the bytes of activations that a trained vision tower keeps, whatever is recomputed. Every rank of a row
    has all its images."""
    learner, tower = run.learner, config.get("vision_config")
    if not tower or learner.lora.rank:
        return 0.0
    if not any(
        re.match(VISION_TOWER, name) and is_trained(name, freeze=learner.frozen, train_only=learner.train_only)
        for name in shapes
    ):
        return 0.0
    # Counted on a CPU in Qwen2.5-VL's layers (RMSNorm in float32, gated) and in Qwen3-VL's (LayerNorm, not gated).
    of_hidden, of_feed_forward = (30, 8) if tower.get("hidden_act") == "silu" else (22, 4)
    of_layer = of_hidden * tower.get("hidden_size", 0) + of_feed_forward * tower.get("intermediate_size", 0)
    return float(_PATCHES_PER_TOKEN * _row_tokens(run, decoder_config(config)) * tower.get("depth", 0) * of_layer)


def _logits(run: RunConfig, config: dict[str, Any]) -> float:
    """Return the bytes of all logits of a row, which every rank of a copy of the model has."""
    return float(_LOGITS_BYTES * _row_tokens(run, config) * config.get("vocab_size", 0))


def _copied_keys(run: RunConfig, config: dict[str, Any]) -> float:
    """Return the bytes of the copies of keys and values in one layer, at most. A sequence that has a row of its own
    shares nothing."""
    heads, head = _heads(config)
    layout = run.learner.layout
    tokens = prefixes.MOST_COPIES * run.learner.micro_batch_tokens / layout.tensor
    return _COPIED_KEY_BYTES * tokens * head * int(config.get("num_key_value_heads", heads))


def _chosen_keys(run: RunConfig, config: dict[str, Any]) -> float:
    """Return the bytes of the choices of sparse attention: of one layer, and of those that later layers use."""
    most, layout = config.get("index_topk") or 0, run.learner.layout
    tokens = _row_tokens(run, config)
    if not 0 < most < tokens:
        return 0.0
    kinds = config.get("indexer_types") or []
    shared = sum(pair == ("full", "shared") for pair in itertools.pairwise(kinds)) / layout.pipeline
    return float(_CHOSEN_BYTES * most * tokens / layout.context * (1 + shared))


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    """Return the number of query heads and the size of a head, in latent attention the mean of keys and values."""
    heads = int(config.get("num_attention_heads", 1))
    if config.get("qk_nope_head_dim"):
        return heads, (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]) // 2
    return heads, int(config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1))
