"""The actors of a process, put together from a run file."""
