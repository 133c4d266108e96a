"""A compact U-Net for image restoration, and a wrapper that runs any network on images of any size. Independent of data sets.

Shape suffixes: N images, C channels, H and W height and width; values of images are in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, pad, silu

from hftune.errors import ConfigError

GROUPS = 8
"""Groups of each GroupNorm; widths are multiples of it. Unlike BatchNorm, it does not depend on the micro-batch."""


class Block(nn.Module):
    """Residual block of two 3x3 convolutions, each after GroupNorm and SiLU.

    The residual path keeps what the norms remove: brightness and contrast of the image.
    Source: He et al. 2016, "Identity Mappings in Deep Residual Networks".
    """

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1)
        self.direct = nn.Conv2d(in_channels, out_channels, kernel_size=1) if in_channels != out_channels else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        h_NCHW = self.conv1(silu(self.norm1(x_NCHW)))
        return self.direct(x_NCHW) + self.conv2(silu(self.norm2(h_NCHW)))


@torch.no_grad()
def from_around(image_N3HW: Tensor, whole_N1HW: Tensor) -> Tensor:
    """Return images, which are 1 in ``whole``, with the other pixels filled smoothly with the colours around them.

    Halves the image repeatedly, averaging whole pixels only. A hole gets the colours of the finest level that has any.
    Source: "pull-push" of Gortler, Grzeszczuk, Szeliski, Cohen 1996, "The Lumigraph".
    """
    if max(image_N3HW.shape[2:]) == 1:
        return image_N3HW
    share_N1HW = avg_pool2d(whole_N1HW, 2, ceil_mode=True)
    sum_N3HW = avg_pool2d(image_N3HW * whole_N1HW, 2, ceil_mode=True)
    coarse_N3HW = from_around(sum_N3HW / share_N1HW.clamp(min=1e-6), (share_N1HW > 0).to(share_N1HW.dtype))
    pushed_N3HW = interpolate(coarse_N3HW, size=image_N3HW.shape[2:], mode="bilinear", align_corners=False)
    return torch.where(whole_N1HW > 0, image_N3HW, pushed_N3HW)


class UNet(nn.Module):
    """Restore an image, given its mask: the network learns the difference to the image with its holes filled from around them.

    There are two outputs, for the inside and the outside of the mask, because the difference is large inside and almost zero
    outside. Otherwise, the first thousands of steps would go into learning that, and into finding the surrounding colours.
    Source: Ronneberger, Fischer, Brox 2015, "U-Net", with residual blocks, and strided convolutions to go down.

    Args:
        width: channels at full resolution, a multiple of 8; doubled at each halving.
        depth: number of times that height and width are halved.
    """

    def __init__(self, width: int = 32, depth: int = 3):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.multiple = 2**depth
        """Height and width must be multiples of it."""
        self.first = nn.Conv2d(7, width, kernel_size=3, padding=1)
        self.down = nn.ModuleList(Block(n, n) for n in widths[:-1])
        self.shrink = nn.ModuleList(nn.Conv2d(n, 2 * n, kernel_size=3, stride=2, padding=1) for n in widths[:-1])
        self.middle = Block(widths[-1], widths[-1])
        self.grow = nn.ModuleList(nn.Conv2d(2 * n, n, kernel_size=1) for n in reversed(widths[:-1]))
        self.up = nn.ModuleList(Block(2 * n, n) for n in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 6, kernel_size=3, padding=1)
        nn.init.zeros_(self.last.weight)  # training begins at the filled image
        nn.init.zeros_(self.last.bias)

    def forward(self, image_N3HW: Tensor, mask_N1HW: Tensor) -> Tensor:
        """Return images (N, 3, H, W)."""
        filled_N3HW = from_around(image_N3HW, 1 - mask_N1HW)
        # In [-1, 1], as the initialization of the convolutions expects inputs around 0.
        x_NCHW = self.first(torch.cat([2 * image_N3HW - 1, 2 * filled_N3HW - 1, mask_N1HW], dim=1))
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            skips.append(block(x_NCHW))
            x_NCHW = shrink(skips[-1])
        x_NCHW = self.middle(x_NCHW)
        for grow, block in zip(self.grow, self.up, strict=True):
            wide_NCHW = grow(x_NCHW).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            x_NCHW = block(torch.cat([wide_NCHW, skips.pop()], dim=1))
        inside_N3HW, outside_N3HW = self.last(silu(x_NCHW)).chunk(2, dim=1)
        return filled_N3HW + torch.where(mask_N1HW > 0, inside_N3HW, outside_N3HW)


class AnySize(nn.Module):
    """Runs a network on images of any size, with the same result as for each image alone.

    A batch holds images of several sizes, padded at the right and at the bottom. The network gets the images of each size
    together and without that padding, which would influence its norms and convolutions at the edges. If the network has an
    attribute ``multiple``, the last row and column are repeated up to a multiple of it.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, image: Tensor, mask: Tensor, size: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Return restored images (N, 3, H, W).

        Args:
            image: damaged images (N, 3, H, W). mask: (N, 1, H, W), 1 for damaged pixels, 0 elsewhere.
            size: height and width of each image, N of both; None if all have size H, W.
        """
        if size is None:
            return self._one_size(image, mask)
        output_N3HW = torch.zeros_like(image)
        sizes = [tuple(pair) for pair in size]
        for height, width in sorted(set(sizes)):
            places = [n for n, other in enumerate(sizes) if other == (height, width)]
            indices = torch.tensor(places, pin_memory=image.is_cuda).to(image.device, non_blocking=True)
            restored = self._one_size(image[indices, :, :height, :width], mask[indices, :, :height, :width])
            edges = (0, image.shape[3] - width, 0, image.shape[2] - height)
            output_N3HW = output_N3HW.index_copy(0, indices, pad(restored, edges).to(output_N3HW.dtype))
        return output_N3HW

    def _one_size(self, image_N3HW: Tensor, mask_N1HW: Tensor) -> Tensor:
        height, width = image_N3HW.shape[2:]
        multiple = getattr(self.network, "multiple", 1)
        edges = (0, -width % multiple, 0, -height % multiple)
        if any(edges):
            image_N3HW, mask_N1HW = (pad(values, edges, mode="replicate") for values in (image_N3HW, mask_N1HW))
        output_N3HW = self.network(image_N3HW, mask_N1HW)
        if getattr(output_N3HW, "shape", None) != image_N3HW.shape:
            raise ConfigError(
                f"task.network: for images {tuple(image_N3HW.shape)} {type(self.network).__name__} returned "
                f"{tuple(getattr(output_N3HW, 'shape', ())) or type(output_N3HW).__name__}, not images of the same shape."
            )
        return output_N3HW[..., :height, :width]
