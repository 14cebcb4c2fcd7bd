"""python -m experiments.datasets NAME [flags...]: prepare a data set for fairseq."""

from __future__ import annotations

import importlib
import sys
from typing import Sequence

from experiments.datasets.cli import run_main

_FAMILIES = {
    "language_model": "ptb wikitext2",
    "translation": "multi30k wmt19",
    "iwslt15": "iwslt15",
    "classification": "ag_news csv_files dbpedia yahoo_answers yelp_full yelp_polarity",
    "glue": "glue_cola glue_mnli glue_mrpc glue_rte glue_sst2 glue_xnli",
    "squad": "squad1 squad2",
    "bert": "bert",
}
# The module of each data set, which has it in its table SETS.
MODULES = {name: family for family, names in _FAMILIES.items() for name in names.split()}


def prepare(name: str, argv: Sequence[str]) -> int:
    """Prepare a data set; the exit code."""
    module = importlib.import_module(f"experiments.datasets.{MODULES[name]}")
    return run_main(name, module.SETS[name], list(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 bad input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    names = ", ".join(sorted(MODULES))
    usage = f"usage: scripts/prepare.sh NAME [flags...]; NAME is one of: {names}"
    if not words or words[0] in ("-h", "--help"):
        print(usage, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in MODULES:
        message = f"prepare.sh: NAME {words[0]!r} is unknown; choose one of: {names}"
        print(message, file=sys.stderr)
        return 2
    return prepare(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main())
