"""Digests of the files that define a run's training signal: models with their tokenizers, the user's code, data.

The settings name most of what defines a run; what a name stands for may change while the setting stays. So every text
of the settings that names Python code ("package.module:object") or a file is recorded with a digest of the content.
Nothing is imported for it. Each start of the learner adds a line:

    RUN_DIR/files.jsonl
    {"incarnation": 0, "files": {"reward.kind": {"my_reward.py": "9f0c..."}, "model.path": {...}}}
 Tests: tests/unit/launch/checks/test_signal_files.py.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from asyncrl.config import RunConfig
from asyncrl.config import record as config_record
from asyncrl.data.row_files import path_and_slice
from asyncrl.version import VERSION

Files = dict[str, dict[str, Any]]
"""Key of the run file -> name of a file -> digest; "packages" -> name -> version. config.json of a model is recorded
whole, so that a change names its keys."""

log = logging.getLogger("asyncrl.learner")

FILE: Final = "files.jsonl"

_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OF_TEXTS: Final = (".txt", ".md", ".jinja", ".jinja2", ".j2", ".yaml", ".yml", ".toml", ".prompt")
"""Files that code may read, and hardly ever writes."""
_LONGEST_WORD: Final = 200
_CODE: Final = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
_OF_MODELS: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".safetensors")
"""Files of a model folder that the learner, the engines or transformers may read."""
_WHOLE_BYTES: Final = 64 * 2**20
"""Larger files are digested in part, by blocks that are spread evenly: shards of a large model on a slow disk must not
hold up a start for minutes, and new weights differ nearly everywhere."""
_BLOCKS: Final = 256
_BLOCK_BYTES: Final = 64 * 2**10
_SIDE_BY_SIDE: Final = 8
"""Files of a model that are read concurrently."""
_MOST_FILES: Final = 1000
_GIT_SECONDS: Final = 10.0
_LONGEST_NAME: Final = 4096
_CONFIG_BYTES: Final = 64 * 2**10
_OURS: Final = "asyncrl"
"""The package that is not followed: its version is recorded."""
_PACKAGES: Final = ("torch", "transformers", "tokenizers", "sglang", "megatron-core")
"""What templates, samples and steps are computed with."""
_NOT_LOOKED_AT: Final = ("run", "bus")
"""Sections of the machine, whose files are secrets or the run's own."""


def record(files: Files, directory: Path, *, incarnation: int) -> None:
    """Add what this incarnation of the learner found."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / FILE).open("ab") as file:
            file.write(b"\n" * (file.tell() > 0))  # ends the line of a learner that was killed while it wrote
            file.write(json.dumps({"incarnation": incarnation, "files": files}).encode())
    except OSError as error:
        log.warning("%s cannot be written, so the next start cannot name what changed: %s", directory / FILE, error)


def recorded(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return what the newest incarnation found, by the last line that can be read; empty without one."""
    try:
        lines = (directory / FILE).read_bytes().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {str(key): dict(found) for key, found in json.loads(line)["files"].items()}
    return {}


def digest_files(run: RunConfig) -> Files:
    """Return a digest of every file that the settings name, and of the user's code with what it imports beside it.

    Files of data are left out (``data/sources.py: digests``). Files that cannot be read are left out, too.
    """
    found: Files = {"packages": dict(_versions()), "revision": dict(_revisions())}
    found |= {key: _model(folder) for key, folder in run.model_paths.items()}
    found |= {f"servers.{name}.path": _model(Path(one.path)) for name, one in run.started_servers.items()}
    for section, table in config_record.as_table(run).items():
        if section not in _NOT_LOOKED_AT:
            for key, text in _texts(table, of=section):
                if key.startswith(("data.path", "data.files")):
                    continue
                if files := digest_code(text) or _named(text):
                    found.setdefault(key, {}).update(files)
    return {key: files for key, files in found.items() if files}


