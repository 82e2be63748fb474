"""`asyncrl plan`: measures an engine and the learner, and simulates which split of the GPUs trains most."""
