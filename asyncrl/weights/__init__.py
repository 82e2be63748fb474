"""Adapters of the WeightChannel port: how new weights reach the engines."""
