"""Tells whether asyncrl/metrics/schema.py defines a metric."""

from __future__ import annotations

import fnmatch
import re

from asyncrl.metrics.schema import SCHEMA


def is_known(name: str) -> bool:
    name = re.sub("^(rollout|weights)/[^/]+/", r"\1/", name)  # of one worker
    return name in SCHEMA or any(fnmatch.fnmatchcase(name, pattern) for pattern in SCHEMA if "*" in pattern)
