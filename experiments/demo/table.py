"""The demo's result: the score of each model, the size of its embedding and of the whole model
without optimiser state, read from the files that were written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fairseq_dpq.files.checkpoint import Checkpoint, stored_bytes
from fairseq_dpq.size_report import text_table

EMBEDDING = "encoder.embed_tokens"


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


def measure(path: Path) -> tuple[int, int, int, float]:
    """Of a checkpoint, without optimiser state: bytes of the source embedding, of the whole model
    (ties count once) and of the full embedding, and the compression ratio by the formula."""
    checkpoint = Checkpoint.load(path)
    record, state = checkpoint.record, checkpoint.weights
    tensors = [value for key, value in state.items() if key.startswith(f"{EMBEDDING}.")]
    small = full = sum(t.numel() * t.element_size() for t in tensors)
    formula = 1.0
    table = None if record is None else record.tables.get(EMBEDDING)
    if table is not None and table.options:  # trained with DPQ
        full = 4 * table.num_embeddings * table.embedding_dim
        bits = table.config.compact_bits(table.num_embeddings, table.embedding_dim)
        formula = 8 * full / bits
    return small, stored_bytes(state), full, formula


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
