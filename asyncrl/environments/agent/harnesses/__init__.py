"""Harnesses run an agent on a task in separate processes and return its reward."""
