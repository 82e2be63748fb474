"""A tiny task and policy whose expected reward is exact, as the parts of a run: engine, backend, reward, files."""
