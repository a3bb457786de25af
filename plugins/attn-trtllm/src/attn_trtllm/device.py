"""What the device is: asked once, when a backend is created."""

from __future__ import annotations

import torch

from attn_core.errors import BindError


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device. Raises :class:`BindError` for any other device."""
    if device.type != "cuda" or torch.version.hip:
        raise BindError("the TensorRT-LLM kernels run on NVIDIA GPUs only", f"device   {device}")
    return torch.cuda.get_device_capability(device)


def processors(device: torch.device) -> int:
    """Number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def capturing(device: torch.device) -> bool:
    """Whether work on the current stream is being recorded into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
