"""Checksums in heartbeats that reveal a process running different code, or another tokenizer, than the learner.

Tests: tests/unit/launch/checks/test_own_code.py.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.data.model_folder import find_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.policies.health.fleet import CODE, FUNCTIONS, TOKENIZER


def checksums(run: RunConfig, *, package: Path | None = None) -> dict[str, float]:
    """Return checksums of the installed asyncrl code, of the names of the run's functions, and of the tokenizer.

    Options are not included, because machines may have their own keys, addresses and paths. Nor is the tokenizer where
    model.path is no folder.  package: None is asyncrl's folder. Blocks for up to a second.
    """
    parts = {name: [part.kind, part.weight] for name, part in sorted(run.reward.parts.items())}
    names = [run.reward.kind, dict(sorted(run.reward.rows.items())), parts, run.data.reward_key, run.rollout.function]
    found = {FUNCTIONS: _checksum(names)}
    with contextlib.suppress(ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError):
        found[TOKENIZER] = _of_tokenizer(Path(run.model.path))
    folder = package or Path(__file__).parents[1]
    code = 0
    try:
        for path in sorted(folder.rglob("*.py")):
            code = zlib.crc32(path.read_bytes(), zlib.crc32(path.relative_to(folder).as_posix().encode(), code))
    except OSError:  # code that cannot be read gets no checksum
        return found
    return {**found, CODE: float(code)}


def _of_tokenizer(model: Path) -> float:
    """Return a checksum of what the model's tokens mean and which ones end an answer.

    It is of the content of a tokenizer.json, which another version of transformers may write in another form.
    """
    file = find_tokenizer(model)
    content: Any = zlib.crc32(file.read_bytes())
    if file.name == "tokenizer.json":
        table = json.loads(file.read_bytes())
        content = [table["model"]["vocab"], [[one["id"], one["content"]] for one in table.get("added_tokens", ())]]
    configs = [model / name for name in ("config.json", "generation_config.json")]
    ends = {token for one in configs if one.exists() for token in _ends(json.loads(one.read_bytes()))}
    return _checksum([content, sorted(ends)])


def _ends(table: Mapping[str, Any]) -> list[int]:
    found = table.get("eos_token_id")
    return found if isinstance(found, list) else [] if found is None else [found]


def _checksum(value: Any) -> float:
    return float(zlib.crc32(json.dumps(value, sort_keys=True).encode()))
