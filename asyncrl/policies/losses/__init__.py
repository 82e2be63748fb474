"""Policy losses per token, their ratios, and their aggregation into one number."""
