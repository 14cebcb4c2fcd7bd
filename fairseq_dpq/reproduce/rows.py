"""The rows of the paper's tables 3 to 8: recipes, methods, flags, and the figures of the paper.

The names of recipes are those of recipes/NAME.conf. CPU says what stands for a recipe on a small
machine, and with which flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What score.sh prints, by the metric of a table or of a row.
FIGURES = {
    "perplexity": re.compile(r"Perplexity: ([\d.]+)"),
    "BLEU": re.compile(r"BLEU = ([\d.]+)"),
    "accuracy": re.compile(r"\baccuracy[ =]([\d.]+)"),
    "masked perplexity": re.compile(r"\bppl ([\d.]+)"),
    "F1": re.compile(r"^f1: ([\d.]+)", re.MULTILINE),
}
# The flag that names the split to score, by metric.
SUBSET = {
    "perplexity": "--gen-subset",
    "BLEU": "--gen-subset",
    "accuracy": "--valid-subset",
    "masked perplexity": "--valid-subset",
    "F1": "--subset",
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


@dataclass(frozen=True)
class Row:
    """One row: a model to train, or a trained one to quantise, and the paper's figures.

    In `flags`, @full is the checkpoint of the recipe's full table and @codes a file of additive
    codes that were learned from it.
    """

    label: str
    recipe: str
    method: str = "full"  # a word of the recipe
    flags: str = ""  # further ones of fairseq-train
    quantize: str = ""  # flags of fairseq-dpq-quantize: the full table is stored, nothing trained
    pretrained: str = ""  # recipe of the model that it is fine-tuned from, by the same method
    paper: float | None = None
    paper_ratio: float | None = None
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
    rows: tuple[Row, ...]


def _three(recipe: str, full: float, sx: tuple, vq: tuple, metric: str = "") -> tuple[Row, ...]:
    """The full table, SX and VQ: figure, or figure and compression ratio."""
    return (
        Row("full", recipe, paper=full, paper_ratio=1.0, metric=metric),
        Row("DPQ-SX", recipe, "sx", paper=sx[0], paper_ratio=sx[1], metric=metric),
        Row("DPQ-VQ", recipe, "vq", paper=vq[0], paper_ratio=vq[1], metric=metric),
    )


_TEXT = ("ag_news", "yahoo_answers", "dbpedia", "yelp_polarity", "yelp_full")
_TEXT_DPQ = {
    "ag_news": (92.6, (92.5, 19.3), (92.6, 24.0)),
    "yahoo_answers": (69.4, (69.6, 48.2), (69.2, 19.2)),
    "dbpedia": (98.1, (98.1, 24.1), (98.1, 38.5)),
    "yelp_polarity": (93.9, (94.2, 38.5), (93.9, 24.0)),
    "yelp_full": (60.3, (60.1, 48.2), (60.2, 24.1)),
}
_PTB_DPQ = {
    "small": (114.5, (105.8, 85.5), (106.5, 51.1)),
    "medium": (83.4, (82.0, 82.9), (83.3, 58.7)),
    "large": (78.7, (78.5, 238.3), (79.5, 238.3)),
}
_DISTILL = "--dpq-distill-from @full"
_CODES = "--dpq-codes @codes"

T3 = Table(
    "Table 3: DPQ on all data sets",
    "perplexity",
    (
        *_three("ptb_medium", 83.4, (83.2, 163.2), (83.3, 58.7)),
        *_three("wikitext2_medium", 95.6, (95.0, 59.3), (95.9, 95.3)),
        *_three("iwslt15-en-vi", 25.4, (25.3, 86.2), (25.3, 16.1), "BLEU"),
        *_three("iwslt15-vi-en", 23.0, (23.1, 72.0), (22.5, 14.1), "BLEU"),
        *_three("wmt19", 38.8, (38.8, 18.0), (38.7, 18.2), "BLEU"),
        *(row for name in _TEXT for row in _three(name, *_TEXT_DPQ[name], "accuracy")),
    ),
)


def _code_learning(size: str, shu: float, chen: float, guided: float, ratio: float) -> tuple:
    recipe = f"ptb_{size}"
    full, sx, vq = _three(recipe, *_PTB_DPQ[size])
    return (
        full,
        Row("Shu'17", recipe, "shu17", _CODES, paper=shu, paper_ratio=ratio),
        Row("Chen'18", recipe, "chen18", paper=chen, paper_ratio=ratio),
        Row("Chen'18+", recipe, "chen18", _DISTILL, paper=guided, paper_ratio=ratio),
        sx,
        vq,
        Row("random codes", recipe, "random"),
    )


T4 = Table(
    "Table 4: methods that learn codes, Penn Treebank",
    "perplexity",
    (
        *_code_learning("small", 108.0, 108.5, 107.8, 4.8),
        *_code_learning("medium", 84.9, 89.0, 83.1, 12.5),
        *_code_learning("large", 80.7, 86.4, 77.7, 18.5),
    ),
)


def _stored(label: str, flags: str, paper: float, ratio: float) -> Row:
    return Row(label, "ptb_medium", quantize=flags, paper=paper, paper_ratio=ratio)


T5 = Table(
    "Table 5: quantisation and low rank, Penn Treebank",
    "perplexity",
    (
        Row("full", "ptb_medium", paper=83.4, paper_ratio=1.0),
        _stored("scalar 8 bits", "--form scalar --bits 8 --by-table", 84.1, 4.0),
        _stored("scalar 6 bits", "--form scalar --bits 6 --by-table", 87.7, 5.3),
        _stored("scalar 4 bits", "--form scalar --bits 4 --by-table", 92.9, 8.3),
        # Two columns in each group.
        _stored("PQ K=64", "--dpq-K 64 --dpq-D @width/2", 84.0, 8.3),
        _stored("PQ K=128", "--dpq-K 128 --dpq-D @width/2", 83.7, 6.7),
        _stored("PQ K=256", "--dpq-K 256 --dpq-D @width/2", 83.7, 5.3),
        Row("low rank 5x", "ptb_medium", "low_rank_5x", paper=84.8, paper_ratio=5.0),
        Row("low rank 10x", "ptb_medium", "low_rank_10x", paper=85.5, paper_ratio=10.2),
        *_three("ptb_medium", 83.4, (82.0, 82.9), (83.3, 58.7))[1:],
    ),
)

# Embedding sizes of the recipes, for @width in the flags of fairseq-dpq-quantize.
WIDTH = {"ptb_small": 200, "ptb_medium": 650, "ptb_large": 1500, "wmt19": 512, "multi30k": 128}

_TEXT_LOW = {
    "ag_news": ((91.4, 10.4), (91.5, 21.4), (91.6, 53.3)),
    "yahoo_answers": ((69.5, 10.2), (69.1, 21.5), (69.5, 31.7)),
    "dbpedia": ((97.7, 10.3), (97.9, 21.3), (98.0, 48.4)),
    "yelp_polarity": ((92.4, 10.4), (92.4, 21.5), (93.1, 48.6)),
    "yelp_full": ((57.8, 10.3), (57.3, 21.4), (59.0, 54.4)),
}


def _text(recipe: str) -> tuple[Row, ...]:
    ten, twenty, chen = _TEXT_LOW[recipe]
    codes = "--dpq-K 32 --dpq-D 32 --dpq-method kd_codes"
    return (
        _three(recipe, *_TEXT_DPQ[recipe])[0],
        Row("low rank 10x", recipe, "low_rank10", paper=ten[0], paper_ratio=ten[1]),
        Row("low rank 20x", recipe, "low_rank20", paper=twenty[0], paper_ratio=twenty[1]),
        Row("Chen'18", recipe, flags=codes, paper=chen[0], paper_ratio=chen[1]),
        *_three(recipe, *_TEXT_DPQ[recipe])[1:],
    )


T6 = Table(
    "Table 6: text classification",
    "accuracy",
    tuple(row for name in _TEXT for row in _text(name)),
)


def _tuned(recipe: str, full: float, sx: float, metric: str = "") -> tuple[Row, ...]:
    more = {"pretrained": "bert_base", "metric": metric}
    return (
        Row("full", recipe, paper=full, paper_ratio=1.0, **more),
        Row("DPQ-SX", recipe, "sx", paper=sx, paper_ratio=37.0, **more),
    )


T7 = Table(
    "Table 7: BERT",
    "accuracy",
    (
        *_tuned("squad1", 90.1, 90.0, "F1"),
        *_tuned("squad2", 78.8, 78.7, "F1"),
        *_tuned("glue_cola", 80.6, 80.2),
        *_tuned("glue_mnli", 84.3, 83.7),
        *_tuned("glue_mrpc", 85.9, 85.1),
        *_tuned("glue_xnli", 53.5, 53.4),
    ),
)


def _product(K: int, D: int, paper: float, ratio: float) -> Row:
    """K and D of the paper, whose rows are as wide as those of wmt19. A narrower row is cut into
    groups of as many columns."""
    columns = WIDTH["wmt19"] // D
    flags = f"--dpq-K {K} --dpq-D @width/{columns}"
    label = f"PQ K={K}, groups of {columns}"
    return Row(label, "wmt19", quantize=flags, paper=paper, paper_ratio=ratio)


T8 = Table(
    "Table 8: product quantisation after training, WMT19",
    "BLEU",
    (
        Row("full", "wmt19", paper=38.8, paper_ratio=1.0),
        _product(128, 64, 28.9, 31.9),
        _product(32, 128, 35.4, 25.0),
        _product(128, 128, 35.7, 17.0),
        _product(32, 256, 36.9, 12.6),
        _product(128, 256, 37.8, 8.8),
        Row("DPQ-SX", "wmt19", "sx", paper=38.8, paper_ratio=17.0),
        Row("DPQ-VQ", "wmt19", "vq", paper=38.7, paper_ratio=17.0),
    ),
)

TABLES = {"T3": T3, "T4": T4, "T5": T5, "T6": T6, "T7": T7, "T8": T8}
