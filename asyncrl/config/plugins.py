"""Loads "package.module:object" from the run file, creates objects of user classes, and explains failures."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from asyncrl.errors import ConfigError

T = TypeVar("T")

_NOT_USERS: Final = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
"""Folders of this package and of Python."""


def load(name: str, *, where: str, table: Mapping[str, str] | None = None, kind: type | None = None) -> Any:
    """Return the object that ``name`` refers to: an entry of ``table``, or "package.module:object".

    The object must be a ``kind`` if one is given, otherwise callable. Raises ConfigError naming ``where`` (the key of
    the run file) if there is no such object.
    """
    module_name, attribute = address(name, where=where, table=table)
    before = set(sys.modules)
    try:
        module = importlib.import_module(module_name)
        _refuse_hidden(module_name, where=where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if module_name.startswith("asyncrl.") and (file := _find_stray(error, before)):
            raise ConfigError(
                f"{where}: a package imports {file} of this folder as if it were another package; give it another name"
            ) from error
        _raise_import_problem(error, module_name, where=where)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}: {module_name!r} has no {attribute!r}{hint}")
    found = getattr(module, attribute)
    if not (isinstance(found, kind) if kind else callable(found)):
        wanted = with_article(kind) if kind else "a function or class"
        raise ConfigError(f"{where}: {name!r} is {with_article(type(found))}, not {wanted}")
    return found


def check_call(call: Any, arguments: Sequence[str], *, wanted: str) -> None:
    """Raise ConfigError, which begins with ``wanted``, unless ``call`` is a plain function of these arguments."""
    if not callable(call) or inspect.iscoroutinefunction(call):
        raise ConfigError(f"{wanted}, it is {'async' if callable(call) else repr(call)[:50]}")
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{wanted}: {error}") from None
    except ValueError:  # a built-in has no signature
        return


def load_subclass(name: str, *, where: str, kind: type[T]) -> type[T]:
    """Return the class that ``name`` refers to, which must derive from ``kind``. Raises ConfigError."""
    found = load(name, where=where)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{where}: {name!r} is no class derived from {kind.__module__}.{kind.__name__}")
    return found


def _raise_import_problem(error: BaseException, module_name: str, *, where: str) -> NoReturn:
    """Raise ConfigError for what the import of a user's module raised, which may be anything."""
    _refuse_hidden(module_name, where=where)
    if isinstance(error, ImportError):
        is_away = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = "; is it on PYTHONPATH?" if is_away else ""  # else the module is there, and imports what is not
        raise ConfigError(f"{where}: cannot import {module_name!r} ({first_line(error)}){hint}") from error
    if isinstance(error, SystemExit):
        raise ConfigError(f"{where}: cannot import {module_name!r}: it exits (sys.exit({error.code!r}))") from error
    raise ConfigError(f"{where}: importing {module_name!r} raised {describe_raised(error)}") from error


def _find_stray(error: BaseException, before: Collection[str]) -> str:
    """Return the file in the working directory that a package has imported since ``before``; "" if it is none.

    A package tries to import others that may not be installed, such as h2, and finds a user's h2.py.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    files += [str(getattr(sys.modules[name], "__file__", None)) for name in sys.modules.keys() - before]
    here = (Path(file) for file in files if Path(file).absolute().parent == Path.cwd())
    return next((path.name for path in here if path.is_file()), "")


def _refuse_hidden(module_name: str, *, where: str) -> None:
    """Raise ConfigError if a module in the working directory is hidden by an installed one of the same name."""
    top = module_name.partition(".")[0]
    mine = next((path for path in (Path(f"{top}.py"), Path(top)) if path.is_file() or any(path.glob("*.py"))), None)
    found = getattr(sys.modules.get(top), "__spec__", None)
    if mine is None or found is None or top == __name__.partition(".")[0]:
        return
    places = [found.origin, *(found.submodule_search_locations or [])]
    if not any(place and Path(place).resolve().is_relative_to(mine.resolve()) for place in places):
        raise ConfigError(
            f"{where}: {mine} is hidden by {found.origin or top}, an installed module of the same name; give yours "
            "another name"
        )


def address(name: str, *, where: str, table: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the module and attribute that ``name`` refers to, without importing them.

    Raises ConfigError for a malformed name.
    """
    module_name, colon, attribute = (table or {}).get(name, name).partition(":")
    if module_name.endswith(".py"):
        file = Path(module_name)
        is_below = not file.is_absolute() and ".." not in file.parts
        module = ".".join(file.with_suffix("").parts) if is_below else file.stem
        raise ConfigError(f"{where}: {name!r} names a file; write its module: '{module}:{attribute or 'object'}'")
    if colon and module_name and attribute:
        return module_name, attribute
    near = difflib.get_close_matches(name.lower(), table or {}, 1)
    # an address written with a dot instead of a colon
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        near = [":".join(name.rsplit(".", 1))]
    known = f"known: {', '.join(table)}; or " if table else ""
    hint = f"did you mean {near[0]!r}? Or " if near else known
    raise ConfigError(f"{where}: {name!r} is unknown; {hint}write package.module:object")


def make(kind: Callable[..., Any], *arguments: Any, where: str, name: str) -> Any:
    """Create an object of a user's class. Raises ConfigError."""
    try:
        return kind(*arguments)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a user's constructor may raise anything
        raise ConfigError(f"{where}: making {name!r} raised {describe_raised(error)}") from error


@contextlib.contextmanager
def contain_exits() -> Iterator[None]:
    """Context for a user's function that turns its exits into UserExit, an ordinary error.

    Exits are ``sys.exit`` and KeyboardInterrupt. Otherwise the exit of a task would end the event loop and the process.
    A real Ctrl-C is not converted.
    """
    try:
        yield
    except SystemExit as error:
        raise UserExit(f"SystemExit: {error}" if str(error) else "SystemExit") from error
    except KeyboardInterrupt as error:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        raise UserExit("KeyboardInterrupt") from error


class UserExit(Exception):
    """A user's function tried to end the process."""


def describe_raised(error: BaseException) -> str:
    """The error that a user's function raised in one line, and the innermost line of the user's own code in it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{describe(error)}{place}"


def _is_users(file: str) -> bool:
    """Whether ``file`` is neither of this package, nor of Python or an installed package."""
    path = Path(file)
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return not (is_installed or file.startswith("<") or any(map(path.is_relative_to, _NOT_USERS)))


def describe(error: BaseException) -> str:
    """The error in one line."""
    text = first_line(error)
    if isinstance(error, UserExit):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
