"""What all ranks of a learner must share, as digests: code, packages, settings, configurations and weights of models.

Each rank that is started separately builds its models from its own run file, code and folders. If they differed, the
ranks would train a mixture of them, so they are compared when a rank joins (rank_group.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from asyncrl.backends.megatron.job import Options
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import WeightsError
from asyncrl.tensors import weight_files

_UNREAD: Final = ("_name_or_path", "transformers_version")
"""Keys of a config.json that no model depends on; tools that copy a folder rewrite them."""


def shared_settings(run: RunConfig, *, options: Options) -> dict[str, object]:
    """Return the settings that losses and updates depend on. Folders may differ between machines.

    options  [learner.options] with defaults
    """
    learner = {
        name: value for name, value in dataclasses.asdict(run.learner).items() if name not in ("gpus", "options")
    }
    models = {"critic": run.critic, "reference": run.reference, "teacher": run.teacher}
    return {
        **{f"learner.{name}": value for name, value in learner.items()},
        **{f"learner.options.{name}": value for name, value in dataclasses.asdict(options).items()},
        **{name: model and dataclasses.asdict(model) | {"path": bool(model.path)} for name, model in models.items()},
        "algorithm": dataclasses.asdict(run.algorithm),
        "model.dtype": run.model.dtype,
        "model.family": run.model.family,
        "weights.quantization": run.weights.quantization,
        "rollout.temperature": run.rollout.temperature,
        "rollout.max_new_tokens": run.rollout.max_new_tokens,
        "staleness.learning_rate": run.staleness.learning_rate,
        "run.name": run.run.name,
        "run.seed": run.run.seed,
    }


def digests(settings: Mapping[str, object], models: Mapping[str, Path]) -> dict[str, str]:
    """Return digests of our code, its packages, ``settings``, and the models in the folders ``models``, by name.

    Raises WeightsError.
    """
    package = Path(__file__).parents[2]
    files = sorted(package.rglob("*.py"))
    code = b"".join(str(path.relative_to(package)).encode() + path.read_bytes() for path in files)
    return {
        "the code of asyncrl": _digest(code),
        "torch": metadata.version("torch"),
        "megatron-core": metadata.version("megatron-core"),
        **{name: _digest(json.dumps(value, sort_keys=True, default=str).encode()) for name, value in settings.items()},
        **{f"the configuration of {name}": _digest(_configuration(folder)) for name, folder in models.items()},
        **{f"the weights of {name}": weight_files.fingerprint(folder) for name, folder in models.items()},
    }


def _configuration(folder: Path) -> bytes:
    """Return what a folder's config.json says: a rank with another rope or norm would compute another model."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return json.dumps({key: config[key] for key in sorted(config) if key not in _UNREAD}).encode()
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{folder}: cannot read its config.json: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
