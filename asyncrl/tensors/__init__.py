"""Weights as bytes: snapshots and safetensors files."""
