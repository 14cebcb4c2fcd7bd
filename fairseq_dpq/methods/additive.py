"""What methods with additive codes have in common: the mean of D code vectors, batch norm, a linear
map, batch norm. In evaluation all of it is one linear map of the sum of the vectors.

Both batch norms have statistics of their own. The first has no affine part, and the map no bias:
the map can scale its input itself, and the second batch norm takes a constant out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_dpq.config import option
from fairseq_dpq.forms.additive_codes import add_vectors, fit_vectors, transform
from fairseq_dpq.forms.low_rank import factorize
from fairseq_dpq.methods.base import CodeOptions, Method, TableUse
from fairseq_dpq.training.codebook import Codebook, TrainOutput
from fairseq_dpq.training.distances import Stats, batch_normalize
from fairseq_dpq.training.trackers import RunningStatistics, Shapes, Tracker, wide

_ROWS = 1 << 13
Moments = Dict[str, Stats]


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

    sized_by = ("K", "D", "code_width")
    forms = ("additive_codes",)
    stored = ("values", "matrix", "outer_shift")

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

    def initialize(self, parameters: Mapping[str, Tensor], c: AO, tied: bool) -> None:
        # Rows start at the scale of the table that they replace, which the values were drawn from.
        parameters["outer_scale"].fill_(float(parameters["values"].float().std()))
        parameters["outer_shift"].zero_()

    def first_statistics(self, book: Codebook, c: AO, real: Tensor) -> None:
        rows = book.query[:_ROWS][real[:_ROWS]]
        self._set_moments(book, self.codes(rows, book, c))

    def _set_moments(self, book: Codebook, codes: Tensor) -> None:
        """Set the running statistics to those of rows with these codes."""
        rows = add_vectors(flat(book.values), codes) / codes.shape[1]
        if "matrix" in book.tensors:
            set_running(book, "inner", rows)
            rows = book.stats("inner").normalize(rows) @ book.tensors["matrix"].float()
        set_running(book, "outer", rows)

    # Rows -----------------------------------------------------------------------------------------

    def responses(
        self, rows: Tensor, book: Codebook, c: AO, moments: Moments | None = None
    ) -> Tensor | None:
        """(tokens, D, K), the largest of which give the codes, if those are learned; `moments` as
        in `normalized`."""
        return None

    def train(self, rows: Tensor, book: Codebook, c: AO) -> TrainOutput:
        moments: Moments = {}
        response = self.responses(rows, book, c, moments)
        codes = self.codes(rows, book, c) if response is None else response.detach().argmax(-1)
        x = SoftmaxSum.apply(response, book.values.float(), codes) / c.D
        if "matrix" in book.tensors:
            x = normalized(x, "inner", book, moments) @ book.tensors["matrix"].float()
        out = affine(normalized(x, "outer", book, moments), "outer", book)
        return TrainOutput(out, codes=codes, moments=moments)

    def folded(self, book: Codebook, c: AO) -> tuple[Tensor, Tensor, Tensor]:
        """Code vectors (D, K, width), A and b: a row in evaluation is the sum of its vectors, times
        A, plus b. Without a map the vectors have their factor already, and A is empty."""
        outer = book.stats("outer").detach()
        scale = book.tensors["outer_scale"].float() * outer.scale()[0]
        shift, mean = book.tensors["outer_shift"].float(), outer.mean[0]
        values = book.values.float()
        if "matrix" not in book.tensors:
            return values * (scale / c.D), values.new_zeros(0, 0), shift - mean * scale
        inner = book.stats("inner").detach()
        matrix = book.tensors["matrix"].float()
        A = (inner.scale()[0] / c.D).unsqueeze(1) * matrix * scale
        centre = (wide(inner.mean * inner.scale()) @ wide(matrix)).float()[0]
        return values, A, shift - (centre + mean) * scale

    def rebuild(self, rows: Tensor, codes: Tensor, book: Codebook, c: AO) -> Tensor:
        values, matrix, bias = self.folded(book, c)
        if torch.is_grad_enabled():
            sums = SoftmaxSum.apply(self.responses(rows, book, c), values, codes)
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
            shift = book.stats("outer").mean[0]
        else:
            rank = min(matrix.shape[0], d)
            left, right = factorize(vectors, rank)
            values[:, :rank] = left.to(values.dtype)
            matrix.zero_()
            self._set_moments(book, codes)
            inner = book.stats("inner")
            matrix[:rank] = (right / inner.scale()[0, :rank].unsqueeze(1)).to(matrix.dtype)
            self._set_moments(book, codes)
            shift = inner.mean[0, :rank] @ right + book.stats("outer").mean[0]
        book.tensors["outer_scale"].copy_(1 / book.stats("outer").scale()[0])
        book.tensors["outer_shift"].copy_(shift)

    def learned(self, book: Codebook, c: AO, codes: Tensor | None) -> dict[str, Tensor]:
        assert codes is not None
        values, matrix, bias = self.folded(book, c)
        return {"codes": codes, "values": values, "matrix": matrix, "bias": bias}


def flat(values: Tensor) -> Tensor:
    """Code vectors (D * K, width)."""
    return values.view(-1, values.shape[-1])


# Batch norms: NAME_mean and NAME_var (1, size), NAME_scale and NAME_shift (size,) -----------------


def set_running(book: Codebook, name: str, rows: Tensor) -> None:
    """Set the running statistics to those of rows (n, size)."""
    stats = book.stats(name)
    var, mean = torch.var_mean(rows, 0, unbiased=False, keepdim=True)
    stats.mean.copy_(mean)
    stats.var.copy_(var)


def normalized(x: Tensor, name: str, book: Codebook, moments: Moments | None) -> Tensor:
    """By the batch's own statistics, which are put into `moments`; by the running ones without
    that, or for a single row, which has no spread."""
    if moments is None or len(x) < 2:
        return book.stats(name).detach().normalize(x)
    out, moments[name] = batch_normalize(x)
    return out


def affine(x: Tensor, name: str, book: Codebook) -> Tensor:
    """The affine part of a batch norm."""
    scale, shift = (book.tensors[f"{name}_{part}"].float() for part in ("scale", "shift"))
    return x * scale + shift


class SoftmaxSum(torch.autograd.Function):
    """Sums (tokens, width) of the vectors that codes stand for, with the gradient of a softmax over
    the responses (tokens, D, K), if there are any.

    sum_j w_j V_j with w = p - stopgrad(p - onehot(code)): dL/dV sees the one-hot w, dL/dw flows
    into the softmax p as if w were p.
    """

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
