"""Training backends: adapters of the Backend port."""
