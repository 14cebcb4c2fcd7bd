"""Pieces of words: WordPiece from a vocab.txt of BERT, or a SentencePiece model, trained here too.

Both give the pieces of a text, their places in it, and fairseq's dictionary.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Iterable, NamedTuple

import sentencepiece as spm

from experiments.datasets import PrepareError
from experiments.datasets.binarize import write_dictionary
from experiments.datasets.checksums import hash_file
from experiments.datasets.cli import DataSet, Result, Run
from experiments.datasets.text import clean, ordered_map, read_lines

VOCAB = "vocab.txt"
MODEL = "spm.model"
PREPARED = Path("data-bin") / "bert"  # where scripts/prepare.sh bert leaves one of the two
# BERT's specials. fairseq has its own: <pad>, <unk>, <s>, </s> and <mask>.
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LONGEST = 200  # characters; a longer token is unknown, as in BERT


class Piece(NamedTuple):
    """A piece of a text, text[start:end]."""

    piece: str
    start: int
    end: int


def read_vocabulary(path: Path) -> list[str]:
    """The lines of a vocab.txt, which must have BERT's five specials."""
    pieces = [line.rstrip("\r\n") for line in read_lines(path)]
    while pieces and not pieces[-1]:
        pieces.pop()
    missing = [name for name in SPECIALS if name not in pieces]
    if missing:
        raise PrepareError(f"{path}: no {' '.join(missing)} in it, so not a vocab.txt of BERT")
    return pieces


class WordPiece:
    """WordPiece as in BERT (Devlin et al., 2019); `lower` is right for BERT's uncased models."""

    def __init__(self, vocabulary: list[str], lower: bool = True) -> None:
        try:
            from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
        except ModuleNotFoundError as error:
            raise PrepareError(
                "WordPiece needs the library tokenizers; pip install 'fairseq-dpq[transformers]' "
                "brings it"
            ) from error
        # The order of the file, which fairseq's dictionary keeps after its own specials.
        self.words = [piece for piece in vocabulary if piece not in SPECIALS]
        ids = {piece: number for number, piece in enumerate(vocabulary)}
        model = models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST)
        # No special tokens: those in a text are text.
        self._tokenizer = Tokenizer(model)
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def locate(self, text: str) -> list[Piece]:
        """The pieces of a text with their places in it; an unknown token is one `<unk>`."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [
            Piece("<unk>" if piece == "[UNK]" else piece, *place)
            for piece, place in zip(found.tokens, found.offsets)
        ]

    def encode(self, text: str) -> list[str]:
        """The pieces of a text."""
        return [piece.piece for piece in self.locate(text)]


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
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[list[str]]:
        """The pieces of each text."""
        pieces: list[list[str]] = self._processor.encode(texts, out_type=str, num_threads=1)
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


def _train(paths: list[Path], size: int, kind: str, coverage: float) -> bytes:
    model = io.BytesIO()
    # Text and model are passed in memory: file names would be written into the model, so two
    # runs in different folders would differ.
    spm.SentencePieceTrainer.train(
        sentence_iterator=(line.rstrip("\n") for path in paths for line in read_lines(path)),
        model_writer=model,
        vocab_size=size,
        model_type=kind,
        character_coverage=coverage,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        shuffle_input_sentence=False,
        num_threads=16,  # changes the result of "unigram", so not the number of cores
        minloglevel=2,
    )
    return model.getvalue()


def train_sentencepiece(
    paths: list[Path],
    model: Path,
    size: int,
    kind: str,
    coverage: float,
    flag: str = "--vocab-size",
) -> None:
    """Train a model of exactly `size` pieces (the four specials among them) and write it; `flag`
    is the one that gave the size."""
    train = partial(_train, size=size, kind=kind, coverage=coverage)
    try:
        # Not in this process, so that the memory is freed before the next step.
        (data,) = ordered_map(train, [paths], workers=2)
    except (RuntimeError, OSError) as error:
        said = str(error).rsplit("] ", 1)[-1]  # without the source location
        raise PrepareError(f"{flag} {size}: SentencePiece says: {said}") from error
    processor = spm.SentencePieceProcessor(model_proto=data)
    if processor.get_piece_size() != size:
        raise PrepareError(
            f"{flag} {size}: the text gives only {processor.get_piece_size()} pieces"
        )
    model.write_bytes(data)


def encode_line(encoder: Any, text: str) -> list[str]:
    """The pieces of a line; the word <unk>, which WikiText has, is one unknown piece."""
    if "<unk>" not in text:
        pieces: list[str] = encoder.encode(text)
        return pieces
    out: list[str] = []
    for number, part in enumerate(text.split("<unk>")):
        out += ["<unk>"] * bool(number) + encoder.encode(part)
    return out


def encode_lines(encoder: Any, lines: Iterable[str]) -> list[str]:
    """Lines of text as lines of pieces."""
    return [" ".join(encode_line(encoder, clean(line))) for line in lines]


class PieceSet(DataSet):
    """A set that is encoded with a vocabulary, by default that of the pre-training data."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--vocab", type=Path, metavar="FILE",
                            help="vocab.txt of BERT, or a SentencePiece model (FILE.model)"
                            )  # fmt: skip
        parser.add_argument("--cased", action="store_true",
                            help="vocab.txt has capitals and accents: keep those of the text"
                            )  # fmt: skip

    def options(self, run: Run) -> Result:
        vocab = self.vocab(run, Path())
        load(vocab)  # its errors show before the text is read
        return {"vocab": hash_file(vocab), "cased": run.args.cased}

    def vocab(self, run: Run, scratch: Path) -> Path:
        """The file of --vocab."""
        model = PREPARED / MODEL
        return Path(run.args.vocab or (model if model.is_file() else PREPARED / VOCAB))

    def start(self, run: Run, folder: Path) -> Path:
        """Copy the vocabulary to the prepared folder, where later steps find it, and write its
        dictionary to scratch/dict.txt; the copy."""
        vocab = self.vocab(run, folder / "scratch")
        kept = folder / (MODEL if vocab.suffix == ".model" else VOCAB)
        shutil.copyfile(vocab, kept)
        write_dictionary(folder / "scratch" / "dict.txt", load(kept).words)
        return kept
