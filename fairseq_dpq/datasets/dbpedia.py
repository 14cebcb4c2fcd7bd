"""DBpedia: first paragraphs of Wikipedia articles, of fourteen classes.

Run as ``python -m fairseq_dpq.datasets.dbpedia`` or scripts/prepare.sh dbpedia.
"""

from __future__ import annotations

import sys

from fairseq_dpq.datasets import zhang2015
from fairseq_dpq.datasets.checksums import Digest
from fairseq_dpq.datasets.download import Remote
from fairseq_dpq.datasets.rows import Columns
from fairseq_dpq.datasets.zhang2015 import ZhangSet

DBPEDIA = ZhangSet(
    name="dbpedia",
    title="DBpedia",
    stem="dbpedia",
    fast_ai=Digest(68341743, "42db5221ddedddb673a4cabcc5f3a7d869714c878bcfe4ba94b29d14aa38e417"),
    drive="0Bz8a_Dbh9QhbQ2Vic1kxMmZZQ1k",
    original=Digest(
        68341698,
        "cad5773f85d7501bb2783833768bc624641cdddf7056000a06f12bcd0239a310",
        md5="dca7b1ae12b1091090db52aa7ec5ca64",
    ),
    columns=Columns("1", ("2", "3"), 3),
    classes=(
        "Company",
        "EducationalInstitution",
        "Artist",
        "Athlete",
        "OfficeHolder",
        "MeanOfTransportation",
        "Building",
        "NaturalPlace",
        "Village",
        "Animal",
        "Plant",
        "Album",
        "Film",
        "WrittenWork",
    ),
    documents={"train": 560000, "test": 70000},
    paper_types=612530,
    more=(
        Remote(
            "dbpedia_csv.torchDatasets.tar.gz",
            ("https://github.com/srhrshr/torchDatasets/raw/master/dbpedia_csv.tar.gz",),
        ),
    ),
    digests={"train.csv": Digest(174148970), "test.csv": Digest(21775285)},
)


def main(argv: list[str] | None = None) -> int:
    """Prepare DBpedia; returns the exit code."""
    return zhang2015.main(DBPEDIA, argv)


if __name__ == "__main__":
    sys.exit(main())
