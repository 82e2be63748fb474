"""How many GPUs should sample and how many should train: predicts a run from the timings of its parts. Pure."""
