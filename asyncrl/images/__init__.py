"""Images of prompts and environments: read, kept by digest, and made into a model's patches."""
