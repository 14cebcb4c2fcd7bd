"""Compares what a file claims of a table with the tensors that it holds, before it is built."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from fairseq_dpq.files.errors import printable
from fairseq_dpq.forms.base import Form, Layout, Settings, Tensors
from fairseq_dpq.native.buffers import storage_bytes
from fairseq_dpq.sizes import MAX_DIM
from fairseq_dpq.training.initialization import checked_padding

Size = Tuple[int, int, Optional[int]]  # num_embeddings, embedding_dim, padding_idx


def check_size(num_embeddings: Any, embedding_dim: Any, padding_idx: Any) -> None:
    """Raise ValueError for a shape that no table has."""
    check_type("num_embeddings", num_embeddings, int)
    check_type("embedding_dim", embedding_dim, int)
    if not 1 <= embedding_dim <= MAX_DIM:
        raise ValueError(f"embedding_dim={embedding_dim}: must be from 1 to {MAX_DIM}")
    if padding_idx is not None:
        check_type("padding_idx", padding_idx, int)
    checked_padding(num_embeddings, padding_idx)


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise ValueError for a value of another type; a bool is not an int here."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{printable(name)}: expected {kind.__name__}, found {shown(value)}")


def shown(value: Any) -> str:
    """A value of a file, short enough for an error of one line."""
    text = printable(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def check_settings(form: type[Form], settings: Any) -> None:
    """Raise ValueError for settings that are not those of the form."""
    check_type("settings", settings, dict)
    if set(settings) != set(form.setting_types):
        known = ", ".join(form.setting_types)
        raise ValueError(f"{form.kind} has the settings {known}; found {shown([*settings])}")
    for name, kind in form.setting_types.items():
        check_type(name, settings[name], kind)


def check_tensor(name: str, tensor: Tensor | None, want: Layout) -> None:
    """Raise ValueError for a tensor that is not what it must be."""
    if tensor is None:
        if want.optional:
            return
        raise ValueError(f"{name} is missing")
    if tuple(tensor.shape) != want.shape:
        raise ValueError(
            f"size mismatch for {name}: expected {want.shape}, found {tuple(tensor.shape)}"
        )
    if tensor.dtype not in want.dtypes:
        kinds = " or ".join(map(str, want.dtypes))
        raise ValueError(f"{name}: expected {kinds}, found {tensor.dtype}")
    dense = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or storage_bytes(tensor) < dense:
        raise ValueError(f"{name}: expected {dense} bytes of its own, found an expanded tensor")


def is_plain(tensor: Any) -> bool:
    """Whether a tensor has its numbers in memory, one after the other or with strides."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def check_form(form: type[Form], size: Size, settings: Settings, tensors: Tensors) -> None:
    """Raise ValueError unless the tensors are exactly those of the form, shape and dtype alike."""
    check_size(*size)
    check_settings(form, settings)
    layout = form.layout(size[0], size[1], settings, tensors)
    for name, want in layout.items():
        check_tensor(name, tensors.get(name), want)
    for name in sorted(set(tensors) - set(layout)):
        raise ValueError(f"{form.kind} has no tensor {printable(name)}")


def build_form(form: type[Form], size: Size, settings: Settings, tensors: Tensors) -> Form:
    """The form of tensors that a file holds; ValueError for what they cannot be."""
    check_form(form, size, settings, tensors)
    form.check_contents(size[1], settings, tensors)
    return form.from_tensors(*size, settings, tensors)


def check_version(found: Any, known: int, written_by: Any) -> None:
    """Raise ValueError for a file of another format version."""
    text = str(found)
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9):
        raise ValueError(f"there is no format version {shown(found)}")
    if int(text) != known:
        by = f", written by {shown(written_by)}" if written_by else ""
        fix = (
            "update fairseq-dpq, or install the package that adds it"
            if int(text) > known
            else "write the file again from its training checkpoint or full model"
        )
        raise ValueError(
            f"its format is version {text}{by}; this fairseq-dpq reads version {known}: {fix}"
        )
