"""fairseq-dpq-compact IN.pt OUT.pt: drop what only training needs, keep every output bit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fairseq_dpq.cli.common import add_common, add_exact_logits, tool
from fairseq_dpq.cli.text import print_written
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.compaction import DTYPES, compact_state, verify
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.preparing import average, has_ema, with_ema
from fairseq_dpq.files.writer import check_target, write_state


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-compact."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-compact",
        usage="%(prog)s [options] IN.pt OUT.pt\n       %(prog)s --average IN.pt IN.pt... OUT.pt",
        description="Turn a checkpoint that was trained with DPQ into a small one for inference: "
        "packed codes and values instead of queries and keys, and no optimiser state. Its outputs "
        "are those of the training checkpoint, bit for bit.",
    )
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="IN.pt, the training checkpoint (several with --average); last OUT.pt, the compact "
        "checkpoint to write",
    )
    add("--average", action="store_true", help="average several inputs first, then compact")
    add("--ema", action="store_true", help="take the weights of --store-ema, not the last ones")
    how = "how values are stored; float32 is exact (default: %(default)s)"
    add("--values-dtype", choices=sorted(DTYPES), default="float32", help=how)
    add("--half", action="store_true", help="store the rest of the model in float16")
    shrink = "drop the codes that no symbol uses; smaller still, the same outputs"
    add("--lossless-shrink", action="store_true", help=shrink)
    add_exact_logits(parser)
    no = "do not compare the written file with the input"
    add("--no-verify", dest="verify", action="store_false", help=no)
    yes = "reload the written file and compare every row with the input (the default)"
    add("--verify", dest="verify", action="store_true", default=True, help=yes)
    add_common(parser, "OUT.pt")
    return parser


def compact(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    *inputs, output = [Path(path) for path in args.files]
    if not inputs:
        raise CheckpointError(f"{output}: give the name of the output too, IN.pt OUT.pt")
    check_target(output, inputs, args.force)
    if len(inputs) > 1 and not args.average:
        raise CheckpointError(
            f"{len(inputs)} inputs: add --average to compact their average; for an ensemble, "
            "compact each by itself and give fairseq-generate --path A.pt:B.pt"
        )
    checkpoints = [Checkpoint.load(path, args.trust) for path in inputs]
    ema_left = any(has_ema(checkpoint) for checkpoint in checkpoints) and not args.ema
    if args.ema:
        checkpoints = [with_ema(checkpoint) for checkpoint in checkpoints]
    checkpoint = average(checkpoints) if args.average else checkpoints[0]
    state, tables = compact_state(
        checkpoint,
        source=", ".join(str(path) for path in inputs),
        values_dtype=args.values_dtype,
        half=args.half,
        shrink=args.lossless_shrink,
        exact_logits=args.exact_logits,
    )

    def check(written: Path) -> bool:
        return args.verify and verify(checkpoint, written, args.trust)

    loaded = write_state(output, state, check, args.force)
    query = sum(table["query_bytes"] for table in tables)
    optimizer = checkpoint.optimizer_bytes()
    given = ("values_dtype", "half", "lossless_shrink", "exact_logits", "ema")
    facts = {
        "input": [str(path) for path in inputs],
        **{name: getattr(args, name) for name in given},
        "ema_left_out": ema_left,
        "verified": args.verify,
        "loaded_in_fairseq": loaded,
        "dropped": {"query": query, "optimizer": optimizer},
    }
    rounded = ", rounded," if args.half or args.values_dtype != "float32" else ""
    same = f"verified: every row equals the original{rounded} bit for bit"
    ema = "left out: the EMA weights; --ema takes them instead of the last ones"
    print_written(
        args,
        checkpoint,
        Checkpoint(output, state, output.stat().st_size),
        tables,
        facts=facts,
        verdict=f"; {same if args.verify else 'not verified'}",
        about_file=f"without {query:,} of queries and {optimizer:,} of optimiser state",
        notes=[ema] if ema_left else [],
    )


main = tool(get_parser, compact)

if __name__ == "__main__":
    sys.exit(main())
