"""fairseq-dpq-inspect CKPT...: what the embeddings of checkpoints take, or would take."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.cli import suggest
from fairseq_dpq.cli.common import add_common, tool
from fairseq_dpq.cli.text import print_json, report
from fairseq_dpq.config import DPQConfigError, add_flags, format_flag
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.tables import left_alone, run_of
from fairseq_dpq.methods import DEFAULT_METHOD, make_options
from fairseq_dpq.methods.base import ProductOptions
from fairseq_dpq.report.build import code_change
from fairseq_dpq.report.models import Model, TableView, load_model
from fairseq_dpq.size_report import Change
from fairseq_dpq.sizes import DEFAULT_K, bits_note, compact_bytes, default_D


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


def inspect(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    if suggest.wanted(args):
        return suggest.suggest(args)
    if not args.checkpoints:
        raise CheckpointError("give a checkpoint, or a command after --")
    options = {"K": args.K, "D": args.D, "share_subspaces": args.share_subspaces}
    make_options(DEFAULT_METHOD, options).validate(format=format_flag)
    out = []
    before: dict[str, Tensor] = {}
    last_run: Any = None
    for path in args.checkpoints:
        model = load_model(Path(path), trust=args.trust)
        facts = _facts(path, model, args)
        codes, this_run = {}, None
        if model.checkpoint is not None and model.kind != "full":
            codes = {table.path: table.codes for table in model.tables if _comparable(table)}
            this_run = run_of(model.checkpoint)
        if before and codes and this_run != last_run:
            facts["other_run"], before = True, {}
        for own in facts["embeddings"]:
            old, new = before.get(own["path"]), codes.get(own["path"])
            own["changed"] = None
            if old is not None and new is not None and old.shape == new.shape:
                own["changed"] = code_change(old, new, [own["K"]] * new.shape[1])
        before, last_run = codes, this_run
        out.append(facts)
    if args.json:
        return print_json(out)
    print(report(out))
    print(native.describe())


def _comparable(table: TableView) -> bool:
    """Whether its codes are as in training: unused ones not dropped, nor the others renumbered."""
    return table.form is not None and set(table.form.code_sizes) == {table.facts.get("K")}


def _facts(path: str, model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """All that is known of a file."""
    checkpoint, full = model.checkpoint, model.kind == "full"
    tables = [_shrunk(table, args) if full else table.facts for table in model.tables]
    others = left_alone(checkpoint) if checkpoint else []
    facts: dict[str, Any] = {
        "checkpoint": path,
        "form": model.kind,
        "file_bytes": model.bytes["file_bytes"],
        "optimizer_bytes": model.bytes["optimizer_bytes"],
        "source": checkpoint.record.source if checkpoint and checkpoint.record else None,
        "embeddings": tables,
        "left_alone": [item for item in others if not full or item["kind"] == "output"],
    }
    if not tables or any("error" in table for table in tables):
        return facts  # there is nothing to compress, or it cannot be
    before = sum(table["stored_bytes" if full else "full_bytes"] for table in tables)
    after = sum(table["compact_bytes"] for table in tables)
    facts["sizes"] = {"embeddings": Change(before, after)}
    if checkpoint is not None:
        rest = checkpoint.other_bytes() - (before if full else 0)
        facts["sizes"]["model"] = Change(rest + before, rest + after)
    return facts


def _shrunk(table: TableView, args: argparse.Namespace) -> dict[str, Any]:
    """What a full table would shrink to."""
    K, D, note = args.K, args.D or default_D(table.d), bits_note(args.K)
    options = {"K": K, "D": D, "share_subspaces": args.share_subspaces}
    facts = {**table.facts, "D": D, "description": f"full, at K={K} D={D}"}
    facts["notes"] = [note] if note else []
    config = make_options(DEFAULT_METHOD, options)
    try:
        config.validate(table.d, format_flag)
    except DPQConfigError as error:
        return {**facts, "error": str(error)}
    small = compact_bytes(table.n, table.d, K, D, args.share_subspaces)
    facts["compact_bytes"], facts["measured_cr"] = small, facts["full_bytes"] / small
    return {**facts, "formula_cr": config.compression_ratio(table.n, table.d)}


main = tool(get_parser, inspect, command=True)

if __name__ == "__main__":
    sys.exit(main())
