"""What methods with additive codes have in common: the mean of D code vectors, batch norm, a linear
map, batch norm. In evaluation all of it is one linear map of the sum of the vectors.

Both batch norms have statistics of their own. The first has no affine part, and the map no bias:
the map can scale its input itself, and the second batch norm takes a constant out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_dpq.config import option
from fairseq_dpq.forms.additive_codes import add_vectors, fit_vectors, transform
from fairseq_dpq.forms.low_rank import factorize
from fairseq_dpq.methods.base import CodeOptions, Method, TableUse
from fairseq_dpq.training.codebook import Codebook
from fairseq_dpq.training.distances import Stats, batch_normalize
from fairseq_dpq.training.trackers import RunningStatistics, Shapes, Tracker, wide

_ROWS = 1 << 13
Moments = dict


@dataclass
class AdditiveOptions(CodeOptions):
    """Of a method with additive codes."""

    code_width: int = option(
        0,
        "size of a code vector, which a linear map takes to the embedding size (0: the embedding "
        "size, no map)",
        valid=lambda width: width >= 0,
        right="must not be negative; 0 is the embedding size",
        shapes=True,
    )


AO = TypeVar("AO", bound=AdditiveOptions)


class AdditiveMethod(Method[AO]):
    """`values` (D, K, width) are the code vectors, `matrix` (width, d) the map, if there is one;
    `outer_scale` and `outer_shift` (d,) are the affine part of the last batch norm."""

    splits_rows = False
    sized_by = ("K", "D", "code_width")
    forms = ("additive_codes",)

    def defaults(self, c: AO, use: TableUse) -> dict[str, Any]:
        # Each group adds K whole vectors: the number that the papers take.
        return {**super().defaults(c, use), "D": 32}

    def shapes(self, c: AO, num_embeddings: int, embedding_dim: int) -> Shapes:
        width = c.code_width or embedding_dim
        shapes: Shapes = {"values": (c.D, c.K, width)}
        if width != embedding_dim:
            shapes["matrix"] = (width, embedding_dim)
        return {**shapes, "outer_scale": (embedding_dim,), "outer_shift": (embedding_dim,)}

    def trackers(self, c: AO, shapes: Shapes) -> list[Tracker]:
        out: list[Tracker] = [RunningStatistics("outer", (1, *shapes["outer_scale"]))]
        if "matrix" in shapes:
            out.append(RunningStatistics("inner", (1, shapes["matrix"][0])))
        return out

    def initialize(self, parameters: dict[str, Tensor], c: AO, tied: bool) -> None:
        # Rows start at the scale of the table that they replace, which the values were drawn from.
        parameters["outer_scale"].fill_(float(parameters["values"].float().std()))
        parameters["outer_shift"].zero_()

    def first_statistics(self, book: Codebook, c: AO, real: Tensor) -> None:
        rows = book.query[:_ROWS][real[:_ROWS]]
        self._set_moments(book, self.codes(rows, book, c))

    def _set_moments(self, book: Codebook, codes: Tensor) -> None:
        """Set the running statistics to those of rows with these codes."""
        rows = add_vectors(flat(book.values), codes) / codes.shape[1]
        for name in ("inner", "outer") if "matrix" in book.tensors else ("outer",):
            stats = running(book, name)
            var, mean = torch.var_mean(rows, 0, unbiased=False, keepdim=True)
            stats.mean.copy_(mean)
            stats.var.copy_(var)
            if name == "inner":
                rows = stats.normalize(rows) @ book.tensors["matrix"].float()

    # Rows -----------------------------------------------------------------------------------------

    def compose(self, sums: Tensor, book: Codebook, c: AO) -> tuple[Tensor, Moments]:
        """Rows in training of the sums (tokens, width) of code vectors, by the statistics of this
        batch, and those."""
        moments: Moments = {}
        x = sums / c.D
        if "matrix" in book.tensors:
            x = normalized(x, "inner", book, moments) @ book.tensors["matrix"].float()
        x = normalized(x, "outer", book, moments)
        scale, shift = (book.tensors[f"outer_{name}"].float() for name in ("scale", "shift"))
        return x * scale + shift, moments

    def folded(self, book: Codebook, c: AO) -> tuple[Tensor, Tensor, Tensor]:
        """Code vectors (D, K, width), A and b: a row in evaluation is the sum of its vectors, times
        A, plus b. Without a map the vectors have their factor already, and A is empty."""
        outer = running(book, "outer").detach()
        scale = book.tensors["outer_scale"].float() * outer.scale()[0]
        shift, mean = book.tensors["outer_shift"].float(), outer.mean[0]
        values = book.values.float()
        if "matrix" not in book.tensors:
            return values * (scale / c.D), values.new_zeros(0, 0), shift - mean * scale
        inner = running(book, "inner").detach()
        matrix = book.tensors["matrix"].float()
        A = (inner.scale()[0] / c.D).unsqueeze(1) * matrix * scale
        centre = (wide(inner.mean * inner.scale()) @ wide(matrix)).float()[0]
        return values, A, shift - (centre + mean) * scale

    def rebuild_sums(self, response: Tensor | None, codes: Tensor, book: Codebook, c: AO) -> Tensor:
        """Rows in evaluation; with gradients, also to the responses (tokens, D, K)."""
        values, matrix, bias = self.folded(book, c)
        if torch.is_grad_enabled():
            sums = added(response, values, codes)
        else:
            sums = add_vectors(flat(values), codes)
        return transform(sums, matrix, bias)

    # Starts and sizes ---------------------------------------------------------------------------

    def fit(self, book: Codebook, c: AO, table: Tensor, codes: Tensor) -> None:
        """Set all but the codes so that rows with these codes come near a table."""
        vectors = flat(fit_vectors(table, codes, c.K)) * c.D
        d = table.shape[1]
        values, matrix = flat(book.values), book.tensors.get("matrix")
        if matrix is None:
            values.copy_(vectors)
            self._set_moments(book, codes)
            shift = running(book, "outer").mean[0]
        else:
            rank = min(matrix.shape[0], d)
            left, right = factorize(vectors, rank)
            values[:, :rank] = left.to(values.dtype)
            matrix.zero_()
            self._set_moments(book, codes)
            inner = running(book, "inner")
            matrix[:rank] = (right / inner.scale()[0, :rank].unsqueeze(1)).to(matrix.dtype)
            self._set_moments(book, codes)
            shift = inner.mean[0, :rank] @ right + running(book, "outer").mean[0]
        book.tensors["outer_scale"].copy_(1 / running(book, "outer").scale()[0])
        book.tensors["outer_shift"].copy_(shift)

    def bits(self, c: AO, num_embeddings: int, embedding_dim: int) -> int:
        width = c.code_width or embedding_dim
        numbers = c.D * c.K * width + embedding_dim
        if width != embedding_dim:
            numbers += width * embedding_dim
        return num_embeddings * c.D * (c.K - 1).bit_length() + 32 * numbers

    def learned(self, book: Codebook, c: AO, codes: Tensor | None) -> dict[str, Tensor]:
        assert codes is not None
        values, matrix, bias = self.folded(book, c)
        return {"codes": codes, "values": values, "matrix": matrix, "bias": bias}


def flat(values: Tensor) -> Tensor:
    """Code vectors (D * K, width)."""
    return values.view(-1, values.shape[-1])


def running(book: Codebook, name: str) -> Stats:
    """The running statistics of one batch norm, (1, size) each."""
    return Stats(book.tensors[f"{name}_mean"], book.tensors[f"{name}_var"])


def normalized(x: Tensor, name: str, book: Codebook, moments: Moments) -> Tensor:
    """Batch norm without affine part; the batch's statistics are put into `moments`. A single row
    has no spread, and is normalised by the running ones."""
    if len(x) < 2:
        return running(book, name).detach().normalize(x)
    out, moments[name] = batch_normalize(x.unsqueeze(1), False)
    return out.squeeze(1)


def added(response: Tensor | None, values: Tensor, codes: Tensor) -> Tensor:
    """Sums (tokens, width) of the vectors that codes stand for, with the gradient of a softmax
    over the responses (tokens, D, K), if there are any."""
    return _Added.apply(response, values, codes)


class _Added(torch.autograd.Function):
    """sum_j w_j V_j with w = p - stopgrad(p - onehot(code)): dL/dV sees the one-hot w, dL/dw flows
    into the softmax p as if w were p."""

    @staticmethod
    def forward(ctx: Any, response: Tensor | None, values: Tensor, codes: Tensor) -> Tensor:
        ctx.save_for_backward(response, values, codes)
        return add_vectors(flat(values), codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        response, values, codes = ctx.saved_tensors
        D, K, width = values.shape
        grad_response = grad_values = None
        if response is not None and ctx.needs_input_grad[0]:
            p = torch.softmax(response, -1)
            grad_w = (grad @ flat(values).t()).view(-1, D, K)
            grad_response = torch._softmax_backward_data(grad_w, p, -1, p.dtype)
        if ctx.needs_input_grad[1]:
            grad_values = grad.new_zeros(D, K, width)
            for j in range(D):
                grad_values[j].index_add_(0, codes[:, j], grad)
        return grad_response, grad_values, None
