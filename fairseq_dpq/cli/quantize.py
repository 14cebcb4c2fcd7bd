"""fairseq-dpq-quantize CKPT OUT.pt --dpq-K 32 --dpq-D 128: compress a trained full checkpoint by
product quantisation, without training; or make of it the start of DPQ fine-tuning."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Sequence

from fairseq_dpq.checkpoints.contents import Checkpoint
from fairseq_dpq.checkpoints.errors import CheckpointError
from fairseq_dpq.checkpoints.facts import table_facts
from fairseq_dpq.checkpoints.quantizing import check_written, quantize_state
from fairseq_dpq.checkpoints.writing import check_target, save_state, write_whole
from fairseq_dpq.cli.common import Bars, add_common, notes, run, size, text_table
from fairseq_dpq.config import PluginConfig, flag_fields

_ALWAYS = ("K", "D", "share_subspaces", "embeddings", "decoder_K", "decoder_D")


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-quantize: those of PluginConfig, and a few of its own."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-quantize",
        description="Turn a trained checkpoint with full embeddings into a compact one by k-means "
        "in each subspace (product quantisation), without training.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("output", metavar="OUT.pt")
    parser.add_argument(
        "--trainable",
        action="store_true",
        help="write a DPQ training checkpoint instead: fine-tune it by fairseq-train "
        "--finetune-from-model OUT.pt with the same --dpq-* options",
    )
    parser.add_argument("--seed", type=int, default=0, help="of k-means (default: %(default)s)")
    always = parser.add_argument_group("tables")
    only = parser.add_argument_group("with --trainable")
    for field in flag_fields():
        group = always if field.name in _ALWAYS else only
        flags = ["--dpq-" + field.metadata.get("flag", field.name).replace("_", "-")]
        if field.name == "embeddings":
            flags.insert(0, "--embeddings")
        how: dict[str, Any] = {"dest": field.name, "help": field.metadata["help"]}
        if isinstance(field.default, bool):
            how["action"] = "store_false" if field.default else "store_true"
        else:
            kind = {"str": str, "float": float}.get(str(field.type).split(" ")[0], int)
            how.update(type=kind, choices=field.metadata.get("choices"))
            if field.name == "D":
                how["help"] += " (default: %(default)s)"
        how["required"] = field.name == "K"
        group.add_argument(*flags, default=field.default, **how)
    parser.add_argument("--force", action="store_true", help="replace OUT.pt if it exists")
    add_common(parser)
    return parser


def quantize(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    source, target = Path(args.checkpoint), Path(args.output)
    options = PluginConfig(**{f.name: getattr(args, f.name) for f in flag_fields()})
    if not args.trainable:
        for field in flag_fields():
            if field.name not in _ALWAYS and getattr(options, field.name) != field.default:
                flag = field.metadata.get("flag", field.name).replace("_", "-")
                raise CheckpointError(f"--dpq-{flag} is for training: it needs --trainable")
    check_target(target, [source], args.force)
    checkpoint = Checkpoint.load(source, args.trust)
    bars = Bars(least=1)
    state, done = quantize_state(
        checkpoint,
        options,
        source=str(source),
        trainable=args.trainable,
        seed=args.seed,
        progress=bars,
    )
    bars.close()
    write_whole(
        target,
        lambda file: save_state(state, file),
        lambda written: check_written(state, written, args.trust),
        args.force,
    )
    tables = []
    for item in done:
        facts = table_facts(item.path, item.table, item.stored, item.used, item.bits)
        tables.append({**facts, "relative_error": item.error})
    facts = {
        "input": str(source),
        "output": str(target),
        "form": "training" if args.trainable else "compact",
        "embeddings": tables,
        "file": {"before": checkpoint.file_bytes, "after": target.stat().st_size},
    }
    print(json.dumps(facts, indent=2) if args.json else _text(facts))


def _text(facts: dict[str, Any]) -> str:
    head = ["embedding", "table", "K x D", "full", "compact", "CR formula", "CR measured"]
    rows = [[*head, "squared error", "used codes min/median/max"]]
    lines = []
    for table in facts["embeddings"]:
        used = table["used_codes"]
        rows.append(
            [
                table["path"],
                f"{table['num_embeddings']} x {table['embedding_dim']}",
                f"{table['K']} x {table['D']}{' shared' if table['share_subspaces'] else ''}",
                size(table["full_bytes"]),
                size(table["compact_bytes"]),
                f"{table['formula_cr']:.2f}",
                f"{table['measured_cr']:.2f}",
                f"{100 * table['relative_error']:.2f} %",
                f"{used['min']}/{used['median']}/{used['max']}",
            ]
        )
        lines += notes(table)
    file = facts["file"]
    lines.append(
        f"{facts['output']} ({facts['form']} form): {size(file['before'])} -> "
        f"{size(file['after'])} bytes"
    )
    return "\n".join([text_table(rows), "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; the exit code."""
    return run(get_parser(), quantize, argv)


def cli_main() -> None:
    """The console command."""
    sys.exit(main())


if __name__ == "__main__":
    cli_main()
