"""Float32 inside models that run in less."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager

import torch


def float32_math(device: torch.device) -> ContextManager[Any]:
    """Switch autocast off: responses and codes are float32 whatever the model runs in."""
    if device.type in ("cpu", "cuda"):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
