"""How many GPUs should sample and how many should train: what a run would reach, from what its parts take. Pure."""
