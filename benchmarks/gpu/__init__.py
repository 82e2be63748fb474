"""Benchmarks on GPUs: the real commands as processes, SGLang servers that outlive the runs they serve."""
