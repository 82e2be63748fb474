"""Tells whether asyncrl/metrics/schema.py defines a metric."""

from __future__ import annotations

import fnmatch

from asyncrl.metrics.schema import SCHEMA


def is_known(name: str) -> bool:
    return name in SCHEMA or any(fnmatch.fnmatchcase(name, pattern) for pattern in SCHEMA if "*" in pattern)
