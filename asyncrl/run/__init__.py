"""How a run is checked, put together, kept up, recorded and watched; ``registry`` alone names the adapters."""
