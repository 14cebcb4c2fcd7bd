"""Low rank: a narrow table (n, r) and one matrix (r, d); a row is their product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fairseq_dpq.forms.base import CompactRequest, Form, FormOption, Layout, Say, Settings, Tensors
from fairseq_dpq.training.initialization import Trained


class LowRankEmbedding(Form):
    """Looks rows up as nn.Embedding does; `left` (n, r) and `right` (r, d) are its tensors.

    A row is a matrix product: in batches of different shapes its last bit may differ.
    """

    kind = "low_rank"
    signature_tensor = "left"
    computes_rows = True
    options = (FormOption("rank", "--dpq-rank", 32),)
    setting_types: ClassVar[dict[str, type]] = {"rank": int}

    if TYPE_CHECKING:  # TorchScript cannot read annotations that are strings
        left: Tensor
        right: Tensor

    def build(self, make: Settings, *, rank: int) -> None:  # type: ignore[override]
        self.require(self.embedding_dim, rank=rank)
        self.rank = rank
        self.register_buffer("left", torch.zeros(self.num_embeddings, rank, **make))
        self.register_buffer("right", torch.zeros(rank, self.embedding_dim, **make))

    @classmethod
    @torch.no_grad()
    def from_factors(
        cls, left: Tensor, right: Tensor, padding_idx: int | None = None
    ) -> LowRankEmbedding:
        """From the narrow table and the matrix, which are copied."""
        size = left.shape[0], right.shape[1], padding_idx
        module = cls(*size, rank=right.shape[0], dtype=left.dtype, device=left.device)
        module.left.copy_(left)
        module.right.copy_(right)
        if module.padding_idx is not None:
            module.left[module.padding_idx] = 0
        return module

    @classmethod
    def from_learned(cls, tensors: Tensors, request: CompactRequest) -> LowRankEmbedding:
        """From left (n, r) and right (r, d)."""
        left, right = (tensors[name].to(request.dtype) for name in ("left", "right"))
        return cls.from_factors(left, right, request.padding_idx)

    @classmethod
    def of_table(  # type: ignore[override]
        cls, trained: Trained, padding_idx: int | None, rank: int = 32
    ) -> LowRankEmbedding:
        """The best table of this rank, by singular values."""
        table = trained.table.float()
        if padding_idx is not None:
            table = table.clone()
            table[padding_idx] = 0
        return cls.from_factors(*factorize(table, rank), padding_idx)

    @classmethod
    def check(cls, embedding_dim: int, say: Say, **settings: Any) -> None:
        rank = settings["rank"]
        if not 1 <= rank <= embedding_dim:
            raise ValueError(
                f"{say('rank', rank)}: must be from 1 to the embedding size {embedding_dim}"
            )

    @classmethod
    def layout(cls, n: int, d: int, settings: Settings, found: Tensors) -> dict[str, Layout]:
        cls.require(d, **settings)
        return {"left": Layout((n, settings["rank"])), "right": Layout((settings["rank"], d))}

    def forward(self, indices: Tensor) -> Tensor:
        rows = self.left.index_select(0, indices.reshape(-1))
        out = rows.float() @ self.right.float()
        return out.to(self.left.dtype).view(indices.shape + (self.embedding_dim,))  # noqa: RUF005

    @property
    def serves_logits(self) -> bool:
        return True

    def logits(self, h: Tensor) -> Tensor:
        return h @ self.right.to(h.dtype).t() @ self.left.to(h.dtype).t()

    def formula_bits(self) -> int:
        return 32 * (self.left.numel() + self.right.numel())

    def bits_per_symbol(self) -> int:
        return 8 * self.left.element_size() * self.rank

    def describe(self) -> str:
        return f"rank={self.rank}"


def factorize(table: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (n, r) and (r, d) of the best approximation of a table (n, d) of this rank.

    By the eigenvectors of the (d, d) Gram matrix: n may be in the millions.
    """
    gram = torch.zeros(table.shape[1], table.shape[1], dtype=torch.float64, device=table.device)
    for rows in table.split(1 << 15):
        gram += rows.double().t() @ rows.double()
    right = torch.linalg.eigh(gram)[1].flip(1)[:, :rank].t().contiguous()  # (r, d), orthonormal
    left = torch.cat([rows.double() @ right.t() for rows in table.split(1 << 15)])
    return left.float(), right.float()