def _texts(value: Any, *, of: str) -> Iterator[tuple[str, str]]:
    """Yield every text of a table with its key; those of lists have the key of the list."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(one, of=f"{of}.{key}")
    elif isinstance(value, list | tuple):
        for one in value:
            name = one.get("name") if isinstance(one, Mapping) else ""
            yield from _texts(one, of=f"{of}.{name}" if name else of)
    elif isinstance(value, str):
        yield of, value


def _versions() -> Iterator[tuple[str, str]]:
    yield _OURS, VERSION
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _revisions() -> Iterator[tuple[str, str]]:
    """Yield the commit of asyncrl and of the folder that the run was started in, where they are clones of Git; one with
    changed files ends in "-dirty"."""
    for name, folder in (("asyncrl", Path(__file__).parent), ("folder", Path.cwd())):
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True).stdout
            if re.fullmatch("[0-9a-f]{40,64}(-dirty)?", said.strip()):
                yield name, said.strip()


# -- models ------------------------------------------------------------------------------------------------------------


def _model(folder: Path) -> dict[str, Any]:
    found = sorted([*_files_of(folder), *_files_of(folder / "additional_chat_templates")])
    paths = [path for path in found if path.suffix in _OF_MODELS]
    with ThreadPoolExecutor(_SIDE_BY_SIDE, "digest") as threads:
        digests = threads.map(_digest, paths)
        files: dict[str, Any] = {
            str(path.relative_to(folder)): digest for path, digest in zip(paths, digests, strict=True) if digest
        }
    if "config.json" in files and (config := model_config(folder)) is not None:
        files["config.json"] = config
    return files


def model_config(folder: Path) -> dict[str, Any] | None:
    """Return config.json of a model; None if it cannot be read, or is too large to be recorded."""
    try:
        content = (folder / "config.json").read_bytes()
        config = json.loads(content) if len(content) <= _CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None


def _files_of(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_file()]
    except OSError:
        return []


# -- the user's code ---------------------------------------------------------------------------------------------------


def digest_code(text: str) -> dict[str, str]:
    """Return the digests of the module that "package.module:object" names, and of what it imports beside it.

    Beside it: below the folder that it was found in. For an installed package these are its own modules.
    """
    address = _CODE.fullmatch(text)
    if address is None or (package := address[1].partition(".")[0]) == _OURS:
        return {}
    try:
        spec = importlib.util.find_spec(package)  # of a name without dots: imports nothing
    except (ImportError, ValueError):
        return {}
    if spec is None or not (places := [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]):
        return {}
    root = Path(places[0]).parent
    return _follow(address[1], root, of=package if root in _INSTALLED else "")


def _follow(module: str, root: Path, *, of: str = "") -> dict[str, str]:
    """Return the digests of a module below ``root`` and of the modules and texts there that its code names.

    of  the only package that is followed; "" for all below ``root``
    """
    waiting, names = [module], dict[str, str]()
    seen = set(waiting)
    while waiting and len(names) < _MOST_FILES:
        module = waiting.pop()
        package = module.partition(".")[0]
        if package == _OURS or (of and package != of):
            continue
        path = _module_file(root, module)
        if path is None or not (digest := _digest(path)):
            continue
        names[str(path.relative_to(root))] = digest
        modules, texts = _names_in(path, module)
        for text in texts:
            if found := _digest(path.parent / text) or _digest(Path(text)):
                names[text] = found
        new = modules - seen
        seen |= new
        waiting += sorted(new)
    return dict(sorted(names.items()))


_INSTALLED: Final = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib", "platstdlib")}


def _module_file(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    return next((path for path in (base.with_name(base.name + ".py"), base / "__init__.py") if path.is_file()), None)


def _names_in(path: Path, module: str) -> tuple[set[str], set[str]]:
    """Return the names of modules that a file may import anywhere in it, with the packages that they are in, and the
    names of texts that it may read, such as "judge_prompt.txt"."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return set(), set()
    nodes = [*ast.walk(tree)]
    said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    said = {text for text in said if len(text) < _LONGEST_WORD and text.isprintable()}
    named = {text for text in said if _MODULE.fullmatch(text)}  # importlib.import_module("graders.text")
    texts = {text for text in said if text.endswith(_OF_TEXTS)}
    return {*_imports(nodes, module, is_package=path.name == "__init__.py"), *named}, texts


def _imports(nodes: Iterable[ast.AST], module: str, *, is_package: bool) -> Iterator[str]:
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [start, *(f"{start}.{alias.name}".lstrip(".") for alias in node.names)]  # a module, or an object
        for name in filter(None, names):
            words = name.split(".")
            yield from (".".join(words[:count]) for count in range(1, len(words) + 1))


# -- other files -------------------------------------------------------------------------------------------------------


def _named(text: str) -> dict[str, str]:
    """Return the digests of the files that a text names: a path, data with a slice, or words of a command.

    Programs in Python are followed to what they import beside them: agent.py, or "-m agent".
    """
    if len(text) > _LONGEST_NAME or "\0" in text:
        return {}
    words = [text]
    with contextlib.suppress(ValueError):  # a quote without its other half
        words += shlex.split(text)
    paths = {path_and_slice(word)[0] for word in words if "." in word or "/" in word}
    found = {str(path): digest for path in sorted(paths) if (digest := _digest(path))}
    for path in map(Path, [*found]):
        if path.suffix == ".py":
            found |= {str(path.parent / name): digest for name, digest in _follow(path.stem, path.parent).items()}
    for before, word in itertools.pairwise(words):
        if before == "-m" and _MODULE.fullmatch(word):
            found |= _follow(word, Path()) | _follow(f"{word}.__main__", Path())
    return found


def _digest(path: Path) -> str:
    """Return the SHA-256 of a regular file, of a large one in part; "" if it cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _WHOLE_BYTES:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256(str(size).encode())
            for number in range(_BLOCKS):  # 0 is the file's first block, _BLOCKS - 1 its last one
                file.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
            return digest.hexdigest()
    except (OSError, ValueError):
        return ""
