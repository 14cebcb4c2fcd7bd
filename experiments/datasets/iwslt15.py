"""IWSLT'15 English-Vietnamese as Stanford released it: tokenised text, fixed word vocabularies."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from experiments.datasets.binarize import dictionary_size, preprocess, write_dictionary
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.detokenize import detokenize
from experiments.datasets.errors import PrepareError
from experiments.datasets.sources import RequiredFile, remote, required
from experiments.datasets.text import parallel_chunks

LANGUAGES = ("en", "vi")
SPLITS = {"train": "train", "valid": "tst2012", "test": "tst2013"}  # fairseq's name -> the set's
SPECIALS = ["<unk>", "<s>", "</s>"]  # the first three lines of each vocabulary
VOCABULARY = {"en": 17191, "vi": 7709}  # including those three
LINES = {"train": 133317, "valid": 1553, "test": 1268}

_PLAIN = (
    "https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi/{}",
    "https://raw.githubusercontent.com/chentingpc/dpq_embedding_compression/master/nmt/data/"
    "iwslt15/{}",
)
_TGZ = remote(
    "iwslt15",
    "iwslt15.en-vi.tar.gz",
    "https://bj.bcebos.com/paddlenlp/datasets/{}",
    "https://paddlenlp.bj.bcebos.com/datasets/{}",
)
# These have no vocabularies, and the member names of the first are not verified.
_SPLIT_TGZ = {
    stem: remote("iwslt15", name, "https://github.com/stefan-it/nmt-en-vi/raw/master/data/{}")
    for stem, name in (
        ("train", "train-en-vi.tgz"),
        ("tst2012", "dev-2012-en-vi.tgz"),
        ("tst2013", "test-2013-en-vi.tgz"),
    )
}


def wanted() -> list[RequiredFile]:
    """The eight files of the release."""
    files = []
    for stem in ("train", "tst2012", "tst2013", "vocab"):
        for name in (f"{stem}.{language}" for language in LANGUAGES):
            archives = [(_TGZ, f"iwslt15.en-vi/{name}")]
            archives += [(_SPLIT_TGZ[stem], name)] if stem in _SPLIT_TGZ else []
            files.append(required("iwslt15", name, _PLAIN, archives))
    return files


def read_vocabulary(path: Path) -> list[str]:
    """The words of a released vocabulary without its three specials."""
    try:
        words = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise PrepareError(f"{path}: not UTF-8 text ({error})") from error
    if words and words[-1] == "":
        words.pop()
    if words[:3] != SPECIALS:
        raise PrepareError(f"{path}: begins with {words[:3]}, expected {SPECIALS}")
    return words[3:]


def _copy_split(
    pair: tuple[Path, Path], prefix: Path, vocabularies: list[set[str]], drop: bool
) -> dict[str, int]:
    """Write the lines of a split unchanged; count tokens and unknown ones.

    Only training pairs with an empty side are dropped: valid and test keep every line.
    """
    counts: Counter[str] = Counter()
    outputs = [Path(f"{prefix}.{language}") for language in LANGUAGES]
    with open(outputs[0], "w", encoding="utf-8", newline="\n") as first, open(
        outputs[1], "w", encoding="utf-8", newline="\n"
    ) as second:
        for left, right in parallel_chunks(pair):
            for lines in zip(left, right):
                try:
                    sides = [line.decode("utf-8").split() for line in lines]
                except UnicodeDecodeError as error:
                    raise PrepareError(f"{pair[0]} or {pair[1]}: not UTF-8: {error}") from error
                if drop and not all(sides):
                    counts["empty side"] += 1
                    continue
                counts["pairs"] += 1
                for language, words, known in zip(LANGUAGES, sides, vocabularies):
                    counts[f"{language} tokens"] += len(words)
                    counts[f"{language} unknown"] += sum(word not in known for word in words)
                first.write(" ".join(sides[0]) + "\n")
                second.write(" ".join(sides[1]) + "\n")
    return dict(counts)


def _build(run: Run, folder: Path) -> Result:
    files = wanted()
    paths = run.sources.obtain(files)
    text = folder / "text"
    text.mkdir()
    (folder / "raw").mkdir()
    vocabularies: list[set[str]] = []
    counts: Result = {}
    try:
        for language in LANGUAGES:
            words = read_vocabulary(paths[f"vocab.{language}"])
            run.expect(f"vocab.{language} entries", len(words) + 3, VOCABULARY[language])
            write_dictionary(text / f"dict.{language}.txt", words)
            vocabularies.append({*words, *SPECIALS})
        arguments = ["--source-lang", "en", "--target-lang", "vi"]
        arguments += ["--srcdict", str(text / "dict.en.txt")]
        arguments += ["--tgtdict", str(text / "dict.vi.txt")]
        for name, split in SPLITS.items():
            pair = (paths[f"{split}.en"], paths[f"{split}.vi"])
            counts[name] = _copy_split(pair, text / name, vocabularies, drop=name == "train")
            total = counts[name]["pairs"] + counts[name].get("empty side", 0)
            run.expect(f"{split} pairs", total, LINES[name])
            arguments += [f"--{name}pref", str(text / name)]
            if name != "train":
                _keep_references(text / name, folder / "raw" / name)
        run.say("fairseq-preprocess")
        preprocess(folder, arguments, run.workers)
    finally:
        shutil.rmtree(text)
    sizes = {lang: dictionary_size(folder / f"dict.{lang}.txt") for lang in LANGUAGES}
    return {"counts": counts, "dictionaries": sizes}


def _keep_references(source: Path, target: Path) -> None:
    """raw/NAME.LANG as released (tokenised), raw/NAME.detok.LANG for sacreBLEU."""
    for language in LANGUAGES:
        shutil.copyfile(f"{source}.{language}", f"{target}.{language}")
        lines = Path(f"{source}.{language}").read_text(encoding="utf-8").split("\n")[:-1]
        joined = "".join(detokenize(line) + "\n" for line in lines)
        Path(f"{target}.detok.{language}").write_bytes(joined.encode("utf-8"))


def _report(result: Result) -> list[str]:
    lines = []
    for name, counts in result["counts"].items():
        parts = [f"{counts['pairs']:,} pairs"]
        if counts.get("empty side"):
            parts.append(f"{counts['empty side']:,} dropped: empty side")
        for language in LANGUAGES:
            tokens, unknown = counts[f"{language} tokens"], counts[f"{language} unknown"]
            rate = 100 * unknown / tokens if tokens else 0.0
            parts.append(f"{language} {tokens:,} tokens, {rate:.2f} % unknown")
        lines.append(f"{name} ({SPLITS[name]}): " + "; ".join(parts))
    sizes = ", ".join(f"{lang} {size:,}" for lang, size in result["dictionaries"].items())
    return [*lines, f"dictionary entries in fairseq: {sizes}"]


def main(argv: list[str] | None = None) -> int:
    """Prepare IWSLT'15 En-Vi in both directions; returns the exit code."""
    parser = make_parser("iwslt15", "IWSLT'15 English-Vietnamese: download, check, "
                         "fairseq-preprocess with the released vocabularies. One folder serves "
                         "both directions (fairseq-train -s en -t vi or -s vi -t en).")  # fmt: skip

    def body(run: Run) -> None:
        run.publish({}, wanted(), lambda folder: _build(run, folder), _report)

    return run_main("iwslt15", parser, body, argv)
