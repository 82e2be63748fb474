"""Sources of prompts and models: data files to prompt groups, GGUF files to Hugging Face folders."""
