"""Harnesses: what lets an agent work on a task, in processes of its own, and says how well it did."""
