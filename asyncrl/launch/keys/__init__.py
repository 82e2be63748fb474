"""The key files of a run: who may sign which messages, and which messages of others were heard."""
