"""WikiText-2, word level (v1): 33,278 types.

Run as ``python -m fairseq_dpq.datasets.wikitext2`` or scripts/prepare_wikitext2.sh.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import language_model
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.language_model import TextSet
from fairseq_dpq.datasets.sources import Route, Wanted

_ZIP = Remote(
    "wikitext-2-v1.zip",
    (
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
    Digest(
        size=4475746,
        sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        sha1="3c914d17d80b1459be871a5039ac23e752a53cbe",
        md5="542ccefacc6c27f945fb54453812b3cd",
    ),
)
# Named "raw" there, but these are the same bytes as the archive's wiki.*.tokens.
_PLAIN = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/"
    "wikitext-2/{}.txt"
)


def _file(split: str, size: int | None, sha1: str) -> Wanted:
    name = f"wiki.{split}.tokens"
    digest = Digest(size=size, sha1=sha1)
    routes = (
        Route(_ZIP, f"wikitext-2/{name}"),
        Route(Remote(name, (_PLAIN.format(split),), digest)),
    )
    return Wanted(name, routes, digest)


WIKITEXT2 = TextSet(
    name="wikitext2",
    title="WikiText-2 (word level, v1)",
    files={
        "train": _file("train", None, "863f29c46ef9d167fff4940ec821195882fe29d1"),
        "valid": _file("valid", 1121681, "0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422"),
        "test": _file("test", 1256449, "c7b8ce0aa086fb34dab808c5c49224211eb2b172"),
    },
    lines={"train": 36718, "valid": 3760, "test": 4358},
    tokens={"train": 2088628, "valid": 217646, "test": 245569},
    types=33278,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare WikiText-2; returns the exit code."""
    return language_model.main(WIKITEXT2, argv)


if __name__ == "__main__":
    sys.exit(main())
