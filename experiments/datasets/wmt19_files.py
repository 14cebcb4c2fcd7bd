"""The files of WMT19 English-German: addresses, checksums, members, formats.

Six training corpora, newstest2018 for validation and newstest2019 for testing.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.datasets.download import Remote
from experiments.datasets.sources import RequiredFile, remote, required


@dataclass(frozen=True)
class Variant:
    """One form of a corpus: `kind` selects the reader, `languages` is the order."""

    files: tuple[RequiredFile, ...]
    kind: str  # "tsv", "tmx" or "plain"
    languages: tuple[str, str] = ("de", "en")


@dataclass(frozen=True)
class Corpus:
    """A training corpus; its variants are tried in order."""

    name: str
    variants: tuple[Variant, ...]
    lines: int | None = None


_HUB = "https://huggingface.co/datasets/wmt/"
_TASK = "https://data.statmt.org/{}/translation-task/{}"
_PARACRAWL = "https://s3.amazonaws.com/web-language-models/paracrawl/release3/{}"


def _file(name: str, *urls: str) -> RequiredFile:
    return required("wmt19", name, urls)


def _archive(name: str, url: str) -> Remote:
    return remote("wmt19", name, url)


def _tsv(name: str, *urls: str) -> tuple[Variant, ...]:
    unpacked = _file(name[: -len(".gz")])  # only ever in --from
    return Variant((_file(name, *urls),), "tsv"), Variant((unpacked,), "tsv")


def _parallel(stem: str, *archives: Remote) -> Variant:
    names = [f"{stem}.{language}" for language in ("de", "en")]
    return Variant(
        tuple(required("wmt19", n, archives=[(a, n) for a in archives]) for n in names), "plain"
    )


_ALL = (
    Corpus(
        "europarl",
        _tsv(
            "europarl-v9.de-en.tsv.gz",
            "http://www.statmt.org/europarl/v9/training/{}",
            _HUB + "europarl/resolve/main/v9/training/{}",
        ),
    ),
    Corpus(
        "paracrawl",
        (
            Variant((_file("en-de.bicleaner07.tmx.gz", _PARACRAWL),), "tmx"),
            Variant((_file("en-de.bicleaner07.txt.gz", _PARACRAWL),), "tsv", ("en", "de")),
            Variant((_file("en-de.bicleaner07.tmx"),), "tmx"),
            Variant((_file("en-de.bicleaner07.txt"),), "tsv", ("en", "de")),
        ),
    ),
    Corpus(
        "commoncrawl",
        (
            _parallel(
                "commoncrawl.de-en",
                _archive("training-parallel-commoncrawl.tgz", "http://www.statmt.org/wmt13/{}"),
                _archive("training-parallel-commoncrawl.zip", _HUB + "wmt13/resolve/main-zip/{}"),
            ),
        ),
        lines=2399123,
    ),
    Corpus(
        "newscommentary",
        _tsv(
            "news-commentary-v14.de-en.tsv.gz",
            "http://data.statmt.org/news-commentary/v14/training/{}",
        ),
    ),
    Corpus(
        "wikititles",
        _tsv(
            "wikititles-v1.de-en.tsv.gz",
            "http://data.statmt.org/wikititles/v1/{}",
            _HUB + "wikititles/resolve/main/v1/{}",
        ),
    ),
    Corpus(
        "rapid",
        (
            _parallel(
                "rapid2019.de-en",
                _archive(
                    "rapid2019.de-en.zip", "https://s3-eu-west-1.amazonaws.com/tilde-model/{}"
                ),
            ),
            Variant(
                (
                    required(
                        "wmt19",
                        "rapid2019.de-en.tmx",
                        archives=[
                            (
                                _archive(
                                    "rapid2019.de-en.tmx.zip",
                                    "https://tilde-model.s3-eu-west-1.amazonaws.com/{}",
                                ),
                                "*.tmx",
                            )
                        ],
                    ),
                ),
                "tmx",
            ),
        ),
    ),
)
CORPORA = {corpus.name: corpus for corpus in _ALL}
PAIRS = 38690334  # all six, without empty and malformed pairs

_DEV19 = _archive("dev.tgz", _TASK.format("wmt19", "dev.tgz"))
_DEV19_ZIP = _archive("dev.zip", _HUB + "wmt19/resolve/main-zip/translation-task/dev.zip")
_TEST18 = _archive("wmt18-test.tgz", _TASK.format("wmt18", "test.tgz"))
_TEST19 = _archive("test.tgz", _TASK.format("wmt19", "test.tgz"))
_DEV20 = _archive("wmt20-dev.tgz", "http://data.statmt.org/wmt20/translation-task/dev.tgz")


def _newstest(year: int, *places: tuple[Remote, str]) -> tuple[RequiredFile, RequiredFile]:
    source, target = (
        required(
            "wmt19", name, archives=[(archive, f"{folder}/{name}") for archive, folder in places]
        )
        for name in (f"newstest{year}-ende-{side}.sgm" for side in ("src.en", "ref.de"))
    )
    return source, target


# fairseq's name -> (the set's, its files, its number of segments)
HELD_OUT: dict[str, tuple[str, tuple[RequiredFile, RequiredFile], int]] = {
    "valid": (
        "newstest2018",
        _newstest(2018, (_DEV19, "dev"), (_DEV19_ZIP, "dev"), (_TEST18, "test"), (_DEV20, "dev")),
        2998,
    ),
    "test": ("newstest2019", _newstest(2019, (_TEST19, "sgm"), (_DEV20, "dev")), 1997),
}
