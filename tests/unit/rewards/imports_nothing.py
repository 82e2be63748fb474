"""A reward whose module imports what is not installed."""

import nothing  # type: ignore[import-not-found]  # noqa: F401
