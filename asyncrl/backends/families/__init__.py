"""Model families that the megatron backend trains, one file each, and the code they share."""
