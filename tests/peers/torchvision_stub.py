"""Import this before transformers' vision code where torchvision is the plain package without its compiled operators.

The wheel of torchvision without its own build of torch lacks two compiled operators. It still describes them to the
tracer when it is imported, and fails there. None of the image code that transformers uses calls them: declaring their
signatures is enough.
"""

import importlib.util

import torch

_library: torch.library.Library | None = None


def declare_operators() -> None:
    """Schemas of torchvision's compiled operators, unless torchvision brings them."""
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return
    _library = torch.library.Library("torchvision", "DEF")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


declare_operators()
