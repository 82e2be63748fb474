"""The numbers a run reports: one schema, the same names on the console, in metrics.jsonl and in W&B."""
