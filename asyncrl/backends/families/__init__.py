"""Families of models that the megatron backend trains: one file each, and what they share."""
