"""The rollout worker: one engine, the stages that use it (training first), and what keeps its weights new."""
