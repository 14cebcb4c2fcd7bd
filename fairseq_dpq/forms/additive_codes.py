"""Additive codes: a row is the sum of D code vectors, with or without a linear map behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, ClassVar, Mapping

import torch
from torch import Tensor

from fairseq_dpq.forms.additive_learning import STEPS, learn_codes
from fairseq_dpq.forms.base import CompactRequest, Form, FormOption, Layout, Settings, plain
from fairseq_dpq.forms.lookup import unpack
from fairseq_dpq.forms.packing import (
    check_range,
    code_bits,
    even_width,
    is_wide,
    pack_codes,
    row_bytes,
    unpack_plan,
)
from fairseq_dpq.sizes import MAX_K
from fairseq_dpq.training.initialization import real_rows


class AdditiveEmbedding(Form):
    """Looks rows up as nn.Embedding does: row = (V_1[c_1] + ... + V_D[c_D]) A + b.

    `codes` (n, bytes) are packed like product codes, `values` (D * K, width) are the code vectors,
    `matrix` (width, d) is A, `bias` (d,) is b. Without `width` the vectors have the size of a row
    and there is no matrix.
    """

    kind = "additive_codes"
    signature_tensor = "codes"
    computes_rows = True
    options = (
        FormOption("K", "--dpq-K", 32),
        FormOption("D", "--dpq-D", 16),
        FormOption("steps", "--steps", STEPS, "updates of the network that learns the codes"),
    )
    setting_types: ClassVar[dict[str, type]] = {"K": int, "D": int, "width": int}

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        values: Tensor
        matrix: Tensor
        bias: Tensor
        plan: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        K: int,
        D: int,
        width: int = 0,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.check(embedding_dim, K=K, D=D, width=width)
        self._set_size(num_embeddings, embedding_dim, padding_idx)
        self.K, self.D, self.width = K, D, width
        bits = [code_bits(K)] * D
        self.wide, self.even = is_wide(bits), even_width(bits)
        make: dict[str, Any] = {"dtype": dtype, "device": device}
        codes = torch.zeros(num_embeddings, row_bytes(bits), dtype=torch.uint8, device=device)
        self.register_buffer("codes", codes)
        self.register_buffer("values", torch.zeros(D * K, width or embedding_dim, **make))
        size = (width, embedding_dim) if width else (0, 0)
        self.register_buffer("matrix", torch.zeros(size, **make), persistent=bool(width))
        self.register_buffer("bias", torch.zeros(embedding_dim, **make))
        self.register_buffer("plan", unpack_plan(bits).to(codes.device), persistent=False)

    @classmethod
    @torch.no_grad()
    def from_codes(
        cls,
        codes: Tensor,
        values: Tensor,
        matrix: Tensor,
        bias: Tensor,
        padding_idx: int | None = None,
    ) -> AdditiveEmbedding:
        """From unpacked codes (n, D), code vectors (D, K, width), A (width, d) or an empty tensor,
        and b (d,), which are copied."""
        D, K, width = values.shape
        size = (codes.shape[0], bias.shape[0], padding_idx)
        how: Settings = {"width": width if matrix.numel() else 0, "device": values.device}
        module = cls(*size, K=K, D=D, dtype=values.dtype, **how)
        module.codes.copy_(pack_codes(codes, [code_bits(K)] * D))
        module.values.copy_(values.reshape(D * K, width))
        module.bias.copy_(bias)
        module.matrix.copy_(matrix)
        return module

    @classmethod
    def from_learned(
        cls, tensors: Mapping[str, Tensor], request: CompactRequest
    ) -> AdditiveEmbedding:
        """From codes (n, D), values (D, K, width), matrix and bias."""
        names = ("values", "matrix", "bias")
        values, matrix, bias = (tensors[name].to(request.dtype) for name in names)
        return cls.from_codes(tensors["codes"], values, matrix, bias, request.padding_idx)

    @classmethod
    def from_table(  # type: ignore[override]
        cls,
        table: Tensor,
        padding_idx: int | None = None,
        *,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
        K: int = 32,
        D: int = 16,
        steps: int = STEPS,
    ) -> AdditiveEmbedding:
        """Codes that a network learns from the table, and the vectors that fit them best."""
        table = table.detach().float()
        real = real_rows(table, padding_idx)
        codes, values = learn_codes(table, K, D, real, steps, seed, progress)
        codes[~real] = 0
        bias = values.new_zeros(table.shape[1])
        return cls.from_codes(codes, values, values.new_zeros(0, 0), bias, padding_idx)

    @classmethod
    def check(  # type: ignore[override]
        cls,
        embedding_dim: int,
        say: Callable[[str, Any], str] = plain,
        *,
        K: int,
        D: int,
        width: int = 0,
        steps: int = STEPS,
    ) -> None:
        if not 2 <= K <= MAX_K:
            raise ValueError(f"{say('K', K)}: must be from 2 to {MAX_K}; try 32")
        if D < 1:
            raise ValueError(f"{say('D', D)}: must be 1 or more; try 16")
        if width < 0:
            raise ValueError(f"{say('width', width)}: must not be negative")
        if steps < 1:
            raise ValueError(f"--steps {steps}: must be 1 or more; try {STEPS}")

    @classmethod
    def layout(
        cls, num_embeddings: int, embedding_dim: int, settings: Settings, found: Mapping[str, Any]
    ) -> dict[str, Layout]:
        cls.check(embedding_dim, **settings)
        K, D, width = (settings[name] for name in ("K", "D", "width"))
        values = found.get("values")
        if values is None or values.dim() != 2 or len(values) != D * K:
            raise ValueError(f"values: expected {D} groups of {K} rows")
        layout = {
            "codes": Layout((num_embeddings, (D * code_bits(K) + 7) // 8), (torch.uint8,)),
            "values": Layout((D * K, width or embedding_dim)),
            "bias": Layout((embedding_dim,)),
        }
        if width:
            layout["matrix"] = Layout((width, embedding_dim))
        return layout

    @classmethod
    def check_contents(
        cls, embedding_dim: int, settings: Settings, tensors: Mapping[str, Tensor]
    ) -> None:
        check_range("codes", tensors["codes"], [settings["K"]] * settings["D"])

    @classmethod
    def work(cls, settings: Settings) -> int:
        return settings.get("steps", STEPS)

    def forward(self, indices: Tensor) -> Tensor:
        flat = indices.reshape(-1)
        codes = unpack(self.codes.index_select(0, flat), self.plan, self.wide, self.even, self.D)
        out = add_vectors(self.values, codes)
        out = transform(out, self.matrix, self.bias)
        if self.padding_idx is not None:
            out = out.masked_fill((flat == self.padding_idx).unsqueeze(-1), 0.0)
        return out.to(self.values.dtype).view(indices.shape + (self.embedding_dim,))  # noqa: RUF005

    def settings(self) -> Settings:
        return {"K": self.K, "D": self.D, "width": self.width}

    def formula_bits(self) -> int:
        numbers = self.values.numel() + self.matrix.numel() + self.bias.numel()
        return self.num_embeddings * self.bits_per_symbol() + 32 * numbers

    def bits_per_symbol(self) -> int:
        return self.D * code_bits(self.K)

    def describe(self) -> str:
        return f"K={self.K}, D={self.D}" + (f", width {self.width}" if self.width else "")

    @property
    def code_sizes(self) -> list[int]:
        return [self.K] * self.D


def add_vectors(values: Tensor, codes: Tensor) -> Tensor:
    """The sums (tokens, width) of the code vectors, in values (D * K, width), that codes
    (tokens, D) stand for. One group after the other: the rounding does not depend on the batch."""
    D = codes.shape[1]
    K = values.shape[0] // D
    total = values.index_select(0, codes[:, 0]).float()
    for j in range(1, D):
        total = total + values.index_select(0, codes[:, j] + j * K).float()
    return total


def transform(rows: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """rows A + b, or rows + b where A is empty. In float64, where rounding that depends on the
    shape of the batch is too small to be seen in the float32 result."""
    if matrix.numel() == 0:
        return rows + bias.float()
    return (rows.double() @ matrix.double() + bias.double()).float()
