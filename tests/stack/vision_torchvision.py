"""What transformers' Qwen-VL processors use of torchvision, in plain torch, for a machine without torchvision.

The tests copy this file to a folder on PYTHONPATH, as torchvision.py. torchvision's own builds need the torch build
that they were made with, and of those only the CUDA one is where torch's CPU build is not looked for. vLLM imports
these names for most of its vision models, and transformers for all processors that can read videos.
"""

import enum
import sys
from types import ModuleType

import numpy as np
import torch

__version__ = "0.28.0"
__path__ = []


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(image):
    array = np.array(image)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1).contiguous()


def resize(image, size, interpolation=InterpolationMode.BILINEAR, antialias=True):
    flat = image.reshape(-1, *image.shape[-3:]).float()
    flat = torch.nn.functional.interpolate(flat, size=list(size), mode=interpolation.value, antialias=antialias)
    if image.dtype == torch.uint8:
        flat = flat.round().clamp(0, 255)
    return flat.to(image.dtype).reshape(*image.shape[:-2], *size)


def normalize(image, mean, std):
    mean, std = (torch.as_tensor(value, dtype=image.dtype).reshape(-1, 1, 1) for value in (mean, std))
    return (image - mean) / std


def _module(name, **names):
    module = ModuleType(f"torchvision.{name}")
    module.__path__ = []
    vars(module).update(names)
    sys.modules[module.__name__] = module
    return module


_functions = {one.__name__: one for one in (InterpolationMode, pil_to_tensor, resize, normalize)}
io = _module("io", ImageReadMode=None, decode_image=None, read_video=None)
_v2 = _module("transforms.v2", functional=_module("transforms.v2.functional", **_functions))
_functional = _module("transforms.functional", **_functions)
transforms = _module("transforms", InterpolationMode=InterpolationMode, functional=_functional, v2=_v2)
