"""Support for SGLang servers on machines without a GPU, for tests and rehearsals; no GPU server sees any of it.

stubs   modules that SGLang imports and never calls on a CPU, where they are not installed
plugin  a plugin of SGLang: host buffers, forked processes, and one gate without Triton
Both folders are on PYTHONPATH of a CPU server only (server.py).
"""
