"""Policy losses per token, their ratios, and how they become one number."""
