"""Learns additive codes that rebuild a trained table: the network of Shu and Nakayama (2018).

An encoder maps a row to D x K scores, a softmax with Gumbel noise mixes the code vectors of each
group, and the sum over the groups shall be the row. Afterwards the code of a group is its best
score, and the vectors are fitted to the codes by least squares.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 2000
_BATCH = 128
_RATE = 1e-2
_START = 0.01  # all weights are drawn uniformly from within this range
_CLIP = 1.0
_ROWS = 1 << 13
_RIDGE = 1e-4  # of the least squares, in occurrences of a code


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
    """Codes (n, D) and code vectors (D, K, d) of a table (n, d); `real` (n,) leaves padding out."""
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
