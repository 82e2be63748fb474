"""The asyncrl command; each verb has its own file."""
