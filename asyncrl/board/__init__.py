"""The web page that shows runs: curves, lanes of actors, groups and trajectories (`asyncrl board`)."""
