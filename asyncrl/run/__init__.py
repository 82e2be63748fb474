"""Builds and supervises a run: adapters, actors, processes, the run folder."""
