"""The port of data sources: rows supplied by user code, "package.module:object" in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class DataSource(Protocol):
    """data.source: rows supplied by user code. The learner's process makes one instance, with the class's ``Options``,
    if it has one, from [data.options].

        def __init__(self)              or  def __init__(self, options)
        def at(self, position)

    Its state is not saved. A resumed run continues at the position after the last row it took, and may ask again for
    earlier rows whose prompts were lost.
    """

    def at(self, position: int) -> Mapping[str, Any] | None:
        """Return row ``position``, counted from 0: a table with the columns that [data] names; None after the last row.

        Every process must return the same row for the same position, or the groups of a resumed run are refused."""
        ...
