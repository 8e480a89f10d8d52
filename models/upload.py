"""Host tensors brought to a device without waiting for what still runs there."""

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """x on `device`; from the CPU to a GPU by way of pinned memory, so that the host can go on."""
    target = torch.device(device)
    if target.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(target, non_blocking=True)
    return x.to(target)
