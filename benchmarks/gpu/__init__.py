"""Benchmarks on GPUs: the real commands as processes, and SGLang servers that outlive the runs they serve."""
