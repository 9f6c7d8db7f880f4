"""The paper's networks by formula, since it names no layers: gradients, and the backward's work."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_bls.overlap.search.timeline import Layer

#: (2): parameters, and multiplications of a sample's forward.
Part = NDArray[np.float64]


def _convolution(size: int, kernel: int, inputs: int, outputs: int) -> Part:
    weights = kernel**2 * inputs * outputs
    return np.array([weights + 2 * outputs, weights * size**2])


def _separable(size: int, inputs: int, outputs: int) -> Part:
    return _convolution(size, 1, inputs, outputs) + 9 * inputs * np.array([1, size**2])


def _linear(inputs: int, outputs: int, times: int = 1) -> Part:
    return np.array([inputs * outputs + outputs, times * inputs * outputs])


def _vgg16() -> list[Part]:
    outputs = [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    sizes = [224] * 2 + [112] * 2 + [56] * 3 + [28] * 3 + [14] * 3
    shapes = zip(sizes, [3, *outputs], outputs, strict=False)
    found = [_convolution(size, 3, inputs, channels) for size, inputs, channels in shapes]
    return [*found, _linear(25088, 4096), _linear(4096, 4096), _linear(4096, 1000)]


def _resnet152() -> list[Part]:
    """Blocks, in the long stages two at a time."""
    found, inputs = [_convolution(112, 7, 3, 64)], 64
    for blocks, width, size in ((3, 64, 56), (8, 128, 28), (36, 256, 14), (3, 512, 7)):
        stage = [_convolution(size, 1, inputs, 4 * width)]  # the first block's shortcut
        for block in range(blocks):
            made = _convolution(size, 1, inputs, width) + _convolution(size, 3, width, width)
            stage[block:] = [sum(stage[block:]) + made + _convolution(size, 1, width, 4 * width)]
            inputs = 4 * width
        step = 2 if blocks > 3 else 1
        found += [np.sum(stage[at : at + step], axis=0) for at in range(0, blocks, step)]
    return [*found, _linear(2048, 1000)]


def _xception() -> list[Part]:
    found = [_convolution(149, 3, 3, 32), _convolution(147, 3, 32, 64)]
    for size, inputs, outputs in ((147, 64, 128), (74, 128, 256), (37, 256, 728)):
        pair = _separable(size, inputs, outputs) + _separable(size, outputs, outputs)
        found.append(pair + _convolution(size // 2, 1, inputs, outputs))
    last = _separable(19, 728, 728) + _separable(19, 728, 1024) + _convolution(10, 1, 728, 1024)
    found += [3 * _separable(19, 728, 728)] * 8 + [last]
    return [*found, _separable(10, 1024, 1536), _separable(10, 1536, 2048), _linear(2048, 1000)]


def _bert_base() -> list[Part]:
    """For sequences of 128, as the paper does not say; the embedding's gradient comes last."""
    embedding = np.array([768 * (30522 + 512 + 2 + 2), 1.0])
    feed_forward = _linear(768, 3072, 128) + _linear(3072, 768, 128)
    return [embedding, *([4 * _linear(768, 768, 128), feed_forward] * 12), _linear(768, 768)]


PARTS: dict[str, Callable[[], list[Part]]] = {
    "Xception": _xception,
    "ResNet152": _resnet152,
    "VGG16": _vgg16,
    "BERT-Base": _bert_base,
}


def layers(name: str, backward_us: float) -> list[Layer]:
    """A backward of so many microseconds, shared out by multiplications."""
    parts = PARTS[name]()[::-1]
    scale = backward_us / sum(work for _, work in parts)
    return [Layer(float(work * scale), round(4 * count)) for count, work in parts]
