"""Which tests run, in which order, and in what processes. The fixtures are in tests/harness/fixtures.py.

With `-n N`, this process only hands out tests and imports little: its imports would delay all others.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.harness.collected import Collected

# A shared machine is sometimes slow, so there are no deadlines, and a test run leaves no files behind. Every run uses
# the same cases, so that landing a change does not depend on luck. ASYNCRL_EXPLORE=1 draws other and more cases, for
# nightly runs.
explores = bool(os.environ.get("ASYNCRL_EXPLORE"))
hypothesis.settings.register_profile(
    "asyncrl", deadline=None, database=None, max_examples=200 if explores else 30, derandomize=not explores
)
hypothesis.settings.load_profile("asyncrl")

BUS_SIZES = {"max_prompts": 8, "max_log_bytes": 4 * 2**20, "ack_seconds": 30.0}
MAX_MESSAGE_BYTES = 2**20
SGLANG_MODELS = {"glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
"""Files of ``sglang.srt.models`` that an SGLang server of the tests may need."""

KINDS = {
    "system": (
        "tests/chaos",
        "tests/integration/processes",
        "tests/integration/ray",
        "tests/integration/cluster",
        "tests/integration/test_whole_system.py",
    ),
    "acceptance": ("tests/integration/learning",),
    "integration": ("tests/integration",),
    "unit": ("tests/unit", "tests/actors", "tests/contracts", "tests/oracles", "benchmarks/tests"),
    "docs": ("tests/docs",),
}
"""The marker that each test has by its place; the first that fits."""


def pytest_configure(config: pytest.Config) -> None:
    """Let SGLang servers import only the models under test instead of all 250. This saves 3 s of CPU per rank.

    And let `asyncrl` be found as in an activated environment, so that messages name it so wherever tests run.
    """
    if config.getoption("dist", "no") == "no" or config.getoption("collectonly"):  # it runs or collects tests itself
        config.pluginmanager.import_plugin("tests.harness.fixtures")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if (sglang := importlib.util.find_spec("sglang")) is not None and sglang.origin is not None:
        models = {path.stem for path in (Path(sglang.origin).parent / "srt" / "models").glob("*.py")}
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(models - SGLANG_MODELS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork pytest-xdist's processes from one that has collected the tests. This saves 12 s of CPU per process."""
    collected = Collected(config.invocation_params.args)
    config.add_cleanup(collected.close)
    for spec in specs:
        if spec.popen:
            spec.python = collected.python


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests for `-n N --dist loadgroup --no-loadscope-reorder`: longest first, so that all workers end
    together.

    Slow tests with a group share a server, keep one worker busy for minutes, and start first. Other slow tests are
    distributed one by one, all remaining tests by file.
    """
    leave_to_the_night(config, items)
    mark_kinds(items)
    skip_without_gpus(items)
    if not config.getoption("loadgroup", False):  # set in xdist's processes, where "dist" is "no"
        return
    items.sort(key=_length)
    for item in items:
        if item.get_closest_marker("slow") is None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collection: imports create little garbage, and searching it is a fifth of the import
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze the imported objects. This saves half a second of CPU for each backend that collects garbage when it
    closes."""
    importlib.import_module("transformers.models.auto.modeling_auto")  # as large as everything else, and needed soon
    let_loggers_propagate()
    gc.collect()
    gc.freeze()


def let_loggers_propagate() -> None:
    """Let the root logger hear torch's 55 loggers. Otherwise pytest gives each of them its handlers, six times a test:
    a millisecond and a half of CPU."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


def _length(item: pytest.Item) -> int:
    """Return the sort key of a test; 0 is the longest."""
    if item.get_closest_marker("slow") is None:
        return 2
    return 0 if item.get_closest_marker("xdist_group") is not None else 1


def leave_to_the_night(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of nightly.txt, unless ASYNCRL_EXPLORE is set or tests are named on the command line.

    And actors on a bus in memory: they run on JetStream, and tests/contracts shows that the two are alike.
    """
    if explores or any("::" in word for word in config.invocation_params.args):
        return
    lines = (Path(__file__).parent / "nightly.txt").read_text().splitlines()
    later = [line for line in lines if line and not line.startswith("#")]
    is_later = re.compile("|".join(map(pattern_of_line, later)))

    def is_left(item: pytest.Item) -> bool:
        buses = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_of_memory = item.nodeid.startswith("tests/actors/") and "memory" in buses
        return is_of_memory or is_later.match(re.sub(r"::Test\w+(?=::)", "", item.nodeid)) is not None

    config.hook.pytest_deselected(items=[item for item in items if is_left(item)])
    items[:] = [item for item in items if not is_left(item)]


def pattern_of_line(line: str) -> str:
    """Return the pattern of the tests that a line of nightly.txt names: a file, a test, or the beginning of a case of
    it. A test whose name only begins like a listed one is another test."""
    return re.escape(line) + ("" if "[" in line else r"(?![^:\[])")


def mark_kinds(items: list[pytest.Item]) -> None:
    """Mark every test as one of KINDS, so that ``-m`` can select them."""
    for item in items:
        kinds = [kind for kind, places in KINDS.items() if item.nodeid.startswith(places)]
        item.add_marker(kinds[0])


def skip_without_gpus(items: list[pytest.Item]) -> None:
    """Skip tests without enough GPUs: ``@pytest.mark.gpu`` needs one CUDA device, ``@pytest.mark.gpu(2)`` needs two."""
    import torch  # not where tests are only handed out

    for item in items:
        if (mark := item.get_closest_marker("gpu")) is not None:
            needed = mark.args[0] if mark.args else 1
            if (found := torch.cuda.device_count()) < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))
