"""`asyncrl plan`: measures an engine and the learner of a run, and says how to share GPUs between them."""
