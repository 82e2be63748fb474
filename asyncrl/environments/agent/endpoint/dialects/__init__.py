"""The protocols that agents speak, one file each; dialect.py defines the interface."""
