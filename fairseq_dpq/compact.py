"""CompactEmbedding, the inference form: bit-packed codes and the value matrix, nothing else."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import Tensor, nn

from fairseq_dpq.config import code_bits
from fairseq_dpq.packing import (
    code_dtype,
    even_width,
    is_wide,
    pack_codes,
    row_bytes,
    unpack_codes,
    unpack_even,
    unpack_plan,
    unpack_rows,
)

# A value row of one of these sizes is copied as a single element, several times faster than as a
# row of small floats. Each dtype is only ever moved, never computed with.
_ELEMENT = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_CRC_BITS = 32


class CompactEmbedding(nn.Module):
    """Looks rows up as nn.Embedding does, from D codes a row and a small value matrix.

    `codes` hold one or two bytes a code for the fastest lookup, or, with `packed`, the bits alone;
    in the state_dict they are always packed: `codes` (n, bytes), `values` (rows, d/D), and
    `sizes` (D,) where groups have different numbers of codes. Value rows of group j follow those
    of group j - 1; with `share_subspaces` all groups use the same rows. `codes_crc32` (32,) bool
    tells damaged codes from good ones; as booleans, because averaging checkpoints, which would
    turn codes into noise, stops at a boolean with an error.
    """

    __jit_unused_properties__ = ("weight", "nbytes", "saved_nbytes")

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        codes: Tensor
        values: Tensor
        offsets: Tensor
        plan: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        K: int,
        D: int,
        share_subspaces: bool = False,
        sizes: Sequence[int] | None = None,
        packed: bool = False,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        """`sizes` gives each group's number of codes where that is not K for all of them."""
        super().__init__()
        if D < 1 or embedding_dim % D:
            raise ValueError(f"D={D} does not divide embedding_dim={embedding_dim}")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx={padding_idx}: must be within the {num_embeddings} rows of the table"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.D = D
        self.share_subspaces = share_subspaces
        self.packed = packed
        self._allocate(list(sizes) if sizes is not None else [K] * D, dtype, device)

    def _allocate(self, sizes: list[int], dtype: torch.dtype | None, device: Any) -> None:
        """Make empty buffers for groups of these numbers of codes."""
        if len(sizes) != self.D or min(sizes) < 1 or (self.share_subspaces and len(set(sizes)) > 1):
            raise ValueError(f"sizes={sizes}: give the number of codes of each of {self.D} groups")
        self.sizes = sizes
        self.bits = [code_bits(size) for size in sizes]
        self.wide = is_wide(self.bits)
        self.even = even_width(self.bits)
        self.value_rows = sizes[0] if self.share_subspaces else sum(sizes)
        width = row_bytes(self.bits) if self.packed else self.D
        kind = torch.uint8 if self.packed else code_dtype(max(sizes))
        # A last row of zeros is what padding points at. It is not saved.
        rows = self.value_rows + (0 if self.padding_idx is None else 1)
        codes = torch.zeros(self.num_embeddings, width, dtype=kind, device=device)
        values = torch.zeros(rows, self.embedding_dim // self.D, dtype=dtype, device=device)
        offsets = [0 if self.share_subspaces else sum(sizes[:j]) for j in range(self.D)]
        self.register_buffer("codes", codes)
        self.register_buffer("values", values)
        self.register_buffer(
            "offsets", torch.tensor(offsets, dtype=torch.int32, device=device), persistent=False
        )
        plan = unpack_plan(self.bits).to(codes.device) if self.packed else torch.empty(0)
        self.register_buffer("plan", plan, persistent=False)

    @classmethod
    @torch.no_grad()
    def from_codes(
        cls,
        codes: Tensor,
        values: Tensor,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        sizes: Sequence[int] | None = None,
        packed: bool = False,
    ) -> CompactEmbedding:
        """From unpacked codes (n, D) and values (G, K, d/D), or (rows, d/D) with `sizes`."""
        n, D = codes.shape
        if values.dim() == 3:
            shared = values.shape[0] == 1 and D > 1
            K = values.shape[1]
            values = values.reshape(-1, values.shape[-1])
        else:
            if sizes is None:
                raise ValueError("values of shape (rows, d/D) need sizes")
            shared = values.shape[0] == sizes[0] and D > 1
            K = max(sizes)
        module = cls(
            n,
            embedding_dim,
            padding_idx,
            K=K,
            D=D,
            share_subspaces=shared,
            sizes=sizes,
            packed=packed,
            dtype=values.dtype,
            device=values.device,
        )
        module.values[: module.value_rows] = values
        module.codes.copy_(pack_codes(codes, module.bits) if packed else codes)
        return module

    @classmethod
    def from_file(cls, path: str | Path) -> CompactEmbedding:
        """From a file of fairseq-dpq-export, memory-mapped: rows are read when asked for."""
        from fairseq_dpq import exported

        return exported.read_embedding(path, cls)

    def forward(self, indices: Tensor) -> Tensor:
        flat = indices.reshape(-1)
        rows = self.codes.index_select(0, flat)
        if self.packed:
            rows = _unpack(rows, self.plan, self.wide, self.even, self.D)
        rows = rows + self.offsets  # (tokens, D): rows of the value matrix
        if self.padding_idx is not None:
            pad = (flat == self.padding_idx).unsqueeze(-1)
            rows = rows.masked_fill(pad, self.value_rows)
        out = _take_rows(self.values, rows.reshape(-1))
        return out.view(indices.shape + (self.embedding_dim,))  # noqa: RUF005, TorchScript knows no *

    @property
    def weight(self) -> Tensor:
        """The dense table, built anew at each call: for a tied output layer."""
        return self.dense()

    def dense(self) -> Tensor:
        """The table (n, d) that these codes and values stand for."""
        return self(torch.arange(self.num_embeddings, device=self.codes.device))

    def unpacked_codes(self) -> Tensor:
        """Codes (n, D) in one or two bytes each."""
        if not self.packed:
            return self.codes
        return unpack_codes(self.codes, self.bits, code_dtype(max(self.sizes)))

    def packed_codes(self) -> Tensor:
        """Codes at ceil(log2 K) bits each, (n, bytes), as they are saved."""
        return self.codes if self.packed else pack_codes(self.codes, self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes that this module holds in memory."""
        return sum(b.numel() * b.element_size() for b in self.buffers())

    @property
    def saved_nbytes(self) -> int:
        """Bytes of the tensors of its state_dict."""
        uneven = 4 * self.D if len(set(self.sizes)) > 1 else 0
        values = self.value_rows * self.values.shape[1] * self.values.element_size()
        return self.num_embeddings * row_bytes(self.bits) + values + uneven + _CRC_BITS

    def compression_ratio(self) -> float:
        """Bytes of the full float32 table over the bytes that are saved."""
        return 4 * self.num_embeddings * self.embedding_dim / self.saved_nbytes

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        codes = self.packed_codes()
        destination[prefix + "codes"] = codes
        destination[prefix + "codes_crc32"] = codes_crc32(codes)
        destination[prefix + "values"] = self.values[: self.value_rows]
        if len(set(self.sizes)) > 1:
            destination[prefix + "sizes"] = torch.tensor(self.sizes, dtype=torch.int32)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        codes, values = state_dict.get(prefix + "codes"), state_dict.get(prefix + "values")
        missing_keys += [
            prefix + name for name, t in (("codes", codes), ("values", values)) if t is None
        ]
        if codes is None or values is None:
            return
        sizes = state_dict.get(prefix + "sizes")
        if sizes is not None:
            wanted = [int(size) for size in sizes]
        elif self.share_subspaces:
            wanted = [values.shape[0]] * self.D
        else:
            wanted = [values.shape[0] // self.D] * self.D
        if wanted != self.sizes and len(wanted) == self.D and min(wanted) >= 1:
            self._allocate(wanted, self.values.dtype, self.codes.device)
        codes_shape = (self.num_embeddings, row_bytes(self.bits))
        values_shape = (self.value_rows, self.values.shape[1])
        for name, found, shape in (
            ("codes", codes, codes_shape),
            ("values", values, values_shape),
        ):
            if tuple(found.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: the checkpoint has {tuple(found.shape)}, "
                    f"this model needs {shape}"
                )
        stored = state_dict.get(prefix + "codes_crc32")
        if stored is not None and stored.tolist() != codes_crc32(codes).tolist():
            error_msgs.append(
                f"{prefix}codes do not match their checksum: the file is damaged, or compact "
                "checkpoints were averaged; average the training checkpoints, then compact"
            )
        if not error_msgs:
            with torch.no_grad():
                self.values[: self.value_rows] = values
                if not self.packed:
                    codes = unpack_codes(codes, self.bits, self.codes.dtype)
                self.codes.copy_(codes)
        if strict:
            known = {prefix + name for name in ("codes", "codes_crc32", "values", "sizes")}
            unexpected_keys += [
                key for key in state_dict if key.startswith(prefix) and key not in known
            ]

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        K = max(self.sizes)
        text += f", K={K}, D={self.D}"
        if self.share_subspaces:
            text += ", shared subspaces"
        if self.packed:
            text += ", packed"
        return f"{text}, CR={self.compression_ratio():.1f}"


def codes_crc32(packed: Tensor) -> Tensor:
    """The CRC-32 of packed codes, as 32 booleans, lowest bit first."""
    rows = packed.detach().cpu().contiguous()
    crc = zlib.crc32(memory_of(rows))
    return torch.tensor([crc >> bit & 1 for bit in range(_CRC_BITS)], dtype=torch.bool)


def memory_of(tensor: Tensor) -> Any:
    """The bytes of a tensor as a buffer, not copied: good only as long as the tensor is there.

    Not by way of numpy, which a program that only wants the layer need not have.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only a contiguous tensor in main memory can be read as bytes")
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""


def _unpack(rows: Tensor, plan: Tensor, wide: bool, even: int, D: int) -> Tensor:
    if torch.jit.is_scripting():
        return unpack_rows(rows, plan, wide)
    else:  # a saved TorchScript program takes the dtype of a view for its shape
        return unpack_even(rows, even, D) if even else unpack_rows(rows, plan, wide)


def _take_rows(values: Tensor, rows: Tensor) -> Tensor:
    if torch.jit.is_scripting():
        return values.index_select(0, rows)
    else:  # TorchScript compiles no branch that it cannot reach
        return _take_elements(values, rows)


def _take_elements(values: Tensor, rows: Tensor) -> Tensor:
    kind = _ELEMENT.get(values.shape[1] * values.element_size())
    if kind is None or values.requires_grad or is_compiling():
        return values.index_select(0, rows)
    return values.view(kind).view(-1).index_select(0, rows).view(-1, 1).view(values.dtype)


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is tracing."""
    compiler = getattr(torch, "compiler", None)
    return compiler is not None and compiler.is_compiling()
