"""The Megatron-Core backend."""
