"""Translation sets of a few files: Multi30k English-German and IWSLT'15 English-Vietnamese."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from pathlib import Path

from experiments.datasets import PrepareError, pairs
from experiments.datasets.binarize import dictionary_size, preprocess, write_dictionary
from experiments.datasets.cli import DataSet, Result, Run
from experiments.datasets.detokenize import detokenize
from experiments.datasets.pieces import SentencePieces, train_sentencepiece
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import LineWriter, clean

MULTI30K_LINES = {"train": 29000, "val": 1014, "test_2016_flickr": 1000}
LANGUAGES = ("en", "vi")  # of IWSLT'15
SPLITS = {"train": "train", "valid": "tst2012", "test": "tst2013"}  # fairseq's name -> the set's
LINES = {"train": 133317, "valid": 1553, "test": 1268}
SPECIALS = ["<unk>", "<s>", "</s>"]  # the first three lines of each vocabulary
VOCABULARY = {"en": 17191, "vi": 7709}  # including those three


class Multi30k(DataSet):
    """Captions of task 1: raw text, joint SentencePiece, raw references."""

    title = "Multi30k English-German"
    description = ("{}: download, SentencePiece, fairseq-preprocess; raw references are kept in "
                   "OUT/raw.")  # fmt: skip

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--vocab-size", type=int, default=8000, metavar="N",
            help="joint pieces, specials among them (default: %(default)s)")  # fmt: skip
        add("--spm-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
        add("--test-sets", default="test_2016_flickr", metavar="A,B",
            help="become fairseq's test, test1, ...; e.g. test_2017_flickr, test_2017_mscoco, "
            "test_2018_flickr (default: %(default)s)")  # fmt: skip

    def options(self, run: Run) -> Result:
        tests = [part.strip() for part in run.args.test_sets.split(",") if part.strip()]
        if not tests:
            raise PrepareError("--test-sets: name at least one, such as test_2016_flickr")
        sizes = {"vocab_size": run.args.vocab_size, "spm_type": run.args.spm_type}
        return {"test_sets": tests, **sizes}

    def splits(self, run: Run) -> dict[str, str]:
        """fairseq's name -> the set's."""
        tests = enumerate(self.options(run)["test_sets"])
        return {"train": "train", "valid": "val", **{f"test{n or ''}": name for n, name in tests}}

    def files(self, run: Run) -> list[RequiredFile]:
        names = [
            f"{split}.{lang}" for split in self.splits(run).values() for lang in pairs.LANGUAGES
        ]
        return [required("multi30k", name) for name in names]

    def build(self, run: Run, folder: Path) -> Result:
        try:
            return self._build(run, folder)
        except UnicodeDecodeError as error:
            raise PrepareError(f"a Multi30k file is not UTF-8 text: {error}") from error

    def _build(self, run: Run, folder: Path) -> Result:
        args, scratch = run.args, folder / "scratch"
        paths = run.sources.obtain(self.files(run))
        splits = self.splits(run)
        files = {name: [paths[f"{split}.{lang}"] for lang in pairs.LANGUAGES]
                 for name, split in splits.items()}  # fmt: skip
        files["train"], kept = self._clean_train(files["train"], scratch / "clean")
        run.expect("train pairs", kept["kept"], MULTI30K_LINES["train"])
        counts: Result = {"train": dict(kept)}
        run.say(f"SentencePiece: {args.vocab_size:,} joint pieces ({args.spm_type})")
        model = folder / "spm.model"
        train_sentencepiece(files["train"], model, args.vocab_size, args.spm_type, coverage=1.0)
        (folder / "raw").mkdir()
        for name, split in splits.items():
            writer = LineWriter(scratch / name, pairs.LANGUAGES)
            chunks = pairs.parallel_chunks(files[name])
            found, used = pairs.encode(model, chunks, writer, run.workers)
            lines = found["kept"]
            if name == "train":
                write_dictionary(scratch / "dict.txt", SentencePieces(model).words, used)
                continue
            run.expect(f"{split} pairs", lines, MULTI30K_LINES.get(split, lines))
            counts[name] = {"kept": lines, "set": split}
            for path in files[name]:
                shutil.copyfile(path, folder / "raw" / f"{name}{path.suffix}")
        run.say("fairseq-preprocess")
        arguments = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
        arguments += ["--srcdict", str(scratch / "dict.txt")]
        for flag in ("train", "valid", "test"):
            prefixes = [str(scratch / name) for name in splits if name.startswith(flag)]
            arguments += [f"--{flag}pref", ",".join(prefixes)]
        preprocess(folder, arguments, run.workers)
        return {"counts": counts, "dictionary": dictionary_size(folder / "dict.en.txt")}

    def _clean_train(self, pair: list[Path], prefix: Path) -> tuple[list[Path], Counter[str]]:
        """Write the text without pairs that have an empty side."""
        counts: Counter[str] = Counter()
        with LineWriter(prefix, pairs.LANGUAGES) as writer:
            for chunk in pairs.parallel_chunks(pair):
                for lines in zip(*chunk):
                    texts = [clean(line.decode("utf-8")) for line in lines]
                    counts["kept" if all(texts) else "empty side"] += 1
                    if all(texts):
                        writer.write(*texts)
        return [Path(f"{prefix}.{language}") for language in pairs.LANGUAGES], counts

    def report(self, result: Result) -> list[str]:
        lines = []
        for name, counts in result["counts"].items():
            origin = f" ({counts['set']})" if "set" in counts else ""
            empty = counts.get("empty side")
            dropped = f"; {empty:,} dropped: empty side" if empty else ""
            lines.append(f"{name}{origin}: {counts['kept']:,} pairs{dropped}")
        return [*lines, f"{result['dictionary']:,} dictionary entries in fairseq, joint"]


class Iwslt15(DataSet):
    """The text as Stanford released it: tokenised, with fixed word vocabularies."""

    title = "IWSLT'15 English-Vietnamese"
    description = ("{}: download, check, fairseq-preprocess with the released vocabularies. One "
                   "folder serves both directions (fairseq-train -s en -t vi or -s vi -t en)."
                   )  # fmt: skip

    def files(self, run: Run) -> list[RequiredFile]:
        stems = (*SPLITS.values(), "vocab")
        return [required("iwslt15", f"{s}.{lang}") for s in stems for lang in LANGUAGES]

    def build(self, run: Run, folder: Path) -> Result:
        paths = run.sources.obtain(self.files(run))
        text, raw = folder / "scratch", folder / "raw"
        raw.mkdir()
        vocabularies: list[set[str]] = []
        counts: Result = {}
        for language in LANGUAGES:
            words = self._read_vocabulary(paths[f"vocab.{language}"])
            entries = len(words) + len(SPECIALS)
            run.expect(f"vocab.{language} entries", entries, VOCABULARY[language])
            write_dictionary(text / f"dict.{language}.txt", words)
            vocabularies.append({*words, *SPECIALS})
        arguments = ["--source-lang", "en", "--target-lang", "vi"]
        arguments += ["--srcdict", str(text / "dict.en.txt")]
        arguments += ["--tgtdict", str(text / "dict.vi.txt")]
        for name, split in SPLITS.items():
            pair = [paths[f"{split}.{language}"] for language in LANGUAGES]
            counts[name] = self._copy_split(pair, text / name, vocabularies, drop=name == "train")
            total = counts[name]["pairs"] + counts[name].get("empty side", 0)
            run.expect(f"{split} pairs", total, LINES[name])
            arguments += [f"--{name}pref", str(text / name)]
            for language in LANGUAGES if name != "train" else ():
                # As released (tokenised), and detokenised for sacreBLEU.
                shutil.copyfile(text / f"{name}.{language}", raw / f"{name}.{language}")
                lines = (text / f"{name}.{language}").read_text(encoding="utf-8").split("\n")[:-1]
                joined = "".join(detokenize(line) + "\n" for line in lines)
                (raw / f"{name}.detok.{language}").write_bytes(joined.encode("utf-8"))
        run.say("fairseq-preprocess")
        preprocess(folder, arguments, run.workers)
        sizes = {lang: dictionary_size(folder / f"dict.{lang}.txt") for lang in LANGUAGES}
        return {"counts": counts, "dictionaries": sizes}

    def _read_vocabulary(self, path: Path) -> list[str]:
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
        self, pair: list[Path], prefix: Path, vocabularies: list[set[str]], drop: bool
    ) -> dict[str, int]:
        """Write the lines of a split unchanged; count tokens and unknown ones.

        Only training pairs with an empty side are dropped: valid and test keep every line.
        """
        counts: Counter[str] = Counter()
        with LineWriter(prefix, LANGUAGES) as writer:
            for chunk in pairs.parallel_chunks(pair):
                for lines in zip(*chunk):
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
                    writer.write(*map(" ".join, sides))
        return dict(counts)

    def report(self, result: Result) -> list[str]:
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


SETS = {"multi30k": Multi30k(), "iwslt15": Iwslt15()}
