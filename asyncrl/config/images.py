"""[images] of the run file: limits of the images that prompts and agents show to a vision-language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.checks import Positive, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesSection:
    max_pixels: Annotated[int, Range(low=1, high=2**26)] = 2**24
    """Most pixels of an image as its file has them, at most 2^26. A larger one fails its row, or the request of an
    agent. How far the model's processor then scales an image down is in its preprocessor_config.json."""
    max_per_prompt: Positive[int] = 16
    """Most images of a row. What an agent shows is limited by the model's context alone."""
    allow_urls: bool = False
    """Fetch images that the data names by http(s) URL, whatever host that is, each time that the row is drawn or
    checked. Agents' URLs are never fetched."""
    directory: str = ""
    """Folder of the images that the data names by a relative path; empty: the folder of the data file."""
