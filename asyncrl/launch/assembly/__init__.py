"""Assembles the actors of a process from a run file."""
