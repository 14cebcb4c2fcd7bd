"""Text of a BERT-like model: raw text to pieces to the data of fairseq's task masked_lm."""

from __future__ import annotations

import contextlib
import gzip
import shutil
from itertools import islice
from pathlib import Path
from typing import IO, Iterator

from experiments.datasets import pieces, subwords
from experiments.datasets.binarize import dictionary_size, preprocess_shards
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.errors import PrepareError
from experiments.datasets.folders import build_folder
from experiments.datasets.sources import Held, RequiredFile
from experiments.datasets.text import CHUNK, clean

SPLITS = ("train", "valid", "test")
SHARD_LINES = 5_000_000  # fairseq keeps Python numbers for all lines of a file


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore


def read_chunks(path: Path, documents: bool) -> Iterator[list[str]]:
    """Lines of a text file, plain or .gz; blank ones are left out unless they end documents."""
    done = 0
    try:
        with _open(path) as stream:
            while True:
                lines = list(islice(stream, CHUNK))
                if not lines:
                    return
                texts = []
                for line in lines:
                    done += 1
                    text = line.decode("utf-8")
                    if documents or text.strip():
                        texts.append(text)
                yield texts
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: line {done}: not UTF-8 text ({error})") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise PrepareError(f"{path}: not a complete .gz file ({error})") from error


def _encode_file(
    run: Run, path: Path, digest: str, vocab: Path, key: Result
) -> tuple[Path, Result]:
    """A stage of its own for each file, so that an interrupted run continues with the next one."""
    folder = run.work / "stages" / f"{digest[:16]}-{key['vocab'][:16]}"

    def build(target: Path) -> Result:
        run.say(f"{path}: pieces")
        chunks = read_chunks(path, key["documents"])
        counts: Result = {"lines": 0, "pieces": 0, "unknown": 0, "shards": 0}
        room = 0
        with contextlib.ExitStack() as files:
            for lines in pieces.encode_chunks(vocab, key["lower"], chunks, run.workers):
                for line in lines:
                    if not line and not key["documents"]:
                        continue  # characters that have no piece
                    if not room:
                        files.close()
                        path_of_shard = target / str(counts["shards"])
                        output = files.enter_context(
                            open(path_of_shard, "w", encoding="utf-8", newline="\n")
                        )
                        counts["shards"] += 1
                        room = SHARD_LINES
                    output.write(line + "\n")
                    room -= 1
                    words = line.split()
                    counts["lines"] += 1
                    counts["pieces"] += len(words)
                    counts["unknown"] += words.count("<unk>")
        if not counts["pieces"]:
            raise PrepareError(f"{path}: no text in it")
        return counts

    return folder, build_folder(folder, {**key, "file": digest}, build, force=run.args.force)


def _train_model(run: Run, files: list[Path], model: Path) -> None:
    args = run.args
    run.say(f"SentencePiece: {args.spm_size:,} pieces ({args.spm_type})")
    text = model.with_name("cleaned")
    with open(text, "w", encoding="utf-8", newline="\n") as stream:
        for path in files:
            for lines in read_chunks(path, documents=False):
                stream.writelines(clean(line) + "\n" for line in lines)
    subwords.train([text], model, args.spm_size, args.spm_type, 0.9995, "--spm-size")
    text.unlink()


def _vocabulary(run: Run, files: dict[str, list[Path]], folder: Path) -> Path:
    """The vocabulary in the new folder: trained, given, or BERT's."""
    if run.args.spm_size:
        model = folder / pieces.MODEL
        _train_model(run, files["train"], model)
        return model
    if run.args.vocab is not None:
        return pieces.keep(run.args.vocab, folder)
    return pieces.keep(run.sources.obtain([pieces.BERT_VOCAB])[pieces.VOCAB], folder)


