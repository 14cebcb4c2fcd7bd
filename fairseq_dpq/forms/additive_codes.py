"""Additive codes: a row is the sum of D code vectors, with or without a linear map behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_dpq.forms import packing
from fairseq_dpq.forms.base import CompactRequest, Form, FormOption, Layout, Say, Settings, Tensors
from fairseq_dpq.forms.lookup import unpack
from fairseq_dpq.sizes import MAX_K
from fairseq_dpq.training.initialization import Trained

STEPS = 2000
_BATCH = 128
_RATE = 1e-2
_START = 0.01  # all weights are drawn uniformly from within this range
_CLIP = 1.0
_ROWS = 1 << 13
_RIDGE = 1e-4  # of the least squares, in occurrences of a code


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

    def build(self, make: Settings, *, K: int, D: int, width: int = 0) -> None:  # type: ignore[override]
        n, d = self.num_embeddings, self.embedding_dim
        self.require(d, K=K, D=D, width=width)
        self.K, self.D, self.width = K, D, width
        bits = [packing.code_bits(K)] * D
        self.wide, self.even = packing.is_wide(bits), packing.even_width(bits)
        codes = torch.zeros(n, packing.row_bytes(bits), dtype=torch.uint8, device=make["device"])
        self.register_buffer("codes", codes)
        self.register_buffer("values", torch.zeros(D * K, width or d, **make))
        matrix = torch.zeros((width, d) if width else (0, 0), **make)
        self.register_buffer("matrix", matrix, persistent=bool(width))
        self.register_buffer("bias", torch.zeros(d, **make))
        self.register_buffer("plan", packing.unpack_plan(bits).to(codes.device), persistent=False)

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
        module.codes.copy_(packing.pack_codes(codes, [packing.code_bits(K)] * D))
        module.values.copy_(values.reshape(D * K, width))
        module.bias.copy_(bias)
        module.matrix.copy_(matrix)
        return module

    @classmethod
    def from_learned(cls, tensors: Tensors, request: CompactRequest) -> AdditiveEmbedding:
        """From codes (n, D), values (D, K, width), matrix and bias."""
        names = ("values", "matrix", "bias")
        values, matrix, bias = (tensors[name].to(request.dtype) for name in names)
        return cls.from_codes(tensors["codes"], values, matrix, bias, request.padding_idx)

    @classmethod
    def of_table(  # type: ignore[override]
        cls, trained: Trained, padding_idx: int | None, K: int = 32, D: int = 16, steps: int = STEPS
    ) -> AdditiveEmbedding:
        """Codes that a network learns from the table, and the vectors that fit them best."""
        table, real = trained.table.float(), trained.real
        codes, values = learn_codes(table, K, D, real, steps, trained.seed, trained.progress)
        codes[~real] = 0
        bias = values.new_zeros(table.shape[1])
        return cls.from_codes(codes, values, values.new_zeros(0, 0), bias, padding_idx)

    @classmethod
    def check(cls, embedding_dim: int, say: Say, **settings: Any) -> None:
        K, D = settings["K"], settings["D"]
        width, steps = settings.get("width", 0), settings.get("steps", STEPS)
        if not 2 <= K <= MAX_K:
            raise ValueError(f"{say('K', K)}: must be from 2 to {MAX_K}; try 32")
        if D < 1:
            raise ValueError(f"{say('D', D)}: must be 1 or more; try 16")
        if width < 0:
            raise ValueError(f"{say('width', width)}: must not be negative")
        if steps < 1:
            raise ValueError(f"--steps {steps}: must be 1 or more; try {STEPS}")

    @classmethod
    def layout(cls, n: int, d: int, settings: Settings, found: Tensors) -> dict[str, Layout]:
        cls.require(d, **settings)
        K, D, width = (settings[name] for name in ("K", "D", "width"))
        values = found.get("values")
        if values is None or values.dim() != 2 or len(values) != D * K:
            raise ValueError(f"values: expected {D} groups of {K} rows")
        codes = Layout((n, (D * packing.code_bits(K) + 7) // 8), (torch.uint8,))
        layout = {"codes": codes, "values": Layout((D * K, width or d)), "bias": Layout((d,))}
        return {**layout, "matrix": Layout((width, d))} if width else layout

    @classmethod
    def check_contents(cls, d: int, settings: Settings, tensors: Tensors) -> None:
        packing.check_range("codes", tensors["codes"], [settings["K"]] * settings["D"])

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

    def formula_bits(self) -> int:
        numbers = self.values.numel() + self.matrix.numel() + self.bias.numel()
        return self.num_embeddings * self.bits_per_symbol() + 32 * numbers

    def bits_per_symbol(self) -> int:
        return self.D * packing.code_bits(self.K)

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


# Learning -----------------------------------------------------------------------------------------


@torch.enable_grad()
def learn_codes(
    table: Tensor,
    K: int,
    D: int,
    real: Tensor,
    steps: int,
    seed: int,
    progress: Callable[[int], None] | None,
) -> tuple[Tensor, Tensor]:
    """Codes (n, D) and code vectors (D, K, d) that rebuild a table (n, d), by the network of Shu
    and Nakayama (2018); `real` (n,) leaves padding out.

    An encoder maps a row to D x K scores, a softmax with Gumbel noise mixes the code vectors of
    each group, and the sum over the groups shall be the row. Afterwards the code of a group is its
    best score, and the vectors are fitted to the codes by least squares.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = real.nonzero().squeeze(1)
    d = table.shape[1]
    hidden = max(1, D * K // 2)
    shapes = {"W1": (d, hidden), "b1": (hidden,), "W2": (hidden, D * K), "b2": (D * K,)}
    shapes["vectors"] = (D * K, d)
    net: dict[str, Tensor] = {}
    # The network sees rows of deviation 1, whatever the scale of the table is.
    scale = table[real].std(unbiased=False).clamp_min(1e-12)
    points = table / scale
    for name, shape in shapes.items():
        start = (2 * torch.rand(shape, generator=generator) - 1) * _START
        net[name] = start.to(table.device).requires_grad_()
    optimizer = torch.optim.Adam(net.values(), lr=_RATE)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, 2 * (steps - step) / steps)  # falls in the second half
        pick = rows[torch.randint(len(rows), (_BATCH,), generator=generator).to(rows.device)]
        x = points[pick]
        noise = torch.rand(len(x), D, K, generator=generator).clamp_(1e-9, 1 - 1e-7).to(x.device)
        mixed = torch.softmax(scores(net, x, D, K) - (-noise.log()).log(), -1)
        error = 0.5 * (mixed.flatten(1) @ net["vectors"] - x).pow(2).sum(1).mean()
        optimizer.zero_grad()
        error.backward()
        torch.nn.utils.clip_grad_norm_(list(net.values()), _CLIP)
        optimizer.step()
        if progress is not None:
            progress(step + 1)
    with torch.no_grad():
        parts = [scores(net, part, D, K).argmax(-1) for part in points.split(_ROWS)]
    codes = torch.cat(parts) if parts else table.new_empty(0, D).long()
    return codes, fit_vectors(table[real], codes[real], K)


