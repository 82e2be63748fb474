"""What all ranks of a learner must share, as digests: code, packages, settings, configurations and weights of models.

Each rank that is started separately builds its models from its own run file, code and folders. If they differed, the
ranks would train a mixture of them, so they are compared when a rank joins (joined_ranks.py).
Tests: tests/unit/backends/megatron/test_joined_ranks.py, tests/unit/launch/checks/test_run_file_sections.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import importlib.util
import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from asyncrl.backends.megatron.options import Options
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import WeightsError
from asyncrl.tensors import weight_files

_UNREAD: Final = ("_name_or_path", "transformers_version")
"""Keys of a config.json that no model depends on; tools that copy a folder rewrite them."""


def shared_settings(run: RunConfig, *, options: Options) -> dict[str, object]:
    """Return the settings that all ranks must share, because losses and updates depend on them.

    Folders may differ between machines.  options: [learner.options] with defaults
    """
    names = [field.name for field in dataclasses.fields(run.learner) if field.name not in ("gpus", "options")]
    own: dict[str, object] = {f"learner.{name}": getattr(run.learner, name) for name in names}
    own |= {f"learner.options.{name}": value for name, value in dataclasses.asdict(options).items()}
    models = {"critic": run.critic, "reference": run.reference, "teacher": run.teacher}
    others = {name: one and dataclasses.asdict(one) | {"path": bool(one.path)} for name, one in models.items()}
    shared = {
        "algorithm": run.algorithm,
        "the code of algorithm": _own_parts(run),
        "model.dtype": run.model.dtype,
        "weights.quantization": run.weights.quantization,
        "rollout.temperature": run.rollout.temperature,
        "rollout.max_new_tokens": run.rollout.max_new_tokens,
        "staleness.learning_rate": run.staleness.learning_rate,
    }
    return {**own, **others, **shared, "run.name": run.run.name, "run.seed": run.run.seed}


def _own_parts(run: RunConfig) -> dict[str, str]:
    """Return the digests of the modules that [algorithm] names as "package.module:object", without what they import."""
    algorithm = run.algorithm
    named = [algorithm.name, algorithm.advantage, algorithm.loss, algorithm.aggregation, algorithm.correction]
    modules = {module for text in named for module in re.findall(r"([\w.]+):", text)}
    specs = {module: importlib.util.find_spec(module) for module in modules}
    return {
        module: hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
        for module, spec in specs.items()
        if spec is not None and spec.origin is not None
    }


def digests(secret: str, settings: Mapping[str, object], models: Mapping[str, Path]) -> dict[str, str]:
    """Return digests of our code, its packages, ``settings``, and the models in the folders ``models``, by name.

    They are keyed by the secret, so they reveal nothing. Raises WeightsError.
    """
    values = {"the code of asyncrl": _code(), "torch": metadata.version("torch")}
    values["megatron-core"] = metadata.version("megatron-core")
    values |= {name: repr(_normalized(value)) for name, value in settings.items()}
    values |= {f"the configuration of {name}": _configuration(folder) for name, folder in models.items()}
    values |= {f"the weights of {name}": weight_files.fingerprint(folder) for name, folder in models.items()}
    return {name: hmac.digest(secret.encode(), value.encode(), "sha256").hex()[:16] for name, value in values.items()}


def _configuration(folder: Path) -> str:
    """Return what a folder's config.json says: a rank with another rope or norm would compute another model."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return repr(_normalized({key: value for key, value in config.items() if key not in _UNREAD}))
    except (OSError, ValueError, AttributeError) as error:
        raise WeightsError(f"{folder}: cannot read its config.json: {error}") from error


def _normalized(value: object) -> object:
    """Return the same value for settings of the same meaning: in any order, as a whole number or a float."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return sorted((str(key), _normalized(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return [_normalized(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@functools.cache
def _code() -> str:
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
