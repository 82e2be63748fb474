"""What a published version of a model was made from, in one JSON object, for `asyncrl certify`.

Everything is computed from the run's folder and its log, so that another person with both can compute it again and
compare (``differences``). Lists of groups are in the order in which they were trained.

Tests: tests/integration/undo/test_certify.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.actors.learner import checkpoint, manifest
from asyncrl.audit.branch import lineage_of
from asyncrl.audit.recorded_groups import is_answer
from asyncrl.audit.run_folder import RecordedRun, log_records
from asyncrl.bus.port import Bus
from asyncrl.config import RunConfig
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.codec import encode
from asyncrl.messages.topics import EVENTS, TRAJECTORIES
from asyncrl.policies.audit.entries import BEGUN, FATES, HistoryEntry, damage, promotions, steps
from asyncrl.policies.groups.sample import reason_of
from asyncrl.policies.groups.validation import digest
from asyncrl.policies.staleness.staleness import ResumePoints, effective_version, sampled_spans
from asyncrl.tensors import safetensors_file

FORMAT: Final = 1
FILES_FILE: Final = "files.jsonl"


async def certificate(
    recorded: RecordedRun, history: Sequence[HistoryEntry], bus: Bus, *, version: int
) -> dict[str, Any]:
    """Return the certificate of policy version ``version``. ``history``: present history of the run.

    Raises ConfigError if the run has not made the version, or no longer has its weights or what they were trained on.
    """
    if problems := damage(history):
        raise ConfigError(f"{recorded.directory}: {problems[0]}; so nobody can say what was trained")
    made = [entry for entry in history if entry.kind == "trained" and entry.step <= version]
    if not made or made[-1].step != version:
        last = max((entry.step for entry in history if entry.kind == "trained"), default=0)
        raise ConfigError(f"--version {version}: {recorded.directory} has made versions 1 to {last}")
    past = history[: history.index(made[-1]) + 1]
    trained = list(steps(past))
    begun = [entry for entry in past if entry.kind == BEGUN]
    weights = _weights(
        recorded.directory, recorded.settings(begun[-1]), made[-1]
    )  # first: a run that is up removes them
    groups = await _groups(bus, trained, directory=recorded.directory)
    files = dict(_recorded_files(recorded.directory))
    found: dict[str, Any] = {
        "format": FORMAT,
        "run": recorded.directory.absolute().name,
        "directory": str(recorded.directory.absolute()),
        "version": version,
        "incarnation": made[-1].incarnation,
        "weights": weights,
        "parent": lineage_of(recorded.directory),
        **({"promoted_after": shadows} if (shadows := promotions(past)) else {}),  # another state took this one's place
        "incarnations": [
            {
                "incarnation": entry.incarnation,
                "from_step": entry.step,
                "settings": dict(entry.settings),
                "data": dict(entry.data),
                "files": files.get(entry.incarnation, {}),
            }
            for entry in begun
        ],
        "steps": [
            {
                "step": entry.step,
                "incarnation": entry.incarnation,
                "max_staleness": entry.max_staleness,
                "bound": of.max_staleness,
                "groups": [groups[group_id] for group_id in entry.groups],
            }
            for entry, of, _ in trained
        ],
        "not_trained": await _not_trained(bus, past),
    }
    return found | {"sha256": digest_of(found)}


def digest_of(found: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a certificate without its own "sha256"."""
    table = {name: value for name, value in found.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def differences(said: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare a certificate with one that was computed now. Return the differences, and what could not be compared."""
    different: list[str] = []
    missing: list[str] = []
    if said.get("sha256") != digest_of(said):
        different.append("sha256: the file is not as it was written")
    whole = {*said, *found} - {"sha256", "directory", "run", "weights", "not_trained", "steps"}
    different += [f"{name}: differs" for name in sorted(whole) if said.get(name) != found.get(name)]
    _compare_weights(said.get("weights") or {}, found.get("weights") or {}, different, missing)
    old, new = ({one["step"]: one for one in table.get("steps", ())} for table in (said, found))
    changed = [step for step in sorted({*old, *new}) if old.get(step) != new.get(step)]
    different += [f"step {step}: {_step_difference(old.get(step), new.get(step))}" for step in changed]
    lost, lost_now = ({one["group"]: one for one in table.get("not_trained", ())} for table in (said, found))
    for group_id in sorted({*lost, *lost_now}):
        was, now = lost.get(group_id), lost_now.get(group_id)
        if was is None or now is None or was["fate"] != now["fate"]:
            different.append(f"group {group_id}: {(was or {}).get('fate')} is {(now or {}).get('fate')} now")
        elif was["reason"] != now["reason"]:
            if now["reason"]:
                different.append(f"group {group_id}: the reason of its fate differs")
            else:  # events are kept for a week
                missing.append(f"the reason of group {group_id}, which is no longer on the bus")
    return different, missing


def _compare_weights(
    said: Mapping[str, Any], found: Mapping[str, Any], different: list[str], missing: list[str]
) -> None:
    for name in ("model", "checkpoint"):
        was, now = said.get(name), found.get(name)
        if was and not now:
            missing.append(f"the {name} of this version, which is no longer there")
        elif was != now and was:
            different.append(f"weights: the {name} differs")


def _step_difference(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    if old is None or new is None:
        return "is only in the " + ("run" if old is None else "file")
    was, now = ({one["group"]: one for one in table["groups"]} for table in (old, new))
    for group_id in sorted({*was, *now}):
        if was.get(group_id) != now.get(group_id):
            before, after = was.get(group_id) or {}, now.get(group_id) or {}
            keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
            return f"group {group_id} differs ({', '.join(keys)})"
    return "differs"


async def _groups(
    bus: Bus, trained: Sequence[tuple[HistoryEntry, HistoryEntry, ResumePoints]], *, directory: Path
) -> dict[int, dict[str, Any]]:
    """Return what is certified of each trained group. Raises ConfigError for one that is no longer on the log."""
    of = {group_id: (entry, points) for entry, _, points in trained for group_id in entry.groups}
    found: dict[int, dict[str, Any]] = {}
    async with contextlib.aclosing(log_records(bus, TRAJECTORIES)) as records:
        async for record in records:
            group = record.message
            if not is_answer(record) or group is None or group.group_id in found:
                continue
            entry, points = of.get(group.group_id, (None, {}))
            if entry is not None and entry.is_record_of(group.group_id, record.sequence):
                found[group.group_id] = _group(group, entry.step, points)
    if gone := sorted(of.keys() - found.keys()):
        raise ConfigError(
            f"{directory}: group {gone[0]} of step {of[gone[0]][0].step} is no longer on its log, so its sampler "
            "cannot be certified; checkpoint.keep_log = true keeps it from the start"
        )
    return found


def _group(group: TrajectoryGroup, step: int, resume_points: ResumePoints) -> dict[str, Any]:
    versions: dict[tuple[int, int], int] = {}
    oldest = step - 1
    for one in group.trajectories:
        for span, count in sampled_spans(one):
            key = (span.incarnation, span.policy_version)
            versions[key] = versions.get(key, 0) + count
            oldest = min(oldest, effective_version(span, resume_points))
    return {
        "group": group.group_id,
        "epoch": group.epoch,
        "prompt_sha256": digest(group.prompt_tokens).hex(),
        "answers_sha256": hashlib.sha256(encode(group)).hexdigest(),
        "worker": group.worker,
        "sampled_by": [[*key, count] for key, count in sorted(versions.items())],
        "age": step - 1 - oldest,
        "rewards": group.rewards,
    }


async def _not_trained(bus: Bus, history: Sequence[HistoryEntry]) -> list[dict[str, Any]]:
    fates = {group_id: entry.kind for entry in history if entry.kind in FATES for group_id in entry.groups}
    lost = {group_id: kind for group_id, kind in fates.items() if kind != "trained"}
    reasons: dict[int, str] = {}
    async with contextlib.aclosing(log_records(bus, EVENTS)) as records:
        async for record in records:
            event = record.message
            group_id = None if event is None else event.data.get("group_id")
            if event is not None and type(group_id) is int and lost.get(group_id) == event.kind:
                reasons[group_id] = reason_of(event.kind, event.data)
    return [
        {"group": group_id, "fate": kind, "reason": reasons.get(group_id, "")}
        for group_id, kind in sorted(lost.items())
    ]


def _recorded_files(directory: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (incarnation, digests of the files that its settings name), as far as they can be read."""
    try:
        lines = (directory / FILES_FILE).read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            table = json.loads(line)
            yield int(table["incarnation"]), dict(table["files"])


def _weights(directory: Path, settings: RunConfig, made: HistoryEntry) -> dict[str, Any]:
    """Return the digests of a version: of its model folder and its checkpoint, whichever is there."""
    name = f"{made.incarnation}-{made.step}"
    own = directory / "weights" if not settings.weights.directory else settings.weights_directory
    folder = next((one for one in (own / name, directory / "models" / name) if one.is_dir()), None)
    found: dict[str, Any] = {}
    if folder is not None:
        with contextlib.suppress(FileNotFoundError):  # a run that is up removes it
            model = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
            if folder.is_dir():
                found["model"] = model
    for one in checkpoint.list_complete(directory / "checkpoints"):
        try:
            state, _ = checkpoint.read(one)
        except (CheckpointError, OSError):
            continue
        if (state.step, state.incarnation) == (made.step, made.incarnation):
            if problem := manifest.find_damage(one):
                raise ConfigError(f"{one}: is damaged: {problem}")
            found["checkpoint"] = _sha256(one / manifest.FILE)
    if not found:
        raise ConfigError(
            f"{directory}: version {made.step} has neither a model folder nor a checkpoint any more; weights.keep, "
            "weights.models_every, and checkpoint.keep keep them"
        )
    return found


def _sha256(path: Path) -> str:
    if path.suffix == ".safetensors":
        return safetensors_file.sha256(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
