"""Benchmarks. Each module is a command, `python -m benchmarks.NAME`, that prints a table and JSON lines."""
