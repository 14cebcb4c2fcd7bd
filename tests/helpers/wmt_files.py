"""Small archives with the names, members and flaws of the WMT19 files.

`ARCHIVES` maps address paths to bytes; `COUNTS` is what must come out of each corpus.
"""

from __future__ import annotations

import gzip
import random
from xml.sax.saxutils import escape

from helpers.data_server import make_tgz, make_zip

_RNG = random.Random(19)
_SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "ei", "o", "ü", "en", "isch")]


def sentence(words: int) -> str:
    made = ["".join(_RNG.choices(_SYLLABLES, k=_RNG.randint(1, 3))) for _ in range(words)]
    return " ".join(made).capitalize() + "."


def pairs(count: int) -> list[tuple[str, str]]:
    """(German, English) sentences of equal length in words."""
    lengths = [_RNG.randint(4, 9) for _ in range(count)]
    return [(sentence(n), sentence(n)) for n in lengths]


def tsv(rows: list[tuple[str, str]]) -> bytes:
    return "".join(f"{left}\t{right}\n" for left, right in rows).encode()


EUROPARL = pairs(60)
_EUROPARL_TEXT = (
    tsv(EUROPARL[:20])
    + b"\tThe German side is missing.\n"
    + b"Die englische Seite fehlt.\t \n"
    + b"\t\n\n"
    + b'Er sagte "ja\tHe said "yes\tthird column\n'
    + b"no tab in this line\n"
    + b"kaputt \xff\tbroken\n"
    + "Zeile\u2028eins\r\tline\u00a0one\x07\n".encode()
    + tsv(EUROPARL[20:])[:-1]  # no line feed at the end of the file
)
NEWS = pairs(30)
_NEWS_TEXT = tsv(NEWS[:10]) + b"\t\n" + tsv(NEWS[10:]) + b"\t\n"
# Every character often enough that SentencePiece takes it in.
_LETTERS = ('Zeile "Fisch & <Chips>" Müller Söhne sagte ja', 'He said "yes, Miller & <chips>" Ende')
TITLES = [*((a.rstrip("."), b.rstrip(".")) for a, b in pairs(20)), *[_LETTERS] * 5]
CRAWL = pairs(40)
LONG = (sentence(3), sentence(90)), (sentence(300), sentence(300))
RAPID = [*pairs(20), *LONG]
PARACRAWL = [*pairs(35), ("Fisch & <Chips>", "fish & <chips>")]


def _unit(german: str, english: str, lang: str = "xml:lang") -> str:
    sides = [("en", english), ("de-DE", german)]
    _RNG.shuffle(sides)
    variants = "".join(
        f'<tuv {lang}="{code}"><prop type="x">1</prop><seg>{escape(text)}</seg></tuv>\n'
        for code, text in sides
    )
    return f'<tu tuid="1">\n{variants}</tu>\n'


_HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4"><header srclang="en"/>\n<body>\n'
)


def tmx(rows: list[tuple[str, str]]) -> bytes:
    return f"{_HEAD}{''.join(_unit(*row) for row in rows)}</body></tmx>\n".encode()


_TMX = (
    _HEAD
    + "".join(_unit(*pair) for pair in PARACRAWL[:20])
    + '<tu><tuv xml:lang="en"><seg>only English</seg></tuv></tu>\n'
    + '<tu><tuv xml:lang="en"><seg>bad &#x1; one</seg></tuv><tuv xml:lang="de"><seg>x</seg></tuv>'
    + "</tu>\n"
    + '<tu><tuv xml:lang="en"><seg> </seg></tuv><tuv xml:lang="de"><seg>leer</seg></tuv></tu>\n'
    + "".join(_unit(*pair, lang="lang") for pair in PARACRAWL[20:])
    + "</body></tmx>\n"
).encode()


def lines(texts: list[str]) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


def parallel(stem: str, rows: list[tuple[str, str]]) -> dict[str, bytes]:
    return {
        f"{stem}.de": lines([german for german, _ in rows]),
        f"{stem}.en": lines([english for _, english in rows]),
    }


def sgm(year: int, rows: list[tuple[str, str]]) -> dict[str, bytes]:
    """Source and reference; segment numbers start again in every document."""
    out = {}
    for side, tag, column in (("src.en", "srcset", 1), ("ref.de", "refset", 0)):
        text = f'<{tag} setid="newstest{year}" srclang="any">\n'
        for document in range(0, len(rows), 5):
            text += f'<doc sysid="ref" docid="doc.{document}" genre="news" origlang="en">\n<p>\n'
            for number, row in enumerate(rows[document : document + 5], start=1):
                text += f'<seg id="{number}">{escape(row[column])}</seg>\n'
            text += "</p>\n</doc>\n"
        out[f"newstest{year}-ende-{side}.sgm"] = (text + f"</{tag}>\n").encode()
    return out


