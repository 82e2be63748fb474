"""The asyncrl command: one file per verb."""
