"""A package outside this one that adds to it, as a third party would write and install it."""

from __future__ import annotations

import os
from pathlib import Path

# A method of its own, with one option of its own. Codes follow from the row's number, and the step
# between neighbours is the option.
METHOD = """
from dataclasses import dataclass

import torch

from fairseq_dpq import register_method
from fairseq_dpq.config import option
from fairseq_dpq.methods.base import ProductMethod, ProductOptions
from fairseq_dpq.training.codebook import TrainOutput
from fairseq_dpq.training.codes import look_up


@dataclass
class ToyOptions(ProductOptions):
    toy_step: int = option(
        3,
        "how far the codes of two neighbours are apart",
        valid=lambda step: step >= 1,
        right="must be 1 or more; try 3",
        shapes=True,
    )


@register_method
class Toy(ProductMethod[ToyOptions]):
    name = "toy"
    summary = "codes by the number of the row"
    options = ToyOptions

    def shapes(self, c, num_embeddings, embedding_dim):
        return {"query": (num_embeddings, c.D), "values": (c.D, c.K, embedding_dim // c.D)}

    def constants(self, c):
        return ("query",)

    def initialize(self, parameters, c, tied):
        query = parameters["query"]
        rows = torch.arange(query.shape[0]).unsqueeze(1) * c.toy_step
        query.copy_((rows + torch.arange(c.D)) % c.K)

    def codes(self, rows, book, c):
        return rows.detach().long()

    def train(self, rows, book, c):
        codes = self.codes(rows, book, c)
        return TrainOutput(self.rebuild(rows, codes, book, c), codes=codes)

    def rebuild(self, rows, codes, book, c):
        return look_up(book.values.float(), codes).flatten(1)

    def start_from_table(self, book, c, trained):
        codes = self.codes(book.query, book, c)
        parts = trained.table.view(len(codes), c.D, -1)
        for j in range(c.D):
            for k in range(c.K):
                book.values[j, k] = parts[codes[:, j] == k, j].mean(0)
"""


def install(folder: Path, **modules: str) -> dict[str, str]:
    """Write `toy_dpq` with these modules as pip would install it; the environment that finds it."""
    package, info = folder / "toy_dpq", folder / "toy_dpq-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in modules.items():
        (package / f"{name}.py").write_text(source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-dpq\nVersion: 1.0\n")
    lines = [f"{name} = toy_dpq.{name}" for name in modules]
    (info / "entry_points.txt").write_text("\n".join(["[fairseq_dpq]", *lines]) + "\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
