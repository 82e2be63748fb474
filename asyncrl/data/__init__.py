"""Where prompts and models come from: files to prompt groups, GGUF to Hugging Face folders."""
