"""The rollout worker: one engine, the stages that use it (training first), and the follower of new weights."""
