"""fairseq-dpq-export CKPT OUT.safetensors: one embedding alone, for use outside fairseq."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fairseq_dpq.cli.common import add_common, tool
from fairseq_dpq.cli.text import print_json
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.compaction import DTYPES
from fairseq_dpq.files.data import symbols_of
from fairseq_dpq.files.errors import CheckpointError, printable
from fairseq_dpq.files.writer import check_target, write_form
from fairseq_dpq.size_report import Change, size_lines


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-export."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-export",
        description="Write one DPQ table of a checkpoint (training or compact form) as safetensors:"
        " packed codes, values, options and symbols. CompactEmbedding.from_file reads it.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("output", metavar="OUT.safetensors")
    parser.add_argument(
        "--table", help="module path of the table, e.g. encoder.embed_tokens (if there are several)"
    )
    parser.add_argument(
        "--dict", help="fairseq dictionary of the table (default: that of the checkpoint's data)"
    )
    parser.add_argument("--no-symbols", action="store_true", help="leave the symbols out")
    parser.add_argument(
        "--values-dtype",
        choices=sorted(DTYPES),
        help="how values are stored (default: as they are; float32 of a training checkpoint)",
    )
    add_common(parser, "the output")
    return parser


def export(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    source, target = Path(args.checkpoint), Path(args.output)
    check_target(target, [source], args.force)
    checkpoint = Checkpoint.load(source, args.trust)
    record = checkpoint.dpq_record()
    names = record.names()
    wanted = args.table or (next(iter(names)) if len(record.tables) == 1 else "is missing")
    if wanted not in names:
        raise CheckpointError(f"--table {wanted}: choose one of {', '.join(names)}")
    path = names[wanted]
    table = record.tables[path]
    n, d = table.num_embeddings, table.embedding_dim
    symbols = None if args.no_symbols else symbols_of(checkpoint, path, n, args.dict)
    form = checkpoint.form(path, DTYPES.get(args.values_dtype))
    write_form(target, form, path, symbols, args.force)
    facts: dict[str, Any] = {
        "output": str(target),
        "table": path,
        "num_embeddings": n,
        "embedding_dim": d,
        "symbols": symbols is not None,
        "full_bytes": 4 * n * d,
        "bytes": target.stat().st_size,
    }
    if args.json:
        return print_json(facts)
    file, note = Change(facts["bytes"], facts["bytes"]), "with symbols" if symbols else ""
    lines = size_lines(Change(4 * n * d, form.saved_nbytes), None, file, note)
    print(f"{printable(f'{target}: {path}')}, {n} x {d}", *lines, sep="\n")


main = tool(get_parser, export)

if __name__ == "__main__":
    sys.exit(main())
