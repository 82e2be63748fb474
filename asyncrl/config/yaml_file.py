"""Reads YAML files of other frameworks. The only module that imports yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import ConfigError


def read(path: Path) -> Any:
    """Parse a YAML file. Raises ConfigError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
