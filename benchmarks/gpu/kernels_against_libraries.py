"""Times our kernels against those of Liger-Kernel and flash-linear-attention, forward and backward, on one GPU.

    pip install 'liger-kernel>=0.8.5' flash-linear-attention
    python -m benchmarks.gpu.kernels_against_libraries --json kernels.jsonl
    python -m benchmarks.gpu.kernels_against_libraries --device cpu --tokens 64 --repeats 2   shows that it works

Each row compares one operation at one size: our own kernel, the library's, and plain torch as the reference of both.
``error`` is the largest difference of an output or a gradient from plain torch in float32, relative to its largest
number.
A library that is not installed, or that needs a GPU, is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.backends.kernels import delta_rule, flash_linear_attention, fused
from benchmarks.gpu import rows

Operation = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one size.

    inputs   in the order of the arguments of every implementation; those that require gradients get them
    exact    in plain torch, for any dtype
    library  None if it is not installed
    """

    name: str
    size: str
    inputs: Sequence[torch.Tensor]
    exact: Operation
    own: Operation
    library: Operation | None


def cases(tokens: int, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Sizes of Qwen3-1.7B, Qwen3-8B and Qwen3-Next."""
    random = torch.Generator(device=device).manual_seed(0)

    def tensor(*sizes: int) -> torch.Tensor:
        made = torch.randn(*sizes, generator=random, device=device, dtype=torch.float32).to(dtype)
        return made.requires_grad_()

    for hidden in (2048, 4096):
        yield Case(
            name="rms_norm",
            size=f"{tokens} x {hidden}",
            inputs=[tensor(tokens, hidden), tensor(hidden)],
            exact=lambda x, weight: (fused._normalize(x, weight, 1e-6, False),),
            own=lambda x, weight: (fused.rms_norm(x, weight, 1e-6),),
            library=liger_norm(),
        )
    for inner in (6144, 12288):
        yield Case(
            name="swiglu",
            size=f"{tokens} x {inner}",
            inputs=[tensor(tokens, 2 * inner)],
            exact=lambda x: (torch.nn.functional.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],),
            own=lambda x: (fused.swiglu(x),),
            library=liger_swiglu(),
        )
    for groups, queries in ((8, 2), (8, 4)):
        size, frequencies = 128, 1e6 ** (-torch.arange(64, device=device) / 64)
        angles = fused.rotary(torch.arange(tokens, device=device), frequencies)
        heads = functools.partial(heads_of, fused.heads, angles=angles, groups=groups)
        yield Case(
            name="heads (split, norm, rotate)",
            size=f"{tokens} x {groups} x {queries + 2} x {size}",
            inputs=[tensor(tokens, groups * (queries + 2) * size), tensor(size), tensor(size)],
            exact=functools.partial(heads_of, fused.heads.__wrapped__, angles=angles, groups=groups),  # type: ignore[attr-defined]
            own=heads,
            library=liger_heads(angles, groups=groups),
        )
    chunks = delta_rule.Chunks.from_boundaries(np.array([0, tokens // 4, tokens // 2, tokens], np.int32), device)
    keys, values, width = 16, 32, 128
    decay = -torch.rand(tokens, values, generator=random, device=device)
    step = torch.rand(tokens, values, generator=random, device=device)
    inputs = [tensor(tokens, keys, width), tensor(tokens, keys, width), tensor(tokens, values, width)]
    yield Case(
        name="gated delta rule",
        size=f"{tokens} x {values} x {width}",
        inputs=[*inputs, decay.requires_grad_(), step.requires_grad_()],
        exact=lambda *rows: (delta_rule._read_in_chunks(rows, chunks),),
        own=lambda *rows: (delta_rule._read_in_chunks(rows, chunks),),
        library=(lambda *rows: (flash_linear_attention.gated_delta_rule(*rows, **chunks.ends),))
        if device.type == "cuda" and flash_linear_attention.is_installed()
        else None,
    )


def heads_of(
    function: Callable[..., tuple[torch.Tensor, ...]],
    mixed: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    *,
    angles: tuple[torch.Tensor, torch.Tensor],
    groups: int,
) -> tuple[torch.Tensor, ...]:
    return function(mixed, *angles, query_weight, key_weight, groups, 128, 1e-6)


# -- Liger-Kernel ------------------------------------------------------------------------------------------------------


def liger(module: str, name: str) -> Any:
    """Return a function of Liger-Kernel's; None if it is not installed, or there is no GPU for it."""
    try:
        return (
            getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name) if torch.cuda.is_available() else None
        )
    except ImportError:
        return None


