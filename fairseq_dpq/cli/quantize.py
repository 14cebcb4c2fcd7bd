"""fairseq-dpq-quantize CKPT OUT.pt --dpq-K 32 --dpq-D 128: compress a trained full checkpoint by
product quantisation, without training; or make of it the start of DPQ fine-tuning."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fairseq_dpq.any_model.calibration import Use
from fairseq_dpq.cli.common import add_common, add_exact_logits, tool
from fairseq_dpq.cli.text import print_written
from fairseq_dpq.config import add_flags, flag
from fairseq_dpq.fairseq_plugin.options import (
    PluginOptions,
    decoder_only,
    flag_fields,
    make_plugin_options,
)
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.compaction import check_written, quantize_state
from fairseq_dpq.files.data import dictionary_use, text_use
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.writer import check_target, write_state
from fairseq_dpq.forms import DEFAULT_FORM, FORMS
from fairseq_dpq.forms.base import FormOption
from fairseq_dpq.forms.quantization import HIGH_ERROR

_DECODER = {"decoder_K": "K", "decoder_D": "D"}  # the decoder's own of an option
_OF_USE = ("dict", "calibrate", "subset", "tokens")
_FLAGS = {f.name: f for f in flag_fields()}


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-quantize: those of fairseq-train, and a few of its own."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-quantize",
        description="Turn a trained checkpoint with full embeddings into a compact one without "
        "training: product quantisation (k-means in each subspace), tiers (more bits for rows that "
        "are used more), scalar quantisation, low rank by singular values, or additive codes that "
        "a network learns.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("output", metavar="OUT.pt")
    parser.add_argument(
        "--form", choices=list(FORMS), help=f"how tables are stored (default: {DEFAULT_FORM})"
    )
    parser.add_argument(
        "--trainable",
        action="store_true",
        help="write a DPQ training checkpoint instead: fine-tune it by fairseq-train "
        "--finetune-from-model OUT.pt with the same --dpq-* options",
    )
    parser.add_argument("--seed", type=int, default=0, help="of k-means (default: %(default)s)")
    add_exact_logits(parser)
    tables = parser.add_argument_group("tables")
    add_flags(tables, [_FLAGS["embeddings"]], "--embeddings")
    add_flags(tables, [_FLAGS[name] for name in _DECODER])
    use = parser.add_argument_group(
        "what the model reads (--form tiers)", "rows that are used more get more bits"
    )
    add = use.add_argument
    add("--dict", metavar="FILE", help="the dictionary with counts (default: that of training)")
    add("--calibrate", metavar="DATA", help="run the model on a data-bin: its outputs decide, too")
    add("--subset", default="train", help="of --calibrate (default: %(default)s)")
    add("--tokens", type=int, default=20_000, help="of --calibrate (default: %(default)s)")
    seen: set[str] = set()
    for kind, form in FORMS.items():
        group = parser.add_argument_group(f"--form {kind}")
        for option in form.options:
            if option.flag in seen:  # of another form too
                continue
            seen.add(option.flag)
            if option.keyword in _FLAGS:
                add_flags(group, [_FLAGS[option.keyword]], K=0)
            elif option.default is True:
                how: dict[str, Any] = {"dest": _dest(option), "action": "store_false"}
                group.add_argument(option.flag, help=option.help, **how)
            else:
                text = f"{option.help} (default: %(default)s)"
                how = {"type": type(option.default), "default": option.default, "help": text}
                group.add_argument(option.flag, dest=_dest(option), **how)
    only = [f for name, f in _FLAGS.items() if not _takers()[name][1]]
    add_flags(parser.add_argument_group("only with --trainable"), only)
    add_common(parser, "OUT.pt")
    return parser


def _dest(option: FormOption) -> str:
    """Where argparse puts an option: two forms may have one keyword with flags of their own."""
    return option.keyword if option.keyword in _FLAGS else option.flag.strip("-").replace("-", "_")


def _takers() -> dict[str, tuple[str, list[str]]]:
    """All options as argparse has them: the flag, and the forms that take it."""
    out: dict[str, tuple[str, list[str]]] = {name: (flag(name), []) for name in _FLAGS}
    out["embeddings"] = flag("embeddings"), list(FORMS)
    for kind, form in FORMS.items():
        for option in form.options:
            out.setdefault(_dest(option), (option.flag, []))[1].append(kind)
    for name, keyword in _DECODER.items():
        out[name] = flag(name), out[keyword][1]
    by_use = [kind for kind, form in FORMS.items() if form.takes_use]
    return {**out, **{name: (f"--{name}", by_use) for name in _OF_USE}}


def _settings(args: argparse.Namespace, decoder: bool) -> dict[str, Any]:
    """The form's settings for one table."""
    own = {o.keyword: getattr(args, _dest(o)) for o in FORMS[args.form].options}
    for name, keyword in _DECODER.items():
        if decoder and keyword in own and getattr(args, name):
            own[keyword] = getattr(args, name)
    return own


