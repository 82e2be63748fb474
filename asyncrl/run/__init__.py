"""How a run is checked, put together, kept up, recorded and watched; ``registry`` is the only file that names adapters."""
