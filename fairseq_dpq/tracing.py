"""Whether torch only records what is done, so that nothing may depend on the numbers."""

from __future__ import annotations

from typing import Any

import torch

_jit_tracing = getattr(torch._C, "_get_tracing_state", lambda: None)
_compiler: Any = getattr(torch, "compiler", None)
_compiling: Any = getattr(_compiler, "is_compiling", lambda: False)

# Before it came, the ONNX exporter did not tell that it was at work.
_own_operators = hasattr(_compiler, "is_exporting")


def is_tracing() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace is at work."""
    return _compiling() or _jit_tracing() is not None


def is_onnx() -> bool:
    """Whether a graph of ONNX is written."""
    return torch.onnx.is_in_onnx_export()


def is_graph() -> bool:
    """Whether torch.compile or torch.export is at work, so that operators of one's own can be used.
    ONNX has standard operators alone, torch.jit.trace is for programs without this package."""
    return _compiling() and _own_operators and not is_onnx()
