"""`asyncrl plan`: measures an engine and the learner of a run, and recommends how to split GPUs between them."""
