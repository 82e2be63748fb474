"""Stand-in for torchvision, which SGLang's image models import at module level. A text model's server calls nothing."""

__version__ = "0.0.0+asyncrl"
