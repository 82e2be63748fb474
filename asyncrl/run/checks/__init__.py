"""What is checked before a run, its learner or a rollout worker starts, and refused in one line."""
