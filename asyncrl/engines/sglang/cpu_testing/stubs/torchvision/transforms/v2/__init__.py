"""Stand-in for torchvision.transforms.v2."""

from .. import InterpolationMode as InterpolationMode
