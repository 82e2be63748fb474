"""asyncrl: post-training of language models by reinforcement learning in which nothing waits."""

__version__ = "0.1.0"
