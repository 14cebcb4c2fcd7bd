"""The demo's result: the score of each model, the size of its embedding and of the whole model
without optimiser state, read from the files that were written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fairseq_dpq.files.checkpoint import stored_bytes
from fairseq_dpq.files.loading import load_checkpoint
from fairseq_dpq.size_report import text_table

EMBEDDING = "encoder.embed_tokens."


@dataclass(frozen=True)
class Row:
    """One model: bytes are those of the tensors in the file used to translate."""

    model: str
    bleu: float
    embedding_bytes: int
    cr_formula: float
    cr_measured: float
    model_bytes: int
    model_ratio: float  # of the model with full tables
    train_seconds: float


def measure(checkpoint: Path) -> tuple[int, int]:
    """Bytes of the source embedding and of the whole model, without optimiser state; ties count
    once."""
    state = load_checkpoint(checkpoint)["model"]
    tensors = [value for key, value in state.items() if key.startswith(EMBEDDING)]
    return sum(t.numel() * t.element_size() for t in tensors), stored_bytes(state)


def formula_ratio(n: int, d: int, K: int, D: int) -> float:
    """The paper's compression ratio, without subspace sharing: 32 n d bits against D codes of
    ceil(log2 K) bits for each symbol and K d values of 32 bits."""
    return 32 * n * d / (n * D * math.ceil(math.log2(K)) + 32 * K * d)


def render(rows: list[Row]) -> str:
    """The table as text."""
    cells = [
        ["model", "BLEU", "embedding", "CR formula", "CR measured", "model", "ratio", "train"],
        ["", "", "bytes", "", "", "bytes", "", "CPU s"],
    ]
    for row in rows:
        cells.append(
            [
                *(row.model, f"{row.bleu:.1f}", f"{row.embedding_bytes:,}"),
                *(f"{row.cr_formula:.1f}", f"{row.cr_measured:.1f}"),
                *(f"{row.model_bytes:,}", f"{row.model_ratio:.2f}", f"{row.train_seconds:.0f}"),
            ]
        )
    lines = text_table(cells).splitlines()
    return "\n".join([*lines[:2], "-" * len(lines[0]), *lines[2:]])
