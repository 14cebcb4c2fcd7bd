"""fairseq-dpq-inspect CKPT...: what the embeddings of checkpoints take, or would take."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import fields
from typing import Any, Sequence

from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.choosing_sizes import compact_bytes
from fairseq_dpq.cli import suggest
from fairseq_dpq.cli.common import Bars, add_common, run
from fairseq_dpq.cli.text import report
from fairseq_dpq.config import DPQConfigError, add_flags, format_flag
from fairseq_dpq.files.checkpoint import Checkpoint, inference_form, keys_of, stored_bytes
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.reader import is_safetensors, read_tensors
from fairseq_dpq.files.record import Table, TablesRecord
from fairseq_dpq.files.tables import (
    left_alone,
    model_sizes,
    run_of,
    table_facts,
    token_tables,
)
from fairseq_dpq.forms import FORMS
from fairseq_dpq.methods import DEFAULT_METHOD, make_options
from fairseq_dpq.methods.base import ProductOptions
from fairseq_dpq.size_report import Change
from fairseq_dpq.sizes import DEFAULT_K, bits_note, default_D

_ROWS = 1 << 15


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-inspect."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-inspect",
        description="Show the DPQ tables of checkpoints in either form and of exported tables, and "
        "from one checkpoint of a run to the next how many codes changed; of a checkpoint without "
        "DPQ, what its embeddings would shrink to.",
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CKPT")
    group = parser.add_argument_group("for checkpoints without DPQ")
    add_flags(group, [f for f in fields(ProductOptions) if f.metadata["flag"]], K=DEFAULT_K)
    suggest.add_targets(parser)
    add_common(parser)
    return parser


def inspect(args: argparse.Namespace, words: Sequence[str] = ()) -> None:
    """Do what the command line asks for; `words` are a training command."""
    if suggest.wanted(args, words):
        return suggest.suggest(args, words)
    if not args.checkpoints:
        raise CheckpointError("give a checkpoint, or a command after --")
    before: dict[str, Tensor] = {}
    last_run: Any = None
    out, bars = [], Bars()
    for path in args.checkpoints:
        if is_safetensors(path):
            out.append(_exported(path))
            before = {}
            continue
        checkpoint = Checkpoint.load(path, args.trust)
        record = checkpoint.record()
        facts: dict[str, Any] = {
            "checkpoint": str(path),
            "form": record.stage if record else "full",
            "file_bytes": checkpoint.file_bytes,
            "optimizer_bytes": stored_bytes(checkpoint.state.get("last_optimizer_state")),
        }
        others = left_alone(checkpoint, record)
        if record is None:
            facts["embeddings"] = _full(checkpoint, args)
            facts["left_alone"] = [item for item in others if item["kind"] == "output"]
            before = {}
        else:
            facts["source"] = record.source
            facts["left_alone"] = others
            this_run = run_of(checkpoint, record)
            if before and this_run != last_run:
                facts["other_run"], before = True, {}
            last_run = this_run
            facts["embeddings"], before = _dpq(checkpoint, record, before, bars)
        sizes = _sizes(checkpoint, record, facts["embeddings"])
        if sizes is not None:
            facts["sizes"] = {name: change.facts() for name, change in sizes.items()}
        out.append(facts)
        bars.close()
    if args.json:
        print(json.dumps(out, indent=2))
    else:
        print(report(out))
        print(native.describe())


def _exported(path: str) -> dict[str, Any]:
    """A table of fairseq-dpq-export: no model around it."""
    opened = read_tensors(path)
    form = opened.form(FORMS)
    table = Table(form.num_embeddings, form.embedding_dim, form.padding_idx, {})
    own = table_facts(opened.name, table, form)
    sizes = {"embeddings": Change(own["full_bytes"], own["compact_bytes"]).facts()}
    return {
        "checkpoint": str(path),
        "form": "exported",
        "file_bytes": os.path.getsize(path),
        "optimizer_bytes": 0,
        "embeddings": [{**own, "changed": None}],
        "left_alone": [],
        "sizes": sizes,
    }


def _sizes(
    checkpoint: Checkpoint, record: TablesRecord | None, tables: list[dict[str, Any]]
) -> dict[str, Change] | None:
    """The embeddings and the model, full and compact; None if a table cannot be compressed."""
    if not tables or any("error" in table for table in tables):
        return None
    if record is not None:
        embeddings, model = model_sizes(checkpoint.weights, record, tables)
        return {"embeddings": embeddings, "model": model}
    full = stored_bytes([checkpoint.weights[f"{table['path']}.weight"] for table in tables])
    small = sum(table["compact_bytes"] for table in tables)
    whole = stored_bytes(checkpoint.weights)
    return {"embeddings": Change(full, small), "model": Change(whole, whole - full + small)}


def _dpq(
    checkpoint: Checkpoint, record: TablesRecord, before: dict[str, Tensor], bars: Bars
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    out, now = [], {}
    for path, table in record.tables.items():
        module = inference_form(checkpoint, path, progress=bars)
        facts = table_facts(path, table, module)
        mine = keys_of(checkpoint.weights, [path])
        facts["stored_bytes"] = stored_bytes([checkpoint.weights[key] for key in mine])
        facts["changed"] = None
        whole = set(module.code_sizes) == {table.options.get("K", table.form.get("K"))}
        codes = module.unpacked_codes() if whole else None
        if codes is not None:  # unused codes were not dropped, nor the others renumbered
            old = before.get(path)
            if old is not None and old.shape == codes.shape:
                facts["changed"] = _changed(old, codes)
            now[path] = codes
        out.append(facts)
    return out, now


def _changed(old: Tensor, new: Tensor) -> dict[str, float]:
    """Shares of codes, and of symbols with a code, that differ."""
    codes = symbols = 0
    for start in range(0, old.shape[0], _ROWS):
        differ = old[start : start + _ROWS] != new[start : start + _ROWS]
        codes += int(differ.sum())
        symbols += int(differ.any(1).sum())
    return {"codes": codes / old.numel(), "symbols": symbols / old.shape[0]}


def _full(checkpoint: Checkpoint, args: argparse.Namespace) -> list[dict[str, Any]]:
    out, note = [], bits_note(args.K)
    for found in token_tables(checkpoint.weights, checkpoint.model_cfg):
        n, d = checkpoint.weights[f"{found.path}.weight"].shape
        D = args.D or default_D(d)
        config = make_options(
            DEFAULT_METHOD, {"K": args.K, "D": D, "share_subspaces": args.share_subspaces}
        )
        facts: dict[str, Any] = {"path": found.path, "aliases": found.paths[1:], "D": D}
        facts.update(num_embeddings=n, embedding_dim=d, full_bytes=4 * n * d)
        facts.update(description=f"full, at K={args.K} D={D}", notes=[*filter(None, [note])])
        try:
            config.validate(d, format_flag)
            small = compact_bytes(n, d, args.K, D, args.share_subspaces)
            facts["compact_bytes"] = small
            facts["formula_cr"] = config.compression_ratio(n, d)
            facts["measured_cr"] = 4 * n * d / small
        except DPQConfigError as error:
            facts["error"] = str(error)
        out.append(facts)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    return run(get_parser(), lambda args: inspect(args, given[at + 1 :]), given[:at])


if __name__ == "__main__":
    sys.exit(main())
