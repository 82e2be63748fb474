"""Runs programs that nobody has read, such as those that models write, and lets out only their output."""