def _check_options(args: argparse.Namespace, options: PluginOptions) -> None:
    """Refuse options that would have no effect, and those that cannot work."""
    if args.trainable:
        if args.form is not None:
            raise CheckpointError(
                f"--form {args.form} goes without --trainable; the form follows --dpq-method there"
            )
        if not options.enabled:
            raise CheckpointError("--dpq-K is missing; try --dpq-K 32")
    defaults = vars(get_parser().parse_args(["", ""]))
    given = {k: v for k, v in _takers().items() if getattr(args, k) != defaults[k]}
    if args.trainable:
        for name, (said, _) in given.items():
            if name not in _FLAGS:
                raise CheckpointError(f"{said} goes without --trainable")
        return
    args.form = args.form or DEFAULT_FORM
    if args.tokens < 1:
        raise CheckpointError(f"--tokens {args.tokens}: must be 1 or more; try 20000")
    for name in () if args.calibrate else ("subset", "tokens"):
        if name in given:
            raise CheckpointError(f"--{name} needs --calibrate")
    for said, kinds in given.values():
        if args.form in kinds:
            continue
        if not kinds:
            raise CheckpointError(f"{said} is for training: it needs --trainable")
        raise CheckpointError(f"{said} needs --form {kinds[0]}")
    for option in FORMS[args.form].options:
        name = _dest(option)
        if option.default and defaults[name] == 0 == getattr(args, name):
            raise CheckpointError(f"{option.flag} is missing; try {option.flag} {option.default}")


def quantize(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    source, target = Path(args.checkpoint), Path(args.output)
    options = make_plugin_options({name: getattr(args, name) for name in _FLAGS})
    _check_options(args, options)
    check_target(target, [source], args.force)
    checkpoint = Checkpoint.load(source, args.trust)
    texts: dict[str, Use] = {}
    if args.calibrate is not None:
        texts = text_use(source, args.calibrate, args.subset, args.tokens)

    def use_of(path: str, rows: int) -> Use | None:
        use, counted = texts.get(path), dictionary_use(checkpoint, path, rows, args.dict)
        if use is None or counted is None:
            return use or counted
        use.counts = counted.counts  # of all the text of training
        return use

    state, tables = quantize_state(
        checkpoint,
        options,
        source=str(source),
        kind=args.form or DEFAULT_FORM,
        settings=lambda decoder: _settings(args, decoder),
        trainable=args.trainable,
        seed=args.seed,
        exact_logits=args.exact_logits,
        use_of=use_of,
    )
    write_state(target, state, lambda part: check_written(state, part, args.trust), args.force)
    stage = "training" if args.trainable else "compact"
    later = ["(embeddings and model as they will be once compact)"] if args.trainable else []
    print_written(
        args,
        checkpoint,
        Checkpoint(target, state, target.stat().st_size),
        tables,
        facts={"input": str(source), "stage": stage},
        stage=f" ({stage} form)",
        notes=[*later, *_warnings(tables, options)],
    )


def _warnings(tables: list[dict[str, Any]], options: PluginOptions) -> list[str]:
    """Tables of which much is lost, and what would lose less."""
    lines = []
    for table in tables:
        if table["relative_error"] <= HIGH_ERROR:
            continue
        lost = f"{100 * table['relative_error']:.1f} % of its squared norm"
        text = f"warning: {table['path']} loses {lost}"
        better = table["better"]
        if better is not None:
            say = options.format(decoder_only([table["path"], *table["aliases"]]))
            instead = " ".join(say(name, value) for name, value in better["settings"].items())
            text += (
                f"; {instead} would lose about {100 * better['error']:.1f} % "
                f"(compression ratio {better['ratio']:.1f})"
            )
        else:
            numbers = [o for o in FORMS[table["form"]].options if type(o.default) is int]
            text += f"; a larger {numbers[0].flag} loses less" if numbers else ""
        lines.append(text)
    return lines


main = tool(get_parser, quantize)

if __name__ == "__main__":
    sys.exit(main())
