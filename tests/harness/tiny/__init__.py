"""A tiny task and a policy whose expected reward is exact, as parts of a run: engine, backend, reward, files."""
