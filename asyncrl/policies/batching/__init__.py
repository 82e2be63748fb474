"""From trajectory groups to packed micro-batches."""
