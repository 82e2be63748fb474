"""How a run is checked, assembled, started and kept up."""
