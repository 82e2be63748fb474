"""An engine that runs a Hugging Face model in this process."""
