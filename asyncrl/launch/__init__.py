"""How a run is checked, assembled, supervised, recorded and watched. Only ``registry`` names the adapters."""
