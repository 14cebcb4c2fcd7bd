"""Multi30k (task 1) English-German captions: raw text, joint SentencePiece, raw references."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from experiments.datasets import subwords
from experiments.datasets.binarize import dictionary_size, preprocess
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.errors import PrepareError
from experiments.datasets.sources import RequiredFile, remote, required
from experiments.datasets.text import clean, parallel_chunks

LANGUAGES = ("en", "de")
_RAW = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/{}"
_OLD = {
    split: remote("multi30k", name, "http://www.quest.dcs.shef.ac.uk/wmt16_files_mmt/{}")
    for split, name in (("train", "training.tar.gz"), ("val", "validation.tar.gz"))
}
LINES = {"train": 29000, "val": 1014, "test_2016_flickr": 1000}


def wanted(split: str) -> list[RequiredFile]:
    """The English and the German file of a split."""
    files = []
    for name in (f"{split}.{language}" for language in LANGUAGES):
        archives = [(remote("multi30k", f"{name}.gz", _RAW), name)]
        archives += [(_OLD[split], name)] if split in _OLD else []
        aliases = (f"data/task1/raw/{name}", f"raw/{name}")
        files.append(required("multi30k", name, (), archives, aliases))
    return files


def _clean_train(pair: tuple[Path, Path], folder: Path) -> tuple[list[Path], Counter[str]]:
    """Write train.en and train.de without pairs that have an empty side."""
    outputs = [folder / f"train.{language}" for language in LANGUAGES]
    counts: Counter[str] = Counter()
    with open(outputs[0], "wb") as first, open(outputs[1], "wb") as second:
        for left, right in parallel_chunks(pair):
            for source, target in zip(left, right):
                texts = clean(source.decode("utf-8")), clean(target.decode("utf-8"))
                if not all(texts):
                    counts["empty side"] += 1
                    continue
                counts["kept"] += 1
                first.write(texts[0].encode("utf-8") + b"\n")
                second.write(texts[1].encode("utf-8") + b"\n")
    return outputs, counts


def _build(run: Run, splits: dict[str, str], folder: Path) -> Result:
    """Fill the folder; `splits` maps fairseq's names (valid, test, test1) to the set's."""
    files = [item for split in ("train", *splits.values()) for item in wanted(split)]
    paths = run.sources.obtain(files)
    args = run.args
    # Encoded text is kept next to the binarised data and removed before the folder is complete.
    encoded = folder / "encoded"
    encoded.mkdir()
    (folder / "raw").mkdir()
    counts: Result = {}
    try:
        train = (paths["train.en"], paths["train.de"])
        cleaned, kept = _clean_train(train, encoded)
        run.expect("train pairs", kept["kept"], LINES["train"])
        counts["train"] = dict(kept)
        run.say(f"SentencePiece: {args.vocab_size:,} joint pieces ({args.spm_type})")
        model = folder / "spm.model"
        subwords.train(cleaned, model, args.vocab_size, args.spm_type, coverage=1.0)
        subwords.export_dictionary(model, encoded / "dict.txt")
        arguments = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
        arguments += ["--srcdict", str(encoded / "dict.txt")]
        for name, split in {"train": "train", **splits}.items():
            pair = (paths[f"{split}.en"], paths[f"{split}.de"])
            if name == "train":
                pair = (cleaned[0], cleaned[1])
            lines = _encode(run, model, pair, encoded / f"{name}.bpe")
            if name != "train":
                if split in LINES:
                    run.expect(f"{split} pairs", lines, LINES[split])
                counts[name] = {"kept": lines, "set": split}
                for language, path in zip(LANGUAGES, pair):
                    shutil.copyfile(path, folder / "raw" / f"{name}.{language}")
        run.say("fairseq-preprocess")
        tests = [str(encoded / f"{name}.bpe") for name in splits if name.startswith("test")]
        arguments += ["--trainpref", str(encoded / "train.bpe")]
        arguments += ["--validpref", str(encoded / "valid.bpe")]
        arguments += ["--testpref", ",".join(tests)]
        preprocess(folder, arguments, run.workers)
    except UnicodeDecodeError as error:
        raise PrepareError(f"a Multi30k file is not UTF-8 text: {error}") from error
    finally:
        shutil.rmtree(encoded)
    return {"counts": counts, "dictionary": dictionary_size(folder / "dict.en.txt")}


def _encode(run: Run, model: Path, pair: tuple[Path, Path], prefix: Path) -> int:
    """Encode every pair of a split; returns the number of lines."""
    lines = 0
    outputs = [Path(f"{prefix}.{language}") for language in LANGUAGES]
    with open(outputs[0], "w", encoding="utf-8", newline="\n") as first, open(
        outputs[1], "w", encoding="utf-8", newline="\n"
    ) as second:
        for left, right, counts in subwords.encode(model, parallel_chunks(pair), None, run.workers):
            first.writelines(left)
            second.writelines(right)
            lines += counts["kept"]
    return lines


def _report(result: Result) -> list[str]:
    lines = []
    for name, counts in result["counts"].items():
        dropped = ", ".join(
            f"{number:,} dropped: {reason}"
            for reason, number in counts.items()
            if reason not in ("kept", "set")
        )
        origin = f" ({counts['set']})" if "set" in counts else ""
        lines.append(f"{name}{origin}: {counts['kept']:,} pairs" + (f"; {dropped}" * bool(dropped)))
    return [*lines, f"{result['dictionary']:,} dictionary entries in fairseq, joint"]


def main(argv: list[str] | None = None) -> int:
    """Prepare Multi30k; returns the exit code."""
    parser = make_parser("multi30k", "Multi30k English-German: download, SentencePiece, "
                         "fairseq-preprocess; raw references are kept in OUT/raw.")  # fmt: skip
    add = parser.add_argument
    add("--vocab-size", type=int, default=8000, metavar="N",
        help="joint pieces, specials among them (default: %(default)s)")  # fmt: skip
    add("--spm-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
    add("--test-sets", default="test_2016_flickr", metavar="A,B",
        help="become fairseq's test, test1, ...; e.g. test_2017_flickr, test_2017_mscoco, "
        "test_2018_flickr (default: %(default)s)")  # fmt: skip

    def body(run: Run) -> None:
        tests = [part.strip() for part in run.args.test_sets.split(",") if part.strip()]
        if not tests:
            raise PrepareError("--test-sets: name at least one, such as test_2016_flickr")
        splits = {"valid": "val"}
        for number, split in enumerate(tests):
            splits[f"test{number or ''}"] = split
        files = [item for split in ("train", *splits.values()) for item in wanted(split)]
        options = {
            "test_sets": tests,
            "vocab_size": run.args.vocab_size,
            "spm_type": run.args.spm_type,
        }
        run.publish(options, files, lambda folder: _build(run, splits, folder), _report)

    return run_main("multi30k", parser, body, argv)
