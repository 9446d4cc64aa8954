"""The whole model on every rank, for what a model spread over ranks cannot do: write text, answer a probe, draw."""

import torch
from torch.distributed.tensor import DTensor

from perilune.model import Decoder
from perilune.model.lora import copy_places
from perilune.train.parallel import Parallel
from perilune.train.stages import tensors_of_all_stages

MAX_PARAMETERS = 2_000_000_000
"""Of a model that is gathered: 8 GB in float32 beside what training needs."""


def whole_model(parallel: Parallel, device: torch.device) -> Decoder | None:
    """A plain copy in eval mode; None for a model too large. All ranks have to call it."""
    spread = parallel.model
    if parallel.num_parameters > MAX_PARAMETERS:
        return None
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in spread.state_dict().items()
    }
    whole = Decoder(spread.config).to(device)
    copy_places(spread, whole)
    whole.load_state_dict(tensors_of_all_stages(parallel, state, device))
    return whole.eval()
