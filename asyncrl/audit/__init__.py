"""A run as recorded by its folder and its bus: rows, samples, its account, its replay."""
