"""Stand-in for torchvision, which SGLang's image models import at module level. Text models never call it."""

__version__ = "0.0.0+asyncrl"
