"""CompactEmbedding, the form of product codes: bit-packed codes and the value matrix."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.files.memory import large_zeros
from fairseq_dpq.forms import base, lookup, packing, quantization
from fairseq_dpq.forms.base import Form, FormOption, Layout, Say, Settings, Tensors
from fairseq_dpq.sizes import MAX_K, bits_note, division_problem
from fairseq_dpq.tracing import is_tracing
from fairseq_dpq.training.initialization import Trained
from fairseq_dpq.training.kmeans import ITERATIONS

_ROWS = 1 << 15  # rows handled at once where a table is quantised
_MOST_CODES = 1 << 24  # over all groups, unless the tensors hold more: counting them takes memory


class CompactEmbedding(Form):
    """Looks rows up as nn.Embedding does, from D codes a row and a small value matrix.

    `codes` hold one or two bytes a code for the fastest lookup, or, with `packed`, the bits alone;
    in the state_dict they are always packed: `codes` (n, bytes), `values` (rows, d/D), and
    `sizes` (D,) where groups have different numbers of codes. Value rows of group j follow those
    of group j - 1; with `share_subspaces` all groups use the same rows. `sizes` gives each group's
    number of codes where that is not K for all of them.
    """

    kind = "product_codes"
    signature_tensor = "codes"
    options = (
        FormOption("K", "--dpq-K", 32),
        FormOption("D", "--dpq-D", 16),
        FormOption("share_subspaces", "--dpq-share-subspaces", False),
    )
    setting_types: ClassVar[dict[str, type]] = {"K": int, "D": int, "share_subspaces": bool}

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        values: Tensor
        offsets: Tensor
        plan: Tensor

    def build(  # type: ignore[override]
        self,
        make: Settings,
        *,
        K: int,
        D: int,
        share_subspaces: bool = False,
        sizes: Sequence[int] | None = None,
        packed: bool = False,
    ) -> None:
        if D < 1 or self.embedding_dim % D:
            raise ValueError(f"D={D} does not divide embedding_dim={self.embedding_dim}")
        self.D, self.share_subspaces, self.packed = D, share_subspaces, packed
        self._allocate(list(sizes) if sizes is not None else [K] * D, **make)

    def _allocate(self, sizes: list[int], dtype: torch.dtype | None, device: Any) -> None:
        """Make empty buffers for groups of these numbers of codes."""
        shared, packed = self.share_subspaces, self.packed
        if len(sizes) != self.D or min(sizes) < 1 or (shared and len(set(sizes)) > 1):
            raise ValueError(f"sizes={sizes}: give the number of codes of each of {self.D} groups")
        self._fast = None
        self.sizes, self.K = sizes, max(sizes)
        self.bits = bits = [packing.code_bits(size) for size in sizes]
        self.wide, self.even = packing.is_wide(bits), packing.even_width(bits)
        self.value_rows = sizes[0] if shared else sum(sizes)
        first = [0, *itertools.accumulate([0 if shared else x for x in sizes[:-1]])]
        offsets = torch.tensor(first, dtype=torch.int32, device=device)
        self.register_buffer("offsets", offsets, persistent=False)
        plan = packing.unpack_plan(bits).to(offsets.device) if packed else torch.empty(0)
        self.register_buffer("plan", plan, persistent=False)
        width, kind = (
            (packing.row_bytes(bits), torch.uint8)
            if packed
            else (self.D, packing.code_dtype(self.K))
        )
        self.register_buffer("codes", large_zeros(self.num_embeddings, width, kind, device))
        # A last row of zeros is what padding points at. It is not saved.
        rows = self.value_rows + (0 if self.padding_idx is None else 1)
        values = torch.zeros(rows, self.embedding_dim // self.D, dtype=dtype, device=device)
        self.register_buffer("values", values)

    @classmethod
    def of(cls, buffers: native.Buffers) -> CompactEmbedding:
        """A table of these tensors, which are not copied; `values` have a last row for padding."""
        codes, values, sizes, shared, packed, padding_idx = buffers
        settings: Settings = {"K": max(sizes), "D": len(sizes), "share_subspaces": shared}
        how: Settings = {"packed": packed, "dtype": values.dtype, "device": values.device}
        d = len(sizes) * values.shape[1]
        form = cls(1, d, None if padding_idx is None else 0, sizes=sizes, **settings, **how)
        form.codes, form.values = codes, values
        form._set_size(codes.shape[0], d, padding_idx)
        return form

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
            sizes = [values.shape[1]] * D
            values = values.reshape(-1, values.shape[-1])
        elif sizes is None:
            raise ValueError("values of shape (rows, d/D) need sizes")
        else:
            shared = values.shape[0] == sizes[0] and D > 1
        settings: Settings = {"K": max(sizes), "D": D, "share_subspaces": shared, "sizes": sizes}
        like: Settings = {"dtype": values.dtype, "device": values.device}
        module = cls(n, embedding_dim, padding_idx, packed=packed, **settings, **like)
        module.values[: module.value_rows] = values
        for start in range(0, n, _ROWS):  # the packed codes are never there twice
            part = codes[start : start + _ROWS]
            packing.check_codes(part, module.sizes, start)
            module.codes[start : start + _ROWS] = (
                packing.pack_codes(part, module.bits) if packed else part
            )
        return module

    @classmethod
    def of_table(  # type: ignore[override]
        cls,
        trained: Trained,
        padding_idx: int | None,
        K: int = 32,
        D: int = 16,
        share_subspaces: bool = False,
    ) -> CompactEmbedding:
        """Product quantisation: k-means in each group, the nearest centroid of each part."""
        G = 1 if share_subspaces else D
        codes, values = quantization.product_quantize(trained, K, D, G)
        codes[~trained.real] = 0
        return cls.from_codes(codes, values, trained.table.shape[1], padding_idx, packed=True)

    @classmethod
    def from_learned(cls, tensors: Tensors, request: base.CompactRequest) -> CompactEmbedding:
        """From codes (n, D) and values (G, K, d/D)."""
        values = tensors["values"].to(request.dtype)
        size = request.embedding_dim, request.padding_idx
        return cls.from_codes(tensors["codes"], values, *size, packed=request.packed)

    @classmethod
    def check(cls, embedding_dim: int, say: Say, **settings: Any) -> None:
        K, D = settings["K"], settings["D"]
        if not 2 <= K <= MAX_K:
            raise ValueError(f"{say('K', K)}: must be from 2 to {MAX_K}; try 32")
        problem = division_problem(D, embedding_dim) if D >= 1 else "try 16"
        if problem:
            raise ValueError(
                f"{say('D', D)} does not divide the embedding size {embedding_dim}; {problem}"
            )

    @classmethod
    def layout(cls, n: int, d: int, settings: Settings, found: Tensors) -> dict[str, Layout]:
        """By `settings`, with the numbers of codes that the tensors show."""
        D, shared = settings["D"], settings["share_subspaces"]
        if D < 1 or d % D:
            raise ValueError(f"D={D} does not divide embedding_dim={d}")
        sizes = stored_sizes(D, shared, found)
        if D * max(sizes) > max(_MOST_CODES, found["values"].numel()):
            raise ValueError(f"{D} groups of up to {max(sizes)} codes: more than the values hold")
        K = settings["K"]
        if not max(sizes) <= K <= MAX_K:
            raise ValueError(f"K={K}, but a group has {max(sizes)} codes")
        bits = sum(packing.code_bits(size) for size in sizes)
        return {
            "codes": Layout((n, max(1, (bits + 7) // 8)), (torch.uint8,)),
            "values": Layout((sizes[0] if shared else sum(sizes), d // D)),
            "sizes": Layout((D,), (torch.int32,), optional=True),
        }

    @classmethod
    def check_contents(cls, d: int, settings: Settings, tensors: Tensors) -> None:
        sizes = stored_sizes(settings["D"], settings["share_subspaces"], tensors)
        packing.check_range("codes", tensors["codes"], sizes)

    @classmethod
    def work(cls, settings: Settings) -> int:
        return ITERATIONS

    @classmethod
    def from_file(cls, path: str | Path) -> CompactEmbedding:
        """From a file of fairseq-dpq-export, memory-mapped: rows are read when asked for."""
        from fairseq_dpq.files.reader import read_form

        return read_form(path, {cls.kind: cls})  # type: ignore[return-value]

    @classmethod
    def from_tensors(
        cls, n: int, d: int, padding_idx: int | None, settings: Settings, tensors: Tensors
    ) -> CompactEmbedding:
        D, shared = settings["D"], settings["share_subspaces"]
        values = F.pad(tensors["values"], (0, 0, 0, 0 if padding_idx is None else 1))
        how = (stored_sizes(D, shared, tensors), shared, True, padding_idx)
        return cls.of(native.Buffers(tensors["codes"], values, *how)).eval()

    def forward(self, indices: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            if is_tracing():
                found = lookup.lookup_in_graph(self, indices)
            else:
                fast = self._prepared()
                found = None if fast is None else fast.lookup(indices)
            if found is not None:
                return found
        flat = indices.reshape(-1)
        rows = self.codes.index_select(0, flat)
        if self.packed:
            rows = lookup.unpack(rows, self.plan, self.wide, self.even, self.D)
        rows = rows + self.offsets  # (tokens, D): rows of the value matrix
        if self.padding_idx is not None:
            pad = (flat == self.padding_idx).unsqueeze(-1)
            rows = rows.masked_fill(pad, self.value_rows)
        out = lookup.take_rows(self.values, rows.reshape(-1))
        return out.view(indices.shape + (self.embedding_dim,))  # noqa: RUF005, TorchScript knows no *

    def _prepared(self) -> Any:
        """What looks rows up for these buffers; not to be used while torch is tracing."""
        codes, values = self._buffers["codes"], self._buffers["values"]
        known = self._fast
        if known is None or not known.serves(codes, values, self.padding_idx):
            how = (self.sizes, self.share_subspaces, self.packed, self.padding_idx)
            buffers = native.Buffers(self.codes, self.values, *how)
            try:
                known = native.table(buffers) or lookup.SmallBatchLookup(buffers, self.offsets)
            except RuntimeError:  # tensors without memory of their own, as under vmap
                return None
            self._fast = known
        return known

    def native_table(self) -> Any:
        """This table as the native library or Triton takes it, or None where PyTorch must serve."""
        found = None if is_tracing() else self._prepared()
        return None if isinstance(found, lookup.SmallBatchLookup) else found

    @property
    def serves_logits(self) -> bool:
        return self.native_table() is not None

    def logits(self, h: Tensor) -> Tensor:
        """Logits from the codes; they differ from the dense product in the last digits."""
        if h.shape[-1] != self.embedding_dim:
            raise ValueError(f"h has {h.shape[-1]} numbers a row, the table {self.embedding_dim}")
        if is_tracing():
            found = lookup.logits_in_graph(self, h)
        else:
            known = self.native_table()
            found = None if known is None else known.logits(h)
        return found if found is not None else lookup.logits_by_partial_sums(self, h)

    def formula_bits(self) -> int:
        codes = self.num_embeddings * sum(self.bits)
        return codes + 32 * self.value_rows * (self.embedding_dim // self.D)

    def bits_per_symbol(self) -> int:
        return sum(self.bits)

    def describe(self) -> str:
        shared = ", shared subspaces" if self.share_subspaces else ""
        return f"K={self.K}, D={self.D}{shared}"

    @property
    def code_sizes(self) -> list[int]:
        return self.sizes

    def parts(self) -> base.Parts:
        return base.Parts(self.values[: self.value_rows], self.sizes, self.share_subspaces)

    def notes(self) -> list[str]:
        even = self.bits == [packing.code_bits(self.K)] * self.D  # no unused codes were dropped
        return [bits_note(self.K)] if even and bits_note(self.K) else []

    def improvement(self, table: Tensor, seed: int = 0) -> base.Improvement | None:
        how = (self.K, self.D, self.share_subspaces, self.padding_idx)
        return quantization.better_D(table, *how, seed)

    def shrunk(self) -> CompactEmbedding:
        groups = 1 if self.share_subspaces else self.D
        values = self.values[: self.value_rows].view(groups, self.K, -1)
        codes, pad = self._unpacked(self.codes), self.padding_idx
        return self._rebuilt(*quantization.drop_unused(codes, values, pad))

    def with_rows(self, rows: Tensor) -> CompactEmbedding:
        """The new rows get the nearest value of each group."""
        values, old = self.values[: self.value_rows], self._unpacked(self.codes)
        new = quantization.nearest_codes(rows.to(values.device), *self.parts())
        return self._rebuilt(torch.cat([old, new.to(old.dtype)]), values, self.sizes)

    def _rebuilt(self, codes: Tensor, values: Tensor, sizes: list[int]) -> CompactEmbedding:
        d, pad = self.embedding_dim, self.padding_idx
        return self.from_codes(codes, values, d, pad, sizes=sizes, packed=self.packed)

    def export_tensors(self) -> dict[str, Tensor]:
        sizes = torch.tensor(self.sizes, dtype=torch.int32)
        return {**super().export_tensors(), "sizes": sizes}

    @property
    def saved_nbytes(self) -> int:
        uneven = 4 * self.D if len(set(self.sizes)) > 1 else 0
        values = self.value_rows * self.values.shape[1] * self.values.element_size()
        return self.num_embeddings * packing.row_bytes(self.bits) + values + uneven

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        codes = self.codes if self.packed else packing.pack_codes(self.codes, self.bits)
        destination[prefix + "codes"] = codes
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
        mine = {k[len(prefix) :]: t for k, t in state_dict.items() if k.startswith(prefix)}
        missing = [prefix + name for name in ("codes", "values") if name not in mine]
        missing_keys += missing
        if strict:
            unexpected_keys += [prefix + k for k in mine if k not in ("codes", "values", "sizes")]
        if not missing:
            try:
                self._load(mine, bool(local_metadata.get("assign_to_params_buffers")))
            except ValueError as error:
                error_msgs.append(f"{prefix}{error}")

    @torch.no_grad()
    def _load(self, tensors: Tensors, assign: bool) -> None:
        """Load the tensors of a state_dict. With `assign`, their own memory, dtype and device are
        taken where they can be."""
        sizes = stored_sizes(self.D, self.share_subspaces, tensors)
        settings = {**self.settings(), "K": max(sizes)}
        layout = self.layout(self.num_embeddings, self.embedding_dim, settings, tensors)
        for name in ("codes", "values"):
            found, wanted = tuple(tensors[name].shape), layout[name].shape
            if found != wanted:
                raise ValueError(f"{name}: size mismatch, found {found}, this model needs {wanted}")
        codes, values = tensors["codes"], tensors["values"]
        if assign or sizes != self.sizes:
            like = values if assign else self.values
            self._allocate(sizes, like.dtype, like.device)
        self.values[: self.value_rows] = values
        codes = codes if self.packed else packing.unpack_codes(codes, self.bits, self.codes.dtype)
        if assign and codes.is_contiguous():
            self.codes = codes
        else:
            self.codes.copy_(codes)


def stored_sizes(D: int, shared: bool, found: Tensors) -> list[int]:
    """The number of codes of each group, by the tensors that are there."""
    values, sizes = found.get("values"), found.get("sizes")
    if values is None or values.dim() != 2:
        raise ValueError("values: expected a tensor of two dimensions, found none")
    if sizes is None:
        listed = [len(values) if shared else len(values) // D] * D
    elif tuple(sizes.shape) != (D,) or sizes.dtype != torch.int32:
        raise ValueError(
            f"sizes: expected torch.int32 of shape ({D},), found {sizes.dtype} of shape "
            f"{tuple(sizes.shape)}"
        )
    else:
        listed = sizes.tolist()
    if not 1 <= min(listed) <= max(listed) <= MAX_K:
        raise ValueError(
            f"a group has from 1 to {MAX_K} codes, found from {min(listed)} to {max(listed)}"
        )
    if shared and len(set(listed)) > 1:
        raise ValueError("sizes: groups that share their values must have the same size")
    return listed
