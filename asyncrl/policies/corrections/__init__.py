"""Off-policy corrections and their diagnostics."""
