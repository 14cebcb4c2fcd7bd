"""Text of a BERT-like model: raw text to pieces to the data of fairseq's task masked_lm."""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.datasets import PrepareError, pieces
from experiments.datasets.binarize import dictionary_size, preprocess_shards
from experiments.datasets.checksums import hash_file
from experiments.datasets.cli import Result, Run
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import LineWriter, chunked, clean, ordered_map, read_lines

SPLITS = ("train", "valid", "test")
SHARD_LINES = 5_000_000  # fairseq keeps Python numbers for all lines of a file


def _encode_file(run: Run, path: Path, vocab: Path, key: Result) -> tuple[Path, Result]:
    """A stage of its own for each file, so that an interrupted run continues with the next one."""
    digest = hash_file(path)

    def build(target: Path) -> Result:
        run.say(f"{path}: pieces")
        # Blank lines end documents, and are left out without them.
        texts = (line for line in read_lines(path) if key["documents"] or line.strip())
        counts = {"lines": 0, "pieces": 0, "unknown": 0, "shards": 0}
        with LineWriter(target / "text", ("txt",), SHARD_LINES) as writer:
            for lines in ordered_map(
                pieces.encode_lines, chunked(texts), run.workers, pieces.load, vocab, key["lower"]
            ):
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

    own = {**key, "file": digest, "names": "text.txt"}
    return run.stage(f"{digest[:16]}-{key['vocab'][:16]}", own, build)


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
            "files": {s: [hash_file(p) for p in paths] for s, paths in self.texts(run).items()},
            "cased": args.cased,
            "documents": args.documents,
            "spm": [args.spm_size, args.spm_type] if args.spm_size else [],
            "vocab": hash_file(args.vocab) if args.vocab is not None else "",
        }

    def files(self, run: Run) -> list[RequiredFile]:
        trained_or_given = run.args.spm_size or run.args.vocab is not None
        return [] if trained_or_given else [required("bert", pieces.VOCAB)]

    def vocab(self, run: Run, scratch: Path) -> Path:
        args = run.args
        if not args.spm_size:
            return args.vocab or run.sources.obtain(self.files(run))[pieces.VOCAB]
        run.say(f"SentencePiece: {args.spm_size:,} pieces ({args.spm_type})")
        model, text = scratch / pieces.MODEL, scratch / "text.cleaned"
        with LineWriter(scratch / "text", ("cleaned",)) as writer:
            for path in args.train:
                for line in read_lines(path):
                    if line.strip():
                        writer.write(clean(line))
        pieces.train_sentencepiece(
            [text], model, args.spm_size, args.spm_type, 0.9995, "--spm-size"
        )
        text.unlink()
        return model

    def build(self, run: Run, folder: Path) -> list[str]:
        scratch, vocab = folder / "scratch", self.start(run, folder)
        key = {
            "vocab": hash_file(vocab),
            "lower": not run.args.cased,
            "documents": run.args.documents,
        }
        stages: dict[str, list[Path]] = {}
        report = []
        for split, paths in self.texts(run).items():
            found = [_encode_file(run, path, vocab, key) for path in paths]
            stages[split] = [
                stage / f"text{n or ''}.txt" for stage, c in found for n in range(c["shards"])
            ]
            lines, length, unknown = (
                sum(counts[name] for _, counts in found) for name in ("lines", "pieces", "unknown")
            )
            share = f"{unknown / length:.2%} unknown"
            report.append(f"{split}: {lines:,} lines, {length:,} pieces, {share}")
        base = ["--only-source", "--srcdict", str(scratch / "dict.txt"), "--padding-factor", "1"]
        held_out: list[str] = []
        for split in list(stages)[1:]:  # training reads several files as one set, others do not
            with open(scratch / split, "wb") as merged:
                for path in stages[split]:
                    merged.write(path.read_bytes())
            held_out += [f"--{split}pref", str(scratch / split)]
        preprocess_shards(folder, base, stages["train"], held_out, run.workers)
        rows = dictionary_size(folder / "dict.txt") + 1
        return [*report, f"{rows:,} rows of the embedding, with fairseq's four specials and <mask>"]


SETS = {"bert": MaskedText()}
