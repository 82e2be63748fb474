"""The protocols that agents speak, one file each (dialect.py says what a file has)."""
