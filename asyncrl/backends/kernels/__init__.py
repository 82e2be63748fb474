"""Kernels shared by backends: fused layers and the output layer."""
