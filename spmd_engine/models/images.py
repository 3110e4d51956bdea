"""What a model of images is built for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageShape:
    """The size of all images of a data set, and the number of their classes."""

    height: int = 8
    width: int = 8
    channels: int = 1
    classes: int = 10

    def __str__(self) -> str:
        return f"images of {self.height} x {self.width} x {self.channels} in {self.classes} classes"
