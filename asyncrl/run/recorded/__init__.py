"""A run as its folder and its bus record it: rows, samples, its account, its replay."""
