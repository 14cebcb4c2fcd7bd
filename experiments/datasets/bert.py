"""Text of a BERT-like model: raw text to pieces to the data of fairseq's task masked_lm."""

from __future__ import annotations

import argparse
import gzip
from itertools import islice
from pathlib import Path
from typing import IO, Iterator

from experiments.datasets import PrepareError, pieces
from experiments.datasets.binarize import dictionary_size, preprocess_shards, write_dictionary
from experiments.datasets.cli import Result, Run
from experiments.datasets.folders import build_folder
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import CHUNK, LineWriter, clean

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


def _encode_file(run: Run, path: Path, vocab: Path, key: Result) -> tuple[Path, Result]:
    """A stage of its own for each file, so that an interrupted run continues with the next one."""
    digest = run.checks.hash(path)
    folder = run.work / "stages" / f"{digest[:16]}-{key['vocab'][:16]}"
    own = {"file": digest, "names": "text.txt"}

    def build(target: Path) -> Result:
        run.say(f"{path}: pieces")
        chunks = read_chunks(path, key["documents"])
        counts: Result = {"lines": 0, "pieces": 0, "unknown": 0, "shards": 0}
        with LineWriter(target / "text", ("txt",), SHARD_LINES) as writer:
            for lines in pieces.encode_chunks(vocab, key["lower"], chunks, run.workers):
                for line in lines:
                    if not line and not key["documents"]:
                        continue  # characters that have no piece
                    writer.write(line)
                    words = line.split()
                    counts["lines"] += 1
                    counts["pieces"] += len(words)
                    counts["unknown"] += words.count("<unk>")
        counts["shards"] = len(writer.shards)
        if not counts["pieces"]:
            raise PrepareError(f"{path}: no text in it")
        return counts

    return folder, build_folder(folder, {**key, **own}, build, force=run.args.force)


class MaskedText(pieces.PieceSet):
    """Your own text, and the vocabulary that it is encoded with: trained, given, or BERT's."""

    title = "your text"
    description = ("Raw text, plain or .gz, to the pieces of WordPiece or SentencePiece: the data "
                   "of masked_lm.")  # fmt: skip

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        for split in SPLITS:
            add(f"--{split}", type=Path, nargs="+", metavar="FILE", required=split != "test",
                default=[], help=f"text of the {split} split")  # fmt: skip
        super().add_flags(parser)
        add("--spm-size", type=int, default=0, metavar="N",
            help="train a SentencePiece model of N pieces on the train text instead")  # fmt: skip
        add("--spm-type", choices=("bpe", "unigram"), default="unigram",
            help="(default: %(default)s)")  # fmt: skip
        add("--documents", action="store_true",
            help="keep blank lines, which end documents (--sample-break-mode complete_doc)"
            )  # fmt: skip

    def texts(self, run: Run) -> dict[str, list[Path]]:
        """The files of each split."""
        return {split: getattr(run.args, split) for split in SPLITS if getattr(run.args, split)}

    def options(self, run: Run) -> Result:
        args = run.args
        if args.spm_size and args.vocab is not None:
            raise PrepareError(f"--spm-size {args.spm_size} and --vocab {args.vocab}: give one")
        for path in [path for paths in self.texts(run).values() for path in paths]:
            if not path.is_file():
                raise PrepareError(f"{path}: no such file")
        if args.vocab is not None:
            pieces.load(args.vocab)  # its errors show before the text is read
        return {
            "files": {s: [run.checks.hash(p) for p in ps] for s, ps in self.texts(run).items()},
            "cased": args.cased,
            "documents": args.documents,
            "spm": [args.spm_size, args.spm_type] if args.spm_size else [],
            "vocab": run.checks.hash(args.vocab) if args.vocab is not None else "",
        }

    def files(self, run: Run) -> list[RequiredFile]:
        trained_or_given = run.args.spm_size or run.args.vocab is not None
        return [] if trained_or_given else [required("bert", pieces.VOCAB)]

    def vocab(self, run: Run) -> Path:
        if run.args.vocab is not None:
            return Path(run.args.vocab)
        return run.sources.obtain(self.files(run))[pieces.VOCAB]

    def build(self, run: Run, folder: Path) -> Result:
        files, scratch = self.texts(run), folder / "scratch"
        if run.args.spm_size:
            vocab = folder / pieces.MODEL
            self._train(run, files["train"], vocab)
            write_dictionary(scratch / "dict.txt", pieces.load(vocab).words)
        else:
            vocab, _ = self.start(run, folder)
        key = {
            "vocab": run.checks.hash(vocab),
            "lower": not run.args.cased,
            "documents": run.args.documents,
        }
        stages: dict[str, list[Path]] = {}
        counts: Result = {}
        for split, paths in files.items():
            found = [_encode_file(run, path, vocab, key) for path in paths]
            names = ("lines", "pieces", "unknown")
            counts[split] = {name: sum(count[name] for _, count in found) for name in names}
            stages[split] = [
                stage / f"text{n or ''}.txt" for stage, c in found for n in range(c["shards"])
            ]
        base = ["--only-source", "--srcdict", str(scratch / "dict.txt"), "--padding-factor", "1"]
        held_out: list[str] = []
        for split in list(stages)[1:]:  # training reads several files as one set, others do not
            with open(scratch / split, "wb") as merged:
                for path in stages[split]:
                    merged.write(path.read_bytes())
            held_out += [f"--{split}pref", str(scratch / split)]
        preprocess_shards(folder, base, stages["train"], held_out, run.workers)
        return {"counts": counts, "dictionary": dictionary_size(folder / "dict.txt")}

    def _train(self, run: Run, files: list[Path], model: Path) -> None:
        args = run.args
        run.say(f"SentencePiece: {args.spm_size:,} pieces ({args.spm_type})")
        text = model.parent / "scratch" / "cleaned"
        with open(text, "w", encoding="utf-8", newline="\n") as stream:
            for path in files:
                for lines in read_chunks(path, documents=False):
                    stream.writelines(clean(line) + "\n" for line in lines)
        pieces.train_sentencepiece(
            [text], model, args.spm_size, args.spm_type, 0.9995, "--spm-size"
        )
        text.unlink()

    def report(self, result: Result) -> list[str]:
        lines = []
        for split, counts in result["counts"].items():
            text, share = f"{counts['pieces']:,} pieces", counts["unknown"] / counts["pieces"]
            lines.append(f"{split}: {counts['lines']:,} lines, {text}, {share:.2%} unknown")
        rows = result["dictionary"] + 1
        return [*lines, f"{rows:,} rows of the embedding, with fairseq's four specials and <mask>"]


SETS = {"bert": MaskedText()}
