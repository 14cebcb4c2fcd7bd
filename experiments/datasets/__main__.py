"""python -m experiments.datasets NAME [flags...]: prepare a data set for fairseq."""

from __future__ import annotations

import importlib
import sys
from typing import Sequence

# The module of each data set. Where one has several, they are in its table SETS.
MODULES = {
    **dict.fromkeys(("ptb", "wikitext2"), "language_model"),
    **dict.fromkeys(
        ("ag_news", "dbpedia", "yahoo_answers", "yelp_full", "yelp_polarity"), "zhang2015"
    ),
    **dict.fromkeys(
        ("glue_cola", "glue_mnli", "glue_mrpc", "glue_rte", "glue_sst2", "glue_xnli"), "glue"
    ),
    **dict.fromkeys(("squad1", "squad2"), "squad"),
    **{name: name for name in ("bert", "csv_files", "iwslt15", "multi30k", "wmt19")},
}


def prepare(name: str, argv: Sequence[str]) -> int:
    """Run the prepare script of a data set; its exit code."""
    module = importlib.import_module(f"experiments.datasets.{MODULES[name]}")
    code: int = (
        module.main(name, list(argv)) if hasattr(module, "SETS") else module.main(list(argv))
    )
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = ", ".join(sorted(MODULES))
    usage = f"usage: scripts/prepare.sh NAME [flags...]; NAME is one of: {names}"
    if words[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0
    if not words:
        print(usage, file=sys.stderr)
        return 2
    if words[0] not in MODULES:
        message = f"prepare.sh: NAME {words[0]!r} is unknown; choose one of: {names}"
        print(message, file=sys.stderr)
        return 2
    return prepare(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main())
