"""Checkpoints of a few kilobytes, as fairseq-train writes them, with DPQ tables but no model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, BinaryIO, Callable

import torch
from torch import Tensor

from fairseq_dpq import DPQEmbedding
from fairseq_dpq.fairseq_plugin.configs import write_record
from fairseq_dpq.files.record import RECORD_KEY, Table, TablesRecord, sealed
from helpers.layers import large_start

PATH = "encoder.embed_tokens"
ALIAS = "decoder.embed_tokens"


def make_layer(n: int = 60, d: int = 12, pad: int | None = 1, seed: int = 0, **options: Any):
    """A layer whose running statistics are those of a trained one: not 0 and 1."""
    own: dict = {"K": 8, "D": 4, **options}
    layer = large_start(DPQEmbedding(n, d, pad, **own), seed)
    if "norm_mean" in layer._buffers:
        layer.norm_mean.normal_()
        layer.norm_var.uniform_(0.5, 2)
    return layer.eval()


def make_state(layer: DPQEmbedding, **more: Any) -> dict[str, Any]:
    """The state of a model with one table under two names, a tied pair and optimiser state."""
    table = Table(
        layer.num_embeddings,
        layer.embedding_dim,
        layer.padding_idx,
        layer.config.keywords(),
        [ALIAS],
        ["decoder.output_projection"],
    )
    cfg = argparse.Namespace(arch="transformer", dpq_K=layer.config.K, dpq_D=layer.config.D)
    write_record(cfg, TablesRecord({PATH: table}))
    weights: dict[str, Tensor] = {}
    for name in (PATH, ALIAS):
        weights.update({f"{name}.{key}": value for key, value in layer.state_dict().items()})
    torch.manual_seed(9)
    weights["decoder.version"] = torch.tensor([3.0])
    weights["encoder.fc.weight"] = torch.randn(16, 8)
    weights["decoder.fc.weight"] = weights["encoder.fc.weight"]
    weights["decoder.embed_positions.weight"] = torch.randn(20, 4)
    moment = torch.zeros_like(layer.query)
    return {
        "args": None,
        "cfg": {"model": cfg, "task": {"data": "nowhere"}},
        "model": weights,
        "criterion": None,
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": None},
                "num_updates": 7,
            }
        ],
        "task_state": {},
        "extra_state": {"epoch": 3},
        "last_optimizer_state": {"state": {0: {"exp_avg": moment, "exp_avg_sq": moment.clone()}}},
        **more,
    }


def save_toy(path: Path, layer: DPQEmbedding | None = None, **more: Any) -> Path:
    """Write such a checkpoint."""
    torch.save(make_state(layer or make_layer(), **more), path)
    return path


def load(path: Path | BinaryIO) -> Any:
    """A file of our own, read without any of the package's code."""
    kw = {} if torch.__version__ < "1.13" else {"weights_only": False}
    return torch.load(path, map_location="cpu", **kw)


def edit_record(state: dict[str, Any], edit: Callable[[dict[str, Any]], Any]) -> None:
    """Forge the record of a state; its checksum is made to fit."""
    cfg = state["cfg"]["model"]
    fields = vars(cfg) if isinstance(cfg, argparse.Namespace) else cfg
    raw = json.loads(fields[RECORD_KEY])
    raw.pop("crc32", None)
    edit(raw)
    fields[RECORD_KEY] = sealed(raw)
