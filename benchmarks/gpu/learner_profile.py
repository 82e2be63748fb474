"""Where the time of a learner's step goes, by torch.profiler: its phases, its kernels, what the GPU waits for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch


def profiled(step: Callable[[], object], *, name: str, device: str, folder: Path) -> dict[str, float]:
    """Run a step under torch.profiler; write its kernels to a file, return phase times and the GPU's busy share."""
    on = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        on.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=on) as profile:
        step()
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    averages = profile.key_averages()
    result = {}
    for event in averages:
        if event.key.startswith("learner:"):
            result[f"{event.key[9:]}_host_seconds"] = event.cpu_time_total / 1e6
    for event in profile.events():
        if event.device_type.name == "CUDA" and event.name.startswith("learner:"):
            phase = f"{event.name[9:]}_gpu_seconds"
            result[phase] = result.get(phase, 0.0) + event.time_range.elapsed_us() / 1e6
    kernels, waits = [], []
    if device == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:  # the host is faster
            step()
        kernels = sorted(
            (e.time_range.start, e.time_range.end, e.name)
            for e in profile.events()
            if e.device_type.name == "CUDA" and not e.name.startswith("learner:")
        )
        waits = gaps(kernels)
        whole = max(end for _, end, _ in kernels) - kernels[0][0]
        result |= {"gpu_busy": 1 - sum(us for us, _ in waits) / whole, "num_kernels": float(len(kernels))}
    folder.mkdir(parents=True, exist_ok=True)
    table = averages.table(sort_by=key, row_limit=25, max_name_column_width=90)
    by_kernel, by_wait = dict[str, list[float]](), dict[str, list[float]]()
    for start, end, kernel in kernels:
        by_kernel.setdefault(kernel, []).append(end - start)
    for us, where in waits:
        by_wait.setdefault(where, []).append(us)
    lines = [*largest(by_kernel, 25), "", "The GPU waits for kernels:", *largest(by_wait, 15)]
    text = "\n".join([name, json.dumps(result), "", "GPU time by kernel:", *lines, "", table])
    (folder / f"{name}.txt").write_text(text)
    print(
        "\n".join(["", f"GPU time by kernel, {name}: {json.dumps(result)}", *lines]),
        file=sys.stderr,
        flush=True,
    )
    return result


def gaps(kernels: Sequence[tuple[float, float, str]]) -> list[tuple[float, str]]:
    """Return microseconds without any kernel, with the part of the step and the kernels before and after.

    kernels  start, end and name of each, in order of their starts
    """
    begin, found = kernels[0][0], []
    whole = max(end for _, end, _ in kernels) - begin
    until, before = kernels[0][1], kernels[0][2]
    for start, end, name in kernels:
        if start > until:
            found.append((start - until, f"at {(start - begin) / whole:.1f}: {before[:60]} -> {name[:60]}"))
        if end > until:
            until, before = end, name
    return found


def largest(by_name: Mapping[str, Sequence[float]], rows: int) -> list[str]:
    """Return a line for each name with the largest sum of microseconds."""
    total = sum(map(sum, by_name.values())) or 1.0
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:rows]
    return [f"{sum(us) / 1e3:9.2f} ms {sum(us) / total:6.1%} {len(us):6d} x  {name[:150]}" for name, us in ordered]
