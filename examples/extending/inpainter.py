"""A network of your own for ImageRestoration: any torch.nn.Module that takes image and mask and returns images."""

import torch
from torch import nn


class Inpainter(nn.Module):
    """Two convolutions; pixels that are not damaged stay as they are."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, width, 5, padding=2), nn.ReLU(), nn.Conv2d(width, 3, 5, padding=2))

    def forward(self, image, mask):
        return torch.where(mask > 0, self.layers(torch.cat([image, mask], dim=1)), image)
