"""The learner: reads trajectories, makes batches, trains, publishes weights, saves checkpoints."""
