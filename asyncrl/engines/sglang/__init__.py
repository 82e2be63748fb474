"""SGLang servers as engines."""
