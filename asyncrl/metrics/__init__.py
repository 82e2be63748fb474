"""The metrics of a run: one schema, with the same names on the console, in metrics.jsonl and in W&B."""
