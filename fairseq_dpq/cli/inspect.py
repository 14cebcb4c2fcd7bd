"""fairseq-dpq-inspect CKPT...: what the embeddings of checkpoints take, or would take."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Sequence

from torch import Tensor

from fairseq_dpq import native
from fairseq_dpq.checkpoints.checkpoint import (
    Checkpoint,
    keys_of,
    stored_bytes,
    stored_form,
    training_layer,
)
from fairseq_dpq.checkpoints.errors import CheckpointError
from fairseq_dpq.checkpoints.report import left_alone, table_facts, token_tables
from fairseq_dpq.choosing_sizes import compact_bytes
from fairseq_dpq.cli import suggest
from fairseq_dpq.cli.common import Bars, add_common, notes, run, size, text_table, used_codes
from fairseq_dpq.config import DPQConfig, DPQConfigError, add_flags, say_flag
from fairseq_dpq.forms.product_codes import CompactEmbedding
from fairseq_dpq.printable import printable
from fairseq_dpq.record import TablesRecord
from fairseq_dpq.sizes import default_D

_ROWS = 1 << 15


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-inspect."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-inspect",
        description="Show the DPQ tables of checkpoints in either form, and from one checkpoint to "
        "the next how many codes changed; of a checkpoint without DPQ, what its embeddings would "
        "shrink to.",
    )
    parser.add_argument("checkpoints", nargs="*", metavar="CKPT")
    group = parser.add_argument_group("for checkpoints without DPQ")
    add_flags(group, ["K", "D", "share_subspaces"], K=DPQConfig().K)
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
    out, bars = [], Bars()
    for path in args.checkpoints:
        checkpoint = Checkpoint.load(path, args.trust)
        record = checkpoint.record()
        facts: dict[str, Any] = {
            "checkpoint": str(path),
            "form": record.stage if record else "full",
            "file_bytes": checkpoint.file_bytes,
            "optimizer_bytes": stored_bytes(checkpoint.state.get("last_optimizer_state")),
        }
        if record is None:
            facts["embeddings"] = _full(checkpoint, args)
            before = {}
        else:
            facts["source"] = record.source
            facts["embeddings"], before = _dpq(checkpoint, record, before, bars)
        facts["left_alone"] = left_alone(checkpoint, record) if record else []
        out.append(facts)
        bars.close()
        if not args.json:
            print(_text(facts, args) + "\n")
    if args.json:
        print(json.dumps(out, indent=2))
    else:
        print(native.describe())


def _dpq(
    checkpoint: Checkpoint, record: TablesRecord, before: dict[str, Tensor], bars: Bars
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    out, now = [], {}
    for path, table in record.tables.items():
        if record.stage == "compact":
            module = stored_form(checkpoint, path, table)
        else:
            layer = training_layer(checkpoint, path, table)
            module = layer.compact(packed=True, progress=bars(path, table.num_embeddings))
        usage = module.codes_in_use()
        facts = table_facts(path, table, module, None if usage is None else usage["used"])
        entropy = None if usage is None else float(usage["entropy"].double().sum())
        facts["entropy_bits_per_symbol"] = entropy
        mine = keys_of(checkpoint.weights, [path])
        facts["stored_bytes"] = stored_bytes([checkpoint.weights[key] for key in mine])
        facts["changed"] = None
        if isinstance(module, CompactEmbedding) and not module.renumbered(table.config.K):
            codes = module.unpacked_codes()
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
    out = []
    for path, aliases in token_tables(checkpoint.weights, checkpoint.model_cfg).items():
        n, d = checkpoint.weights[path + ".weight"].shape
        D = args.D or default_D(d)
        config = DPQConfig(K=args.K, D=D, share_subspaces=args.share_subspaces)
        facts: dict[str, Any] = {"path": path, "aliases": aliases, "D": D}
        facts.update(num_embeddings=n, embedding_dim=d, full_bytes=4 * n * d)
        try:
            config.validate(d, say_flag)
            small = compact_bytes(n, d, args.K, D, args.share_subspaces)
            facts["compact_bytes"] = small
            facts["formula_cr"] = config.compression_ratio(n, d)
            facts["measured_cr"] = 4 * n * d / small
        except DPQConfigError as error:
            facts["error"] = str(error)
        out.append(facts)
    return out


def _text(facts: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [
        f"{printable(facts['checkpoint'])}: {facts['form']} form, {size(facts['file_bytes'])} bytes"
    ]
    if facts["optimizer_bytes"]:
        lines[0] += f", {size(facts['optimizer_bytes'])} of them optimiser state"
    if facts.get("source"):
        lines[0] += f", made of {printable(facts['source'])}"
    if not facts["embeddings"]:
        return lines[0] + "\nno token embedding found"
    full = facts["form"] == "full"
    lines.append(text_table(_full_rows(facts, args) if full else _dpq_rows(facts)))
    for table in facts["embeddings"]:
        lines += notes(table)
    for item in facts["left_alone"]:
        text = f"not DPQ: {item['name']}, {size(item['bytes'])} bytes: {item['why']}"
        lines.append(printable(text))
    return "\n".join(lines)


def _dpq_rows(facts: dict[str, Any]) -> list[list[str]]:
    head = ["embedding", "table", "options", "stored", "compact", "CR formula", "CR measured"]
    rows = [[*head, "bits/symbol", "entropy", "used codes min/median/max", "codes changed"]]
    for table in facts["embeddings"]:
        changed, entropy = table["changed"], table["entropy_bits_per_symbol"]
        rows.append(
            [
                table["path"],
                f"{table['num_embeddings']} x {table['embedding_dim']}",
                table["description"],
                size(table["stored_bytes"]),
                size(table["compact_bytes"]),
                f"{table['formula_cr']:.2f}",
                f"{table['measured_cr']:.2f}",
                str(table["bits_per_symbol"]),
                "-" if entropy is None else f"{entropy:.1f}",
                used_codes(table["used_codes"]),
                "-" if changed is None else f"{100 * changed['codes']:.2f} %",
            ]
        )
    return rows


def _full_rows(facts: dict[str, Any], args: argparse.Namespace) -> list[list[str]]:
    sizes = "/".join(dict.fromkeys(str(table["D"]) for table in facts["embeddings"]))
    rows = [["embedding", "table", "bytes", f"at K={args.K} D={sizes}", "CR formula"]]
    for table in facts["embeddings"]:
        small = "error" not in table
        rows.append(
            [
                table["path"],
                f"{table['num_embeddings']} x {table['embedding_dim']}",
                size(table["full_bytes"]),
                size(table["compact_bytes"]) if small else table["error"],
                f"{table['formula_cr']:.2f}" if small else "-",
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    return run(get_parser(), lambda args: inspect(args, given[at + 1 :]), given[:at])


def cli_main() -> None:
    """The console command."""
    sys.exit(main())


if __name__ == "__main__":
    cli_main()
