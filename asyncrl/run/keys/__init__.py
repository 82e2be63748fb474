"""The keys of a run, in files: who may sign which messages, and what of others has been heard."""
