"""Sandboxes for untrusted programs, such as those that models write. Only a program's output leaves its sandbox."""