def scores(net: dict[str, Tensor], x: Tensor, D: int, K: int) -> Tensor:
    """The logarithms (rows, D, K) of what the encoder gives to each code."""
    hidden = torch.tanh(x @ net["W1"] + net["b1"])
    return (F.softplus(hidden @ net["W2"] + net["b2"]) + 1e-8).log().view(len(x), D, K)


@torch.no_grad()
def fit_vectors(table: Tensor, codes: Tensor, K: int) -> Tensor:
    """The code vectors (D, K, d) whose sums come nearest to a table (n, d) with codes (n, D).

    The groups share their mean in any way, so that the system is singular; a small ridge picks
    the shortest solution.
    """
    D, d = codes.shape[1], table.shape[1]
    gram = torch.zeros(D * K, D * K, dtype=torch.float64, device=table.device)
    right = torch.zeros(D * K, d, dtype=torch.float64, device=table.device)
    offset = torch.arange(D, device=table.device) * K
    for start in range(0, len(table), _ROWS):
        part = codes[start : start + _ROWS] + offset
        used = torch.zeros(len(part), D * K, dtype=torch.float64, device=table.device)
        used.scatter_(1, part, 1)
        gram += used.t() @ used
        right += used.t() @ table[start : start + _ROWS].double()
    gram.diagonal().add_(_RIDGE)
    return torch.linalg.solve(gram, right).float().view(D, K, d)
