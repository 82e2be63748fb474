"""What the asyncrl command does: a verb of cli.py a file."""