def liger_norm() -> Operation | None:
    norm = liger("rms_norm", "LigerRMSNormFunction")
    return norm and (lambda x, weight: (norm.apply(x, weight, 1e-6, 0.0, "llama", False),))


def liger_swiglu() -> Operation | None:
    swiglu = liger("swiglu", "LigerFusedGateUpSiLUMulFunction")
    return swiglu and (lambda x: (swiglu.apply(x),))


def liger_heads(angles: tuple[torch.Tensor, torch.Tensor], *, groups: int) -> Operation | None:
    """Liger has no kernel for the three together."""
    norm, rope = liger("rms_norm", "LigerRMSNormFunction"), liger("rope", "LigerRopeFunction")
    if norm is None or rope is None:
        return None
    cosines, sines = (torch.cat([one, one], dim=-1)[None] for one in angles)

    def run(mixed: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grouped = mixed.view(mixed.shape[0], groups, -1, 128)
        query, key, value = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
        query = norm.apply(query.contiguous(), query_weight, 1e-6, 0.0, "llama", False)
        key = norm.apply(key.contiguous(), key_weight, 1e-6, 0.0, "llama", False)
        query, key = rope.apply(
            query.transpose(0, 1)[None], key.transpose(0, 1)[None], cosines.to(query.dtype), sines.to(query.dtype)
        )
        return query[0].transpose(0, 1), key[0].transpose(0, 1), value.contiguous()

    return run


# -- measuring ---------------------------------------------------------------------------------------------------------


def results(
    operation: Operation, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return outputs and the gradients of the inputs, for output gradients that depend on the position alone."""
    made = [(one.detach() if dtype is None else one.detach().to(dtype)).requires_grad_() for one in inputs]
    outputs = operation(*made)
    gradients = [torch.linspace(-1, 1, one.numel(), device=one.device).view(one.shape).to(one.dtype) for one in outputs]
    return [*outputs, *torch.autograd.grad(outputs, made, gradients)]


def error(operation: Operation, case: Case, expected: Sequence[torch.Tensor]) -> float:
    found = [one.detach() for one in results(operation, case.inputs)]
    return max(
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )


def milliseconds(operation: Operation, case: Case, *, repeats: int) -> tuple[float, float]:
    """Return the median time of a forward pass, and of a forward and a backward pass."""
    outputs = operation(*case.inputs)
    gradients = [torch.ones_like(one) for one in outputs]

    def forward() -> None:
        with torch.no_grad():
            operation(*case.inputs)

    def both() -> None:
        torch.autograd.grad(operation(*case.inputs), list(case.inputs), gradients)

    times = []
    for run in (forward, both):
        measured = []
        for number in range(repeats + 3):  # the first ones compile
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= 3:
                measured.append(1000 * (time.perf_counter() - began))
        times.append(float(np.median(measured)))
    return times[0], times[1]


def measure(case: Case, *, repeats: int) -> Iterator[dict[str, Any]]:
    expected = [one.detach().double() for one in results(case.exact, case.inputs, torch.float32)]
    for name, operation in (("own", case.own), ("torch", case.exact), ("library", case.library)):
        if operation is None:
            continue
        about = {"operation": case.name, "size": case.size, "of": name}
        try:
            forward, both = milliseconds(operation, case, repeats=repeats)
        except RuntimeError as refusal:  # e.g. flash-linear-attention on a version of Triton that computes it wrongly
            if name != "library":
                raise
            yield {**about, "refusal": str(refusal)}
            continue
        yield {
            **about,
            "forward_ms": forward,
            "forward_backward_ms": both,
            "error": error(operation, case, expected),
        }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="append a JSON line for each measurement")
    options = parser.parse_args(given)
    about = {"command": rows.command("benchmarks.gpu.kernels_against_libraries", given), **rows.machine()}
    print(f"{'operation':28} {'size':24} {'of':8} {'forward':>10} {'+ backward':>10} {'error':>9}")
    for case in cases(options.tokens, torch.device(options.device), getattr(torch, options.dtype)):
        for row in measure(case, repeats=options.repeats):
            rows.keep({**about, "dtype": options.dtype, **row}, options.json)
            if "refusal" in row:
                print(f"{row['operation']:28} {row['size']:24} {row['of']:8} {row['refusal']}", flush=True)
                continue
            print(
                f"{row['operation']:28} {row['size']:24} {row['of']:8} {row['forward_ms']:7.3f} ms "
                f"{row['forward_backward_ms']:7.3f} ms {row['error']:9.1e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
