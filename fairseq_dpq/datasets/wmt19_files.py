"""The files of WMT19 English-German: addresses, checksums, members, formats.

Six training corpora, newstest2018 for validation and newstest2019 for testing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fairseq_dpq.datasets.checksums import UNKNOWN, Digest
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.sources import Route, Wanted


@dataclass(frozen=True)
class Variant:
    """One form of a corpus: `kind` selects the reader, `languages` is the order."""

    files: tuple[Wanted, ...]
    kind: str  # "tsv", "tmx" or "plain"
    languages: tuple[str, str] = ("de", "en")


@dataclass(frozen=True)
class Corpus:
    """A training corpus; its variants are tried in order."""

    name: str
    variants: tuple[Variant, ...]
    lines: int | None = None


def _single(name: str, urls: tuple[str, ...], digest: Digest = UNKNOWN) -> Wanted:
    return Wanted(name, (Route(Remote(name, urls, digest)),), digest)


def _tsv(name: str, urls: tuple[str, ...], digest: Digest) -> tuple[Variant, ...]:
    unpacked = Wanted(name[: -len(".gz")], ())  # only ever in --from
    return (
        Variant((_single(name, urls, digest),), "tsv"),
        Variant((unpacked,), "tsv"),
    )


_HUB = "https://huggingface.co/datasets/wmt/"
_CRAWL_TGZ = Remote(
    "training-parallel-commoncrawl.tgz",
    ("http://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",),
    Digest(918311367, "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5"),
)
_CRAWL_ZIP = Remote(
    "training-parallel-commoncrawl.zip",
    (_HUB + "wmt13/resolve/main-zip/training-parallel-commoncrawl.zip",),
    Digest(918734483, "5ffe980072ea29adfd84568d099bea366d9f72772b988e670794ae851b4e5627"),
)
_RAPID_ZIP = Remote(
    "rapid2019.de-en.zip",
    ("https://s3-eu-west-1.amazonaws.com/tilde-model/rapid2019.de-en.zip",),
    Digest(111888392, "ed5a10e57092715020334b918f6e114e5b6c7206bee3e956f2a1e2937c59c2e7"),
)
_RAPID_TMX = Remote(
    "rapid2019.de-en.tmx.zip",
    ("https://tilde-model.s3-eu-west-1.amazonaws.com/rapid2019.de-en.tmx.zip",),
)
_PARACRAWL = "https://s3.amazonaws.com/web-language-models/paracrawl/release3/"


def _parallel(stem: str, remotes: tuple[Remote, ...]) -> Variant:
    files = [
        Wanted(f"{stem}.{language}", tuple(Route(r, f"{stem}.{language}") for r in remotes))
        for language in ("de", "en")
    ]
    return Variant(tuple(files), "plain")


CORPORA: dict[str, Corpus] = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            "europarl",
            _tsv(
                "europarl-v9.de-en.tsv.gz",
                (
                    "http://www.statmt.org/europarl/v9/training/europarl-v9.de-en.tsv.gz",
                    _HUB + "europarl/resolve/main/v9/training/europarl-v9.de-en.tsv.gz",
                ),
                Digest(
                    204454328, "c2aef75d81bf06b22e4a9237319c1d53ba9668a13cb155c6b1361182cd3abc84"
                ),
            ),
        ),
        Corpus(
            "paracrawl",
            (
                Variant(
                    (
                        _single(
                            "en-de.bicleaner07.tmx.gz",
                            (_PARACRAWL + "en-de.bicleaner07.tmx.gz",),
                            Digest(
                                9091373722,
                                "fbeef288e4f1d294534be3afbf43469cf59938553436108d717873c1c50d34c7",
                            ),
                        ),
                    ),
                    "tmx",
                ),
                Variant(
                    (
                        _single(
                            "en-de.bicleaner07.txt.gz", (_PARACRAWL + "en-de.bicleaner07.txt.gz",)
                        ),
                    ),
                    "tsv",
                    ("en", "de"),
                ),
                Variant((Wanted("en-de.bicleaner07.tmx", ()),), "tmx"),
                Variant((Wanted("en-de.bicleaner07.txt", ()),), "tsv", ("en", "de")),
            ),
        ),
        Corpus(
            "commoncrawl",
            (_parallel("commoncrawl.de-en", (_CRAWL_TGZ, _CRAWL_ZIP)),),
            lines=2399123,
        ),
        Corpus(
            "newscommentary",
            _tsv(
                "news-commentary-v14.de-en.tsv.gz",
                (
                    "http://data.statmt.org/news-commentary/v14/training/"
                    "news-commentary-v14.de-en.tsv.gz",
                ),
                Digest(
                    39390551, "8aaa98a77d38bd39dcbdbcb775f3b6c633700e4c10fd915cf3dc6b9bfd0f2dca"
                ),
            ),
        ),
        Corpus(
            "wikititles",
            _tsv(
                "wikititles-v1.de-en.tsv.gz",
                (
                    "http://data.statmt.org/wikititles/v1/wikititles-v1.de-en.tsv.gz",
                    _HUB + "wikititles/resolve/main/v1/wikititles-v1.de-en.tsv.gz",
                ),
                Digest(
                    17919359, "24b0222ee87b6b8b3142c92f1b6f3c49374503fb066c46f190f00bf717a67102"
                ),
            ),
        ),
        Corpus(
            "rapid",
            (
                _parallel("rapid2019.de-en", (_RAPID_ZIP,)),
                Variant((Wanted("rapid2019.de-en.tmx", (Route(_RAPID_TMX, "*.tmx"),)),), "tmx"),
            ),
        ),
    )
}
PAIRS = 38690334  # all six, without empty and malformed pairs

_TASK = "https://data.statmt.org/{}/translation-task/{}"
_DEV19 = Remote(
    "dev.tgz",
    (_TASK.format("wmt19", "dev.tgz"),),
    Digest(
        38654961,
        "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        md5="f2ec7af5947c19e0cacb3882eb208002",
    ),
)
_DEV19_ZIP = Remote(
    "dev.zip",
    (_HUB + "wmt19/resolve/main-zip/translation-task/dev.zip",),
    Digest(38714274, "d796e363740fdc4261aa6f5a3d2f8223e3adaee7d737b7724863325b8956dfd1"),
)
_TEST18 = Remote(
    "wmt18-test.tgz",
    (_TASK.format("wmt18", "test.tgz"),),
    Digest(md5="f996c245ecffea23d0006fa4c34e9064"),
)
_TEST19 = Remote(
    "test.tgz",
    (_TASK.format("wmt19", "test.tgz"),),
    Digest(md5="84de7162d158e28403103b01aeefc39a"),
)
_DEV20 = Remote("wmt20-dev.tgz", ("http://data.statmt.org/wmt20/translation-task/dev.tgz",))


def _newstest(year: int, places: tuple[tuple[Remote, str], ...]) -> tuple[Wanted, Wanted]:
    names = [f"newstest{year}-ende-{side}.sgm" for side in ("src.en", "ref.de")]
    source, target = (
        Wanted(name, tuple(Route(remote, f"{folder}/{name}") for remote, folder in places))
        for name in names
    )
    return source, target


# fairseq's name -> (the set's, its files, its number of segments)
HELD_OUT: dict[str, tuple[str, tuple[Wanted, Wanted], int]] = {
    "valid": (
        "newstest2018",
        _newstest(
            2018,
            ((_DEV19, "dev"), (_DEV19_ZIP, "dev"), (_TEST18, "test"), (_DEV20, "dev")),
        ),
        2998,
    ),
    "test": ("newstest2019", _newstest(2019, ((_TEST19, "sgm"), (_DEV20, "dev"))), 1997),
}
