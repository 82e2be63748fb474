"""Stand-in for torchvision.transforms.functional."""

from .._missing import missing as __getattr__  # noqa: F401, N807
