"""How fast may one learn from old tokens: held-out reward by learning rate, staleness and guard."""
