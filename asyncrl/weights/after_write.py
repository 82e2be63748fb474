"""The user's function that is called when a version is stored (weights.after_write)."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config import plugins
from asyncrl.errors import AsyncRLError
from asyncrl.messages import WeightVersion

AfterWrite = Callable[[WeightVersion], None]


def load_after_write(name: str) -> AfterWrite | None:
    """Return the function; None for "". Raises ConfigError.

    It raises AsyncRLError for whatever the user's raises.
    """
    where = "weights.after_write"
    if not name:
        return None
    call = plugins.load(name, where=where)
    plugins.check_call(call, ("version",), wanted=f"{where}: {name!r} must be a function of one argument, version")

    def after_write(version: WeightVersion) -> None:
        try:
            with plugins.contain_exits():
                call(version)
        except Exception as error:  # user code may raise anything
            raise AsyncRLError(f"{where}: {name} raised {plugins.describe_raised(error)}") from error

    return after_write