def _build(run: Run, files: dict[str, list[Path]], hashes: dict[str, str], folder: Path) -> Result:
    vocab = _vocabulary(run, files, folder)
    encoder = pieces.load(vocab, not run.args.cased)
    scratch = folder / "scratch"
    scratch.mkdir()
    pieces.write_dict(encoder, scratch / "dict.txt")
    key = {
        "vocab": run.sources.hashes({"": Held(vocab)})[vocab.name],
        "lower": not run.args.cased,
        "documents": run.args.documents,
    }
    stages: dict[str, list[Path]] = {}
    counts: Result = {}
    for split, paths in files.items():
        found = [_encode_file(run, path, hashes[str(path)], vocab, key) for path in paths]
        names = ("lines", "pieces", "unknown")
        counts[split] = {name: sum(count[name] for _, count in found) for name in names}
        stages[split] = [stage / str(n) for stage, count in found for n in range(count["shards"])]
    _binarise(run, folder, scratch, stages)
    shutil.rmtree(scratch)
    return {"counts": counts, "dictionary": dictionary_size(folder / "dict.txt")}


def _binarise(run: Run, folder: Path, scratch: Path, stages: dict[str, list[Path]]) -> None:
    """fairseq-preprocess. Training reads several files as one set, validation does not."""
    base = ["--only-source", "--srcdict", str(scratch / "dict.txt"), "--padding-factor", "1"]
    held_out: list[str] = []
    for split in SPLITS[1:]:
        if split in stages:
            with open(scratch / split, "wb") as merged:
                for path in stages[split]:
                    merged.write(path.read_bytes())
            held_out += [f"--{split}pref", str(scratch / split)]
    preprocess_shards(folder, base, stages["train"], held_out, run.workers)


def _report(result: Result) -> list[str]:
    lines = []
    for split, counts in result["counts"].items():
        text, share = f"{counts['pieces']:,} pieces", counts["unknown"] / counts["pieces"]
        lines.append(f"{split}: {counts['lines']:,} lines, {text}, {share:.2%} unknown")
    rows = result["dictionary"] + 1
    return [*lines, f"{rows:,} rows of the embedding, with fairseq's four specials and <mask>"]


def main(argv: list[str] | None = None) -> int:
    """Prepare the text of masked_lm; returns the exit code."""
    parser = make_parser("bert", "Raw text, plain or .gz, to the pieces of WordPiece or "
                         "SentencePiece: the data of masked_lm.")  # fmt: skip
    add = parser.add_argument
    for split in SPLITS:
        add(f"--{split}", type=Path, nargs="+", metavar="FILE", required=split != "test",
            default=[], help=f"text of the {split} split")  # fmt: skip
    pieces.add_flags(parser)
    add("--spm-size", type=int, default=0, metavar="N",
        help="train a SentencePiece model of N pieces on the train text instead")  # fmt: skip
    add("--spm-type", choices=("bpe", "unigram"), default="unigram", help="(default: %(default)s)")
    add("--documents", action="store_true",
        help="keep blank lines, which end documents (--sample-break-mode complete_doc)"
        )  # fmt: skip

    def body(run: Run) -> None:
        args = run.args
        if args.spm_size and args.vocab is not None:
            raise PrepareError(f"--spm-size {args.spm_size} and --vocab {args.vocab}: give one")
        files = {split: getattr(args, split) for split in SPLITS if getattr(args, split)}
        for path in [p for paths in files.values() for p in paths]:
            if not path.is_file():
                raise PrepareError(f"{path}: no such file")
        given = {} if args.vocab is None else {"vocab": args.vocab}
        if given:
            pieces.load(args.vocab)  # its errors show before the text is read
        hashes = {
            str(path): run.sources.hashes({"": Held(path)})[path.name]
            for path in [p for paths in files.values() for p in paths] + list(given.values())
        }
        options: Result = {
            "files": {split: [hashes[str(p)] for p in paths] for split, paths in files.items()},
            "cased": args.cased,
            "documents": args.documents,
            "spm": [args.spm_size, args.spm_type] if args.spm_size else [],
            "vocab": hashes[str(args.vocab)] if given else "",
        }
        wanted: list[RequiredFile] = [] if given or args.spm_size else [pieces.BERT_VOCAB]
        run.publish(options, wanted, lambda folder: _build(run, files, hashes, folder), _report)

    return run_main("bert", parser, body, argv)
