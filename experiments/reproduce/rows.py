"""The rows of the paper's tables 3 to 8, from rows.txt: recipes, methods, flags, and its results.

CPU says what stands for a recipe on a small machine, and with which flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# By the metric of a table or row: the flag of score.sh that names the split, and what it prints,
# the first of these entries that is there.
METRICS = {
    "perplexity": ("--gen-subset", "perplexity"),
    "BLEU": ("--gen-subset", "tokenised_BLEU", "BLEU"),
    "accuracy": ("--valid-subset", "accuracy"),
    "masked perplexity": ("--valid-subset", "ppl"),
    "F1": ("--subset", "f1"),
}

# Recipes of the paper's sizes, what stands for them with --scale cpu, and the flags of that.
CPU = {
    "ptb_small": ("ptb_small", "--cpu --max-epoch 4"),
    "ptb_medium": ("ptb_small", "--cpu --max-epoch 4"),
    "wikitext2_medium": ("wikitext2_small", "--cpu --max-epoch 2"),
    "iwslt15-en-vi": ("multi30k", "--cpu"),
    "wmt19": ("multi30k", "--cpu"),
    "ag_news": ("ag_news", "--cpu"),
    "yelp_full": ("yelp_full", "--cpu"),
    "glue_cola": ("glue_cola", "--cpu"),
    "glue_mrpc": ("glue_mrpc", "--cpu"),
    "bert_base": ("bert_small", "--cpu"),
}
CPU_ENVIRONMENT = {"glue_cola": {"BERT": "small"}, "glue_mrpc": {"BERT": "small"}}
# Embedding sizes of the recipes, for @width in the flags of fairseq-dpq-quantize.
WIDTH = {"ptb_small": 200, "ptb_medium": 650, "ptb_large": 1500, "wmt19": 512, "multi30k": 128}


@dataclass(frozen=True)
class Row:
    """One row: a model to train, or a trained one to quantise, and the paper's results."""

    label: str
    recipe: str
    method: str = "full"  # a word of the recipe
    paper: float | None = None
    paper_ratio: float | None = None
    flags: str = ""  # further ones of fairseq-train
    quantize: str = ""  # flags of fairseq-dpq-quantize: the full table is stored, nothing trained
    pretrained: str = ""  # recipe of the model that it is fine-tuned from, by the same method
    metric: str = ""  # where it is not the table's

    @property
    def full(self) -> bool:
        """Whether a full table is trained: there is nothing to compact."""
        return self.method == "full" and "--dpq-method" not in self.flags


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    title: str
    metric: str
    rows: list[Row]


def _read(path: Path) -> dict[str, Table]:
    found: dict[str, Table] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("["):
            name, title = cells[0][1:].split("] ")
            found[name] = Table(title, cells[1], [])
        elif line and not line.startswith("#"):
            label, recipe, method, *numbers = cells[:5]
            more: Any = dict(cell.split(": ", 1) for cell in cells[5:])
            paper, ratio = (float(number) if number else None for number in numbers)
            found[name].rows.append(Row(label, recipe, method, paper, ratio, **more))
    return found


TABLES = _read(Path(__file__).with_name("rows.txt"))