VALID = [*pairs(12), ("Müller & Söhne", "Miller  & Sons")]
TEST = [*pairs(11), (sentence(1), sentence(80))]  # no length filter for held-out text
_CRAWL_MEMBERS = {
    "commoncrawl.cs-en.cs": b"x\n",
    **parallel("commoncrawl.de-en", [*CRAWL, ("", "a"), ("", "")]),
    "commoncrawl.ru-en.en": b"y\n",
}
_RAPID_MEMBERS = parallel("rapid2019.de-en", RAPID)

ARCHIVES: dict[str, bytes] = {
    "/europarl/v9/training/europarl-v9.de-en.tsv.gz": gzip.compress(_EUROPARL_TEXT),
    "/web-language-models/paracrawl/release3/en-de.bicleaner07.tmx.gz": gzip.compress(_TMX),
    "/wmt13/training-parallel-commoncrawl.tgz": make_tgz(_CRAWL_MEMBERS),
    "/news-commentary/v14/training/news-commentary-v14.de-en.tsv.gz": gzip.compress(_NEWS_TEXT),
    "/wikititles/v1/wikititles-v1.de-en.tsv.gz": gzip.compress(tsv(TITLES)),
    "/tilde-model/rapid2019.de-en.zip": make_zip(_RAPID_MEMBERS),
    "/wmt19/translation-task/dev.tgz": make_tgz(
        {"dev/newstest2008-src.en.sgm": b"", **{f"dev/{k}": v for k, v in sgm(2018, VALID).items()}}
    ),
    "/wmt19/translation-task/test.tgz": make_tgz(
        {f"sgm/{name}": data for name, data in sgm(2019, TEST).items()}
    ),
}
PARACRAWL_TXT = tsv([(english, german) for german, english in PARACRAWL])
# What is taken instead when these are out of reach: other archives, other forms.
STAND_INS: dict[str, dict[str, bytes]] = {
    "/web-language-models/paracrawl/release3/en-de.bicleaner07.tmx.gz": {
        "/web-language-models/paracrawl/release3/en-de.bicleaner07.txt.gz": gzip.compress(
            PARACRAWL_TXT
        )
    },
    "/tilde-model/rapid2019.de-en.zip": {
        "/rapid2019.de-en.tmx.zip": make_zip({"RAPID_2019.de-en.tmx": tmx(RAPID)})
    },
    "/wmt19/translation-task/test.tgz": {
        "/wmt20/translation-task/dev.tgz": make_tgz(
            {f"dev/{name}": data for name, data in sgm(2019, TEST).items()}
        )
    },
}
UNPACKED: dict[str, bytes] = {
    "europarl-v9.de-en.tsv": _EUROPARL_TEXT,
    "en-de.bicleaner07.tmx": _TMX,
    "news-commentary-v14.de-en.tsv": _NEWS_TEXT,
    "wikititles-v1.de-en.tsv": tsv(TITLES),
    **parallel("commoncrawl.de-en", [*CRAWL, ("", "a"), ("", "")]),
    **_RAPID_MEMBERS,
    **sgm(2018, VALID),
    **sgm(2019, TEST),
}
COUNTS = [
    "europarl (europarl-v9.de-en.tsv.gz): 68 read, 62 pairs kept; dropped: 1 malformed (no second "
    "column, or broken markup), 1 not UTF-8, 2 document break (both sides empty), 2 one side empty",
    "paracrawl (en-de.bicleaner07.tmx.gz): 39 read, 36 pairs kept; dropped: 1 one side empty, "
    "2 malformed (no second column, or broken markup)",
    "commoncrawl (training-parallel-commoncrawl.tgz): 42 read, 40 pairs kept; dropped: 1 document "
    "break (both sides empty), 1 one side empty",
    "newscommentary (news-commentary-v14.de-en.tsv.gz): 32 read, 30 pairs kept; dropped: "
    "2 document break (both sides empty)",
    "wikititles (wikititles-v1.de-en.tsv.gz): 25 read, 25 pairs kept",
    "rapid (rapid2019.de-en.zip): 22 read, 22 pairs kept",
    "after cleaning: 215 pairs (documented: 38,690,334)",
    "after SentencePiece: 213 pairs in 2 shard(s); dropped: 1 length ratio above 3, 1 more than "
    "250 pieces",
    "valid (newstest2018 from dev.tgz): 13 pairs",
    "test (newstest2019 from test.tgz): 12 pairs",
    "300 dictionary entries in fairseq, joint",
]
