"""A long-lived process that runs a harness written in Python for many samples at once. A script without asyncrl.

    python child.py package.module:Harness
    python child.py --check package.module:Harness    check that the harness loads; options as JSON on standard input

The script needs Python 3.10 and the harness's imports. It loads protocol.py and outage.py by their paths. Standard
input is a socket. Each byte on it carries the file descriptor of a connection for one sample. The connection carries
one line of JSON each way: the request {"task", "endpoint", "options"}, then the response {"outcome"} or {"error",
"outage"}, each with "resident_mib". If the parent closes its end, the sample is cancelled. The child closes its end
once the sample has ended. The process exits when standard input ends.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import resource
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LARGEST_LINE = 2**26
MOST_EXPLAINED = 100
MOST_THREADS = 4096
"""Of plain functions and asyncio.to_thread. asyncio has at most 32, which calls that never return would use up."""


class Runner:
    """Runs samples with one harness, which is created for the first sample."""

    def __init__(self, address: str, protocol: Any, outage: Any) -> None:
        """protocol, outage: those modules"""
        self._address, self._protocol, self._outage = address, protocol, outage
        self._harness: Any = None
        self._samples: set[asyncio.Task[None]] = set()
        self._explained: set[str] = set()
        """Errors whose traceback was already printed."""

    async def serve(self, control: socket.socket) -> None:
        """consumes: connections    waits for: the next connection    woken by: the parent, also by its exit"""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))

        def take() -> None:
            data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                loop.remove_reader(control)
                has_ended.set()
            for descriptor in descriptors:
                sample = loop.create_task(self._sample(socket.socket(fileno=descriptor)))
                self._samples.add(sample)
                sample.add_done_callback(self._samples.discard)

        loop.add_reader(control, take)
        await has_ended.wait()

    async def _sample(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LARGEST_LINE)
        try:
            line = await reader.readline()
            if not line.endswith(b"\n"):  # cancelled before the request arrived
                return
            request = json.loads(line)
            playing = asyncio.ensure_future(self._play(request))
            hung_up = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({playing, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            hung_up.cancel()
            playing.cancel()  # no effect if done
            await asyncio.wait({playing, hung_up})
            if not playing.cancelled():
                answer = {**playing.result(), "resident_mib": resident_mib()}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except OSError:  # the parent no longer wants the answer
            pass
        finally:
            writer.close()

    async def _play(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._harness is None:
                self._harness = make_harness(self._address, request["options"])
            task, endpoint = self._protocol.Task(**request["task"]), self._protocol.Endpoint(**request["endpoint"])
            given = await call_harness(self._harness, task, endpoint)
            return {"outcome": self._protocol.outcome_of(given).as_json()}
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code may even raise SystemExit
            reason = one_line(error)
            if reason not in self._explained and len(self._explained) < MOST_EXPLAINED:
                self._explained.add(reason)
                traceback.print_exc()
            return {"error": reason, "outage": self._outage.outage_kind(error)}


def make_harness(address: str, options: dict[str, Any]) -> Any:
    """Return the user's function, or an instance of the user's class."""
    found, arguments = look_up(address, options)
    return found(*arguments) if inspect.isclass(found) else found


def find_misfit(found: Any) -> str:
    """Return why ``found`` (for a class: its instances) cannot be called as a harness; "" if it can."""
    is_class = inspect.isclass(found)
    call = (
        next((vars(one)["__call__"] for one in found.__mro__ if "__call__" in vars(one)), None) if is_class else found
    )
    if not callable(call):
        return "has no __call__" if is_class else "cannot be called"
    try:
        signature = inspect.signature(call)
    except ValueError:  # a function that is not written in Python
        return ""
    try:
        signature.bind(*[None] * (3 if is_class else 2))
    except TypeError as error:
        return f"takes other arguments: {error}"
    return ""


def one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def look_up(address: str, options: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """Return the user's function or class, and the constructor arguments. Raises any error of the user's code."""
    name, _, attribute = address.rpartition(":")
    module = load_file("asyncrl_harness", Path(name)) if name.endswith(".py") else import_module(name)
    found: Any = getattr(module, attribute)
    if problem := find_misfit(found):
        raise TypeError(f"{address} {problem}; a harness is called with (task, endpoint)")
    options_type: Any = getattr(module, "Options", None) if inspect.isclass(found) else None
    if options and options_type is None:
        raise TypeError(f"{address} takes no options, got {', '.join(options)}; a class with an Options beside it does")
    return found, () if options_type is None else (options_type(**options),)


async def call_harness(harness: Any, task: Any, endpoint: Any) -> Any:
    """Call the harness and return its result. A plain function runs in a thread."""
    call = harness if inspect.isroutine(harness) else harness.__call__
    if inspect.iscoroutinefunction(call):
        return await harness(task, endpoint)
    given = await asyncio.to_thread(harness, task, endpoint)
    return await given if inspect.isawaitable(given) else given


def resident_mib() -> float:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:  # not Linux: use the peak instead
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def import_module(name: str) -> Any:
    """Import the user's module. Raises ImportError if its file is hidden by an installed module of the same name."""
    module, top = importlib.import_module(name), name.partition(".")[0]
    mine, found = Path(f"{top}.py"), getattr(sys.modules[top], "__file__", None) or "a module of Python"
    if mine.exists() and mine.resolve() != Path(found).resolve():
        raise ImportError(f"{mine} is hidden by {found}, a module of the same name; give yours another name")
    return module


def load_file(name: str, path: Path) -> Any:
    """Load a file as the top-level module ``name``."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(address: str) -> int:
    """Return 0 if the harness loads; else print the problem as the last line of standard output and return 1."""
    try:
        look_up(address, json.load(sys.stdin))
    except BaseException as error:  # user code may even raise SystemExit
        print("\n" + one_line(error), flush=True)
        return 1
    return 0


def main() -> None:
    del sys.path[0]  # this file's folder; a harness must not import modules from there
    sys.path.append(os.getcwd())  # last, so that a user's http.py does not replace Python's
    if sys.argv[1] == "--check":
        os._exit(check(sys.argv[2]))
    control = socket.socket(fileno=os.dup(0))
    control.setblocking(False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    protocol = load_file("asyncrl_harness_protocol", Path(__file__).with_name("protocol.py"))
    outage = load_file("asyncrl_outage", Path(__file__).parents[3] / "outage.py")
    asyncio.run(Runner(sys.argv[1], protocol, outage).serve(control))
    os._exit(0)  # a thread of a harness may be in a call that never returns


if __name__ == "__main__":
    main()
