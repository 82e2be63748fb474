"""Stand-in for torchvision, which SGLang's image models import at module level. A server of a text model never calls it."""

__version__ = "0.0.0+asyncrl"
