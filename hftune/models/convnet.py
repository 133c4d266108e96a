"""A small convolutional network for images of one size. Independent of data sets and losses.

Shape suffixes: N samples, C channels, H and W height and width, F features, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu


class ConvNet(nn.Module):
    """Two 5x5 convolutions, each pooled by 2, and two linear layers.

    With ``width`` 1 and grey images of 28 x 28 pixels it has 21,840 parameters.
    Source: PyTorch's basic MNIST example, as Databricks' notebooks on TorchDistributor and Horovod train it.

    Args:
        image_size: height and width in pixels, at least 16, so that something is left after two convolutions and poolings.
        in_channels: 1 for grey, 3 for colour.
        width: multiplier of the 10 and 20 channels and the 50 hidden features.
        dropout: dropout probability of the second convolution's channels and of the hidden features.
    """

    def __init__(self, image_size: int = 28, in_channels: int = 1, num_classes: int = 10, width: int = 1, dropout: float = 0.5):
        super().__init__()
        side = ((image_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(in_channels, 10 * width, kernel_size=5)
        self.conv2 = nn.Conv2d(10 * width, 20 * width, kernel_size=5)
        self.drop_channels = nn.Dropout2d(dropout)
        self.linear1 = nn.Linear(20 * width * side * side, 50 * width)
        self.drop_features = nn.Dropout(dropout)
        self.linear2 = nn.Linear(50 * width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits (N, K) of normalized images (N, C, H, W)."""
        x_NCHW = relu(max_pool2d(self.conv1(image), 2))
        x_NCHW = relu(max_pool2d(self.drop_channels(self.conv2(x_NCHW)), 2))
        x_NF = relu(self.linear1(x_NCHW.flatten(1)))
        return self.linear2(self.drop_features(x_NF))
