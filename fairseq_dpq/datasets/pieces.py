"""Pieces of a BERT-like model: WordPiece from a vocab.txt, or a SentencePiece model.

Both give the pieces of a text, their places in it, and fairseq's dictionary.
"""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import sentencepiece as spm

from fairseq_dpq.datasets.binarize import write_dictionary
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.cli import Result, Run, make_parser, run_main
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.errors import PrepareError
from fairseq_dpq.datasets.sources import Held, Route, Wanted
from fairseq_dpq.datasets.text import clean, ordered_map
from fairseq_dpq.datasets.wordpiece import Piece, WordPiece, read_vocabulary

VOCAB = "vocab.txt"
MODEL = "spm.model"
PREPARED = Path("data-bin") / "bert"  # where scripts/prepare.sh bert leaves one of the two
_DIGEST = Digest(231508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3")
_ARCHIVE = "uncased_L-12_H-768_A-12"
BERT_VOCAB = Wanted(
    VOCAB,
    (
        Route(
            Remote(
                VOCAB,
                ("https://huggingface.co/google-bert/bert-base-uncased/resolve/main/vocab.txt",),
                _DIGEST,
            )
        ),
        Route(
            Remote(
                f"{_ARCHIVE}.zip",
                (f"https://storage.googleapis.com/bert_models/2018_10_18/{_ARCHIVE}.zip",),
            ),
            f"{_ARCHIVE}/{VOCAB}",
        ),
    ),
    _DIGEST,
)


class SentencePieces:
    """A SentencePiece model whose first four ids are fairseq's specials."""

    def __init__(self, path: Path) -> None:
        try:
            self._processor = spm.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise PrepareError(f"{path}: not a SentencePiece model") from error
        size = self._processor.get_piece_size()
        pieces = [self._processor.id_to_piece(i) for i in range(size)]
        if pieces[:4] != ["<s>", "<pad>", "</s>", "<unk>"]:
            raise PrepareError(
                f"{path}: its first pieces are {' '.join(pieces[:4])}; train it with bos_id=0, "
                "pad_id=1, eos_id=2, unk_id=3, as scripts/prepare.sh bert --spm-size does"
            )
        self.words = pieces[4:]

    def encode(self, text: str) -> list[str]:
        """The pieces of a text."""
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return pieces

    def locate(self, text: str) -> list[Piece]:
        """The pieces of a text with their places in it; no piece crosses white space.

        Where the model normalises a word, each of its pieces is placed at the whole word.
        """
        found = []
        for match in re.finditer(r"\S+", text):
            pieces = self.encode(match[0])
            texts = [piece.replace("\u2581", "") for piece in pieces]
            exact = "".join(texts) == match[0]
            start = match.start()
            for piece, part in zip(pieces, texts):
                end = start + len(part) if exact else match.end()
                found.append(Piece(piece, start, end))
                start = end if exact else start
        return found


def load(path: Path, lower: bool = True) -> Any:
    """The encoder of a vocab.txt or of a SentencePiece model (by its name, *.model)."""
    if not path.is_file():
        raise PrepareError(f"--vocab {path}: no such file; run: scripts/prepare.sh bert")
    if path.suffix == ".model":
        return SentencePieces(path)
    return WordPiece(read_vocabulary(path), lower)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--vocab and --cased, which all sets of this family have."""
    parser.add_argument("--vocab", type=Path, metavar="FILE",
                        help="vocab.txt of BERT, or a SentencePiece model (FILE.model)"
                        )  # fmt: skip
    parser.add_argument("--cased", action="store_true",
                        help="vocab.txt has capitals and accents: keep those of the text"
                        )  # fmt: skip


def prepared_vocab(args: argparse.Namespace) -> Path:
    """The file of --vocab; by default the one of the pre-training data."""
    if args.vocab is not None:
        return Path(args.vocab)
    model = PREPARED / MODEL
    return model if model.is_file() else PREPARED / VOCAB


def keep(path: Path, folder: Path) -> Path:
    """Copy the vocabulary into the prepared folder, where later steps find it."""
    target = folder / (MODEL if path.suffix == ".model" else VOCAB)
    shutil.copyfile(path, target)
    return target


def write_dict(encoder: Any, path: Path) -> None:
    """fairseq's dictionary of the pieces; it adds <s>, <pad>, </s>, <unk> and the task <mask>."""
    write_dictionary(path, encoder.words)


_encoder: Any = None


def _start(path: str, lower: bool) -> None:
    global _encoder
    _encoder = load(Path(path), lower)


def encode_line(encoder: Any, text: str) -> list[str]:
    """The pieces of a line; the word <unk>, which WikiText has, is one unknown piece."""
    if "<unk>" not in text:
        pieces: list[str] = encoder.encode(text)
        return pieces
    out: list[str] = []
    for number, part in enumerate(text.split("<unk>")):
        out += ["<unk>"] * bool(number) + encoder.encode(part)
    return out


def _encode_chunk(lines: list[str]) -> list[str]:
    return [" ".join(encode_line(_encoder, clean(line))) for line in lines]


def encode_chunks(
    path: Path, lower: bool, chunks: Iterable[list[str]], workers: int
) -> Iterator[list[str]]:
    """Lines of pieces, chunk by chunk and in order, on all cores."""
    yield from ordered_map(_encode_chunk, chunks, workers, _start, (str(path), lower))


def run_set(
    name: str,
    description: str,
    files: Mapping[str, Wanted],
    build: Callable[[Run, Path, Path], Result],
    report: Callable[[Result], list[str]],
    argv: list[str] | None,
) -> int:
    """The prepare script of a set that is encoded with the vocabulary of a pre-trained model.

    `build` gets the run, the vocabulary and the folder to fill.
    """
    parser = make_parser(name, description)
    add_flags(parser)

    def body(run: Run) -> None:
        vocab = prepared_vocab(run.args)
        load(vocab)
        options: Result = {
            "vocab": run.sources.hashes({"": Held(vocab)})[vocab.name],
            "cased": run.args.cased,
        }
        wanted = list(files.values())
        run.publish(options, wanted, lambda folder: build(run, vocab, folder), report)

    return run_main(name, parser, body, argv)
