"""Training backends: implementations of the Backend port."""
