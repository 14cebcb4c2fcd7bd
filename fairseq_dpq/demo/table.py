"""The demo's result: the score of each model, the size of its embedding and of the whole model
without optimiser state, read from the files that were written."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from fairseq_dpq.checkpoints.checkpoint import stored_bytes
from fairseq_dpq.checkpoints.loading import load_checkpoint

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

    def as_dict(self) -> dict[str, object]:
        """For result.json."""
        return asdict(self)


def embedding_bytes(checkpoint: Path) -> int:
    """Bytes of all tensors that make up the source embedding in this checkpoint."""
    state = load_checkpoint(checkpoint)["model"]
    tensors = {key: value for key, value in state.items() if key.startswith(EMBEDDING)}
    if not tensors:
        raise RuntimeError(f"{checkpoint} has no tensor named {EMBEDDING}*")
    return sum(value.numel() * value.element_size() for value in tensors.values())


def model_bytes(checkpoint: Path) -> int:
    """Bytes of the whole model in this checkpoint, without optimiser state; ties count once."""
    return stored_bytes(load_checkpoint(checkpoint)["model"])


def formula_ratio(n: int, d: int, K: int, D: int) -> float:
    """The paper's compression ratio, without subspace sharing: 32 n d bits against D codes of
    ceil(log2 K) bits for each symbol and K d values of 32 bits."""
    return 32 * n * d / (n * D * math.ceil(math.log2(K)) + 32 * K * d)


def read_bleu(output: str, sentences: int) -> float:
    """The score that fairseq-generate prints; every test sentence must have been translated."""
    translated = len(re.findall(r"^H-\d+\t", output, re.MULTILINE))
    if translated != sentences:
        raise RuntimeError(f"fairseq-generate translated {translated} of {sentences} sentences")
    found = re.search(r"^Generate test .*?BLEU = ([0-9.]+)", output, re.MULTILINE)
    if found is None:
        raise RuntimeError("fairseq-generate printed no BLEU score")
    return float(found.group(1))


def render(rows: list[Row]) -> str:
    """The table as text."""
    head = (
        "model",
        "BLEU",
        "embedding",
        "CR formula",
        "CR measured",
        "model",
        "ratio",
        "train",
    )
    under = ("", "", "bytes", "", "", "bytes", "", "CPU s")
    cells = [head, under]
    for row in rows:
        cells.append(
            (
                *(row.model, f"{row.bleu:.1f}", f"{row.embedding_bytes:,}"),
                *(f"{row.cr_formula:.1f}", f"{row.cr_measured:.1f}"),
                *(f"{row.model_bytes:,}", f"{row.model_ratio:.2f}", f"{row.train_seconds:.0f}"),
            )
        )
    widths = [max(len(line[at]) for line in cells) for at in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([*lines[:2], "-" * len(lines[0]), *lines[2:]])
