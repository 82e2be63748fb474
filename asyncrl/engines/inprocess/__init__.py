"""A Hugging Face model in this process as an engine."""
