"""fairseq-dpq-classify CKPT TEXT: the class of each line of a text file, with its probability."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator, Sequence

import torch

from fairseq_dpq.cli.common import tool
from fairseq_dpq.files.data import load_model
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.writer import check_target, write_whole

_CHUNK = 10_000  # lines in memory at a time
_WORD = re.compile(r"\w+")


def split_words(text: str) -> list[str]:
    """The words of a text: runs of letters, digits and underscores, in lower case."""
    return _WORD.findall(text.lower())


def get_parser() -> argparse.ArgumentParser:
    """The options of fairseq-dpq-classify."""
    parser = argparse.ArgumentParser(
        prog="fairseq-dpq-classify",
        description="Label each line of a text with a model of --task text_classification, in "
        "training or compact form. Prints the class and its probability, separated by a tab.",
    )
    add = parser.add_argument
    add("checkpoint", metavar="CKPT")
    add("text", metavar="TEXT", help="a document per line; -: standard input")
    add("--data", metavar="DIR", help="folder with the dictionaries (default: that of training)")
    add("--output", metavar="FILE", help="write to FILE, which appears once it is complete")
    add("--force", action="store_true", help="replace the output if it exists")
    add("--scores", action="store_true", help="print all classes, the most probable one first")
    add("--tokenized", action="store_true",
        help="words are already separated by spaces, as they are in the dictionary")  # fmt: skip
    add("--batch-size", type=int, default=256, metavar="N", help="(default: %(default)s)")
    add("--cpu", action="store_true", help="do not use a GPU")
    add("--json", action="store_true", help="print a JSON object per line")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


@torch.inference_mode()
def _probabilities(
    model: Any, task: Any, documents: Sequence[list[str]], args: argparse.Namespace
) -> torch.Tensor:
    """(documents, C), in the order of the documents."""
    device = next(model.parameters()).device
    index = task.source_dictionary.index
    tokens = [torch.tensor([index(w) for w in words], dtype=torch.long) for words in documents]
    data = task.build_dataset_for_inference(tokens, [len(t) for t in tokens])
    out = torch.empty(len(documents), len(task.classes))
    for chosen in torch.as_tensor(data.ordered_indices()).split(args.batch_size):
        batch = data.collater([data[i] for i in chosen.tolist()])
        logits, _ = model(batch["net_input"]["src_tokens"].to(device))
        out[chosen] = logits.float().softmax(-1).cpu()
    return out


def _lines(stream: BinaryIO, name: str) -> Iterator[str]:
    for number, raw in enumerate(stream, start=1):
        try:
            yield raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{name}, line {number}: not UTF-8 text ({error})") from error


def _format(classes: list[str], scores: list[float], args: argparse.Namespace) -> str:
    order = sorted(range(len(classes)), key=lambda i: -scores[i])
    best = order[0]
    if args.json:
        facts: dict[str, Any] = {"label": classes[best], "score": round(scores[best], 6)}
        if args.scores:
            facts["scores"] = {classes[i]: round(scores[i], 6) for i in order}
        return json.dumps(facts, ensure_ascii=False)
    shown = order if args.scores else order[:1]
    return "\t".join(f"{classes[i]}\t{scores[i]:.4f}" for i in shown)


def classify(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    if args.batch_size < 1:
        raise CheckpointError(f"--batch-size {args.batch_size}: must be at least 1")
    source = None if args.text == "-" else Path(args.text)
    if source is not None and not source.is_file():
        raise CheckpointError(f"no file {source}")
    if args.output:
        inputs = [Path(args.checkpoint), *([source] if source else [])]
        check_target(Path(args.output), inputs, args.force)
    changes = {} if args.data is None else {"data": args.data}
    model, task = load_model(Path(args.checkpoint), "text_classification", changes, "")
    model.to("cuda" if torch.cuda.is_available() and not args.cpu else "cpu").eval()
    split: Callable[[str], list[str]] = str.split if args.tokenized else split_words

    def write(out: BinaryIO) -> None:
        opened: Any = source.open("rb") if source else contextlib.nullcontext(sys.stdin.buffer)
        with opened as stream:
            lines = _lines(stream, args.text)
            for chunk in iter(lambda: list(islice(lines, _CHUNK)), []):
                rows = _probabilities(model, task, [split(t) for t in chunk], args)
                for scores in rows.tolist():
                    out.write((_format(task.classes, scores, args) + "\n").encode("utf-8"))

    if args.output:
        write_whole(Path(args.output), write, None, args.force)
    else:
        write(sys.stdout.buffer)
        sys.stdout.flush()


main = tool(get_parser, classify)

if __name__ == "__main__":
    sys.exit(main())
