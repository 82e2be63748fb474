"""Plot one steady minute of an arm: which parts work, and which wait for what.

    python -m benchmarks.gpu.timeline runs/modes/ARM/timeline.jsonl docs/results/timeline.png --seconds 60

Reads the recorder's samples and the learner's steps of an arm of modes.py. Prints which actor waited for what.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.window import Row, Sample

STEP, WAIT, EXPORT, PAUSE, RUNNING, QUEUED = "#3c8d5a", "#c8503c", "#8a5fb0", "#c8503c", "#2a6fbb", "#cfdff0"
_NUMBER: Final = re.compile(r"\b\d+ ")
_LEAST_PAUSE: Final = 0.15
"""Minimum width of a drawn pause, in seconds, because most pauses are too short to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One arm's file, cut to ``begin`` to ``end`` (Unix seconds).

    engines  number of servers
    """

    samples: list[Sample]
    steps: list[Row]
    arm: Row
    begin: float
    end: float

    @property
    def engines(self) -> int:
        return max((len(sample["engines"]) for sample in self.samples), default=0)


def read(path: Path, *, seconds: float) -> Record:
    """Read the last ``seconds`` before the end of the last step, without the warm-up. Raises ValueError."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    samples = [line for line in lines if "engines" in line]
    steps = [line["step"] for line in lines if "step" in line]
    arm: Row = next((line["arm"] for line in lines if "arm" in line), {})
    warmup = arm.get("warmup_steps", 1)
    if len(steps) <= warmup:
        raise ValueError(f"{path}: {len(steps)} steps, of which {warmup} are warm-up")
    end = float(steps[-1]["time"])
    begin = max(end - seconds, float(steps[warmup - 1]["time"]))
    return Record(
        samples=[sample for sample in samples if begin <= sample["time"] <= end],
        steps=[step for step in steps[warmup:] if step["time"] > begin],
        arm=arm,
        begin=begin,
        end=end,
    )


def learner_spans(steps: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """Yield (color, start, seconds) of waiting, training, and copying the weights, around the end of each step."""
    for step in steps:
        end, trained = float(step["time"]), float(step["learner/step_seconds"])
        waited = float(step["learner/wait_seconds"])
        yield WAIT, end - trained - waited, waited
        yield STEP, end - trained, trained
        yield EXPORT, end, float(step.get("learner/export_seconds") or 0.0)


def published(samples: Sequence[Sample]) -> Iterator[tuple[float, int]]:
    """Yield (time, version) of each announcement."""
    for before, after in zip(samples, samples[1:], strict=False):
        if after["published"] > before["published"]:
            yield after["time"], after["published"]


def loads(samples: Sequence[Sample], engine: int) -> Iterator[tuple[float, float]]:
    """Yield (time, pause seconds) of each load of one engine.

    A load shows as a change of version. Its pause comes from the worker's heartbeat within 2 s.
    """
    for number, (before, after) in enumerate(zip(samples, samples[1:], strict=False)):
        old, new = before["engines"][engine], after["engines"][engine]
        if old is None or new is None or old["version"] == new["version"]:
            continue
        version = int((new["version"].split(":") + [""])[1] or -1)
        told = (sample["actors"].get(f"w{engine}") for sample in samples[number + 1 :])
        pause = next((actor["numbers"]["weights/pause_seconds"] for actor in told if actor and _has(actor, version)), 0)
        yield after["time"], float(pause)


def _has(actor: Row, version: int) -> bool:
    return bool(actor["version"] >= version) and "weights/pause_seconds" in actor["numbers"]


def waits(samples: Sequence[Sample]) -> list[tuple[str, str, float]]:
    """Return (actor, what it waited for, share of the samples), longest first.

    The number of answers that a worker waits for is left out, because it changes from sample to sample.
    """
    looks: Counter[str] = Counter()
    found: Counter[tuple[str, str]] = Counter()
    for sample in samples:
        for name, actor in sample["actors"].items():
            looks[name] += 1
            if actor["waits_for"]:
                found[name, _NUMBER.sub("", actor["waits_for"])] += 1
    return [(name, what, count / looks[name]) for (name, what), count in found.most_common()]


def draw(record: Record, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes = 2 + record.engines
    figure, axes = pyplot.subplots(
        lanes, 1, figsize=(13, 1.6 + 1.25 * lanes), sharex=True, height_ratios=[0.8, 0.6, *[1.2] * record.engines]
    )
    draw_learner(axes[0], record)
    draw_published(axes[1], record)
    for engine in range(record.engines):
        draw_engine(axes[2 + engine], record, engine)
    for lane in axes:
        lane.spines[["top", "right"]].set_visible(False)
        lane.set_xlim(0, record.end - record.begin)
    axes[-1].set_xlabel("seconds")
    about = record.arm
    figure.suptitle(
        f"{about.get('arm', '')} {about.get('split', '')}: {about.get('model', '')} on {about.get('gpus', '')} x "
        f"{about.get('device', '')}, learner + engines; staleness ≤ {about.get('max_staleness', '')}"
    )
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def draw_learner(axes: Any, record: Record) -> None:
    names = {STEP: "trains", WAIT: "waits for a batch", EXPORT: "copies weights"}
    for color, start, seconds in learner_spans(record.steps):
        label = names.pop(color, None) if seconds > 0 else None
        axes.broken_barh([(start - record.begin, seconds)], (0, 1), facecolors=color, edgecolor="white", label=label)
    axes.set_yticks([0.5], ["learner"])
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=9)


def draw_published(axes: Any, record: Record) -> None:
    for time, version in published(record.samples):
        axes.axvline(time - record.begin, color="black", linewidth=1)
        axes.text(time - record.begin, 0.5, f" {version}", va="center", fontsize=8)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["version\nannounced"])


def draw_engine(axes: Any, record: Record, engine: int) -> None:
    looks = [
        (sample["time"], sample["engines"][engine])
        for sample in record.samples
        if sample["engines"][engine] is not None
    ]
    times = [time - record.begin for time, _ in looks]
    running = [look["running"] for _, look in looks]
    both = [look["running"] + look["waiting"] for _, look in looks]
    axes.fill_between(times, both, step="post", color=QUEUED, label="wait in the engine")
    axes.fill_between(times, running, step="post", color=RUNNING, label="sequences decoded")
    for number, (time, pause) in enumerate(loads(record.samples, engine)):
        width = max(pause, _LEAST_PAUSE)
        axes.axvspan(
            time - record.begin - width, time - record.begin, color=PAUSE, label="" if number else "pause for weights"
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"engine {engine}")
    if engine == 0:
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=9)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", help="picture; without it only the table is printed")
    parser.add_argument("--seconds", type=float, default=60.0, help="how much is drawn (default 60)")
    options = parser.parse_args(given)
    try:
        record = read(options.source, seconds=options.seconds)
    except ValueError as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 1
    for name, what, share in waits(record.samples):
        print(f"{name:10s} waits for {what:32s} {share:6.1%} of the time")
    if options.target is not None:
        draw(record, options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
