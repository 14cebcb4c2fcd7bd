"""English-German translation, Multi30k and WMT19: corpora, cleaning, joint SentencePiece pieces."""

from __future__ import annotations

import argparse
import html
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Dict, Iterator, Tuple

from experiments.datasets import PrepareError
from experiments.datasets.binarize import dictionary_size, preprocess_shards, write_dictionary
from experiments.datasets.checksums import hash_files
from experiments.datasets.cli import DataSet, Result, Run, at_least, split_commas
from experiments.datasets.download import progress
from experiments.datasets.parallel import (
    LANGUAGES,
    clean_chunk,
    encode,
    parallel_lines,
    read_tasks,
    read_test_set,
)
from experiments.datasets.pieces import MODEL, SentencePieces, train_sentencepiece
from experiments.datasets.sources import Choice, RequiredFile, required
from experiments.datasets.text import LineWriter, ordered_map

# A cleaned corpus: the folder of text.en and text.de; what it was made of, with checksums; counts.
Stage = Tuple[Path, Dict[str, str], Result]


def text_lines(folders: list[Path]) -> Iterator[tuple[bytes, bytes]]:
    """The lines of cleaned corpora, English and German."""
    for folder in folders:
        yield from parallel_lines([folder / f"text.{language}" for language in LANGUAGES])


def write_sample(folders: list[Path], total: int, size: int, seed: int, path: Path) -> int:
    """Exactly `size` pairs, each equally likely, in one pass and always the same for a seed."""
    rng = random.Random(seed)
    left, taken = total, 0
    with open(path, "wb") as out:
        for pair in text_lines(folders):
            if left * rng.random() < size - taken:
                out.writelines(pair)
                taken += 1
            left -= 1
    return taken


def _dropped(counts: Result) -> str:
    reasons = [f"{n:,} {why}" for why, n in counts.items() if why not in ("read", "kept")]
    return f"; dropped: {', '.join(sorted(reasons))}" if reasons else ""


def _values(run: Run, *flags: str) -> Result:
    return {flag: getattr(run.args, flag) for flag in flags}


@dataclass(frozen=True)
class EnglishGerman(DataSet):
    """Corpora that are cleaned, encoded as joint pieces and filtered; test sets as they are."""

    description: ClassVar[str] = ("{}: download, clean, SentencePiece, fairseq-preprocess; raw "
                                  "references are kept in OUT/raw.")  # fmt: skip
    title: str
    # The forms of each corpus, tried in order: one file, or two that are side by side.
    corpora: dict[str, list[str]]
    test_files: tuple[str, str]  # source and reference; {} stands for the name of the test set
    held_out: tuple[str, str]  # names of the test sets that are `valid` and, by default, `test`
    lines: dict[str, int]  # documented, of corpora and test sets
    pairs: int  # documented, without empty and malformed ones
    pieces: int  # the default of --vocab-size
    coverage: float = 1.0  # of the characters by the pieces

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--vocab-size", type=int, default=self.pieces, metavar="N",
            help="joint pieces, specials among them (default: %(default)s)")  # fmt: skip
        add("--spm-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
        # What only some sets have flags for: all corpora, all of their text, no limits, one file.
        parser.set_defaults(corpora=",".join(self.corpora), paracrawl="", spm_sample=0, seed=1,
                            max_len=None, max_ratio=None, shard_pairs=0,
                            test_sets=self.held_out[1])  # fmt: skip

    def chosen(self, run: Run) -> list[str]:
        """The corpora of --corpora, in our order."""
        names = split_commas(run.args.corpora)
        if not names or not set(names) <= set(self.corpora):
            known = ",".join(self.corpora)
            raise PrepareError(f"--corpora {run.args.corpora}: choose from {known}")
        return [name for name in self.corpora if name in names]

    def forms(self, run: Run, corpus: str) -> list[list[RequiredFile]]:
        """The forms of a corpus to try, that of --paracrawl first; with --from the one in it."""
        ending = f".{run.args.paracrawl}" if corpus == "paracrawl" else ""
        names = sorted(self.corpora[corpus], key=lambda name: ending not in name)
        forms = [[required(run.name, name) for name in form.split()] for form in names]
        if run.args.from_dir is None:
            return forms
        found = [form for form in forms if all(run.sources.locate(item) for item in form)]
        return (found or forms)[:1]

    def test_sets(self, run: Run) -> dict[str, str]:
        """fairseq's name -> the set's, for the held-out text."""
        tests = enumerate(split_commas(run.args.test_sets))
        return {"valid": self.held_out[0], **{f"test{n or ''}": title for n, title in tests}}

    def test_set(self, run: Run, title: str) -> list[RequiredFile]:
        return [required(run.name, name.format(title)) for name in self.test_files]

    def files(self, run: Run) -> list[RequiredFile]:
        found = [self.forms(run, corpus)[0] for corpus in self.chosen(run)]
        found += [self.test_set(run, title) for title in self.test_sets(run).values()]
        return [item for form in found for item in form]

    def clean_corpus(self, run: Run, corpus: str) -> Stage:
        """Find or download a corpus, and clean it. If a download turns out to be damaged, the next
        form is tried."""
        forms = self.forms(run, corpus)
        if len(forms) == 1:
            return self.clean(run, corpus, run.sources.obtain(forms[0]))
        choices = {(form[0], route): form for form in forms for route in form[0].routes}

        def use(choice: Choice, path: Path) -> Stage:
            files = run.sources.unpack(choices[choice], choice, path)
            return self.clean(
                run, corpus, {item.name: files[item.name] for item in choices[choice]}
            )

        return run.sources.first(list(choices), use)

    def clean(self, run: Run, corpus: str, files: dict[str, Path]) -> Stage:
        """Clean the files of a corpus in a stage of its own."""
        inputs = hash_files(run.sources.used[name] for name in files)

        def build(partial: Path) -> Result:
            run.say(f"{corpus}: reading and cleaning")
            counts: Counter[str] = Counter()
            tasks = read_tasks(list(files.values()))
            with open(partial / "text.en", "wb") as english, open(
                partial / "text.de", "wb"
            ) as german, progress(None, corpus, unit=" pairs") as bar:
                for chunk in ordered_map(clean_chunk, tasks, run.workers):
                    english.write(chunk[0])
                    german.write(chunk[1])
                    counts.update(chunk[2])
                    bar.update(chunk[2]["read"])
            if not counts["kept"]:
                raise PrepareError(f"{next(iter(files.values()))}: no sentence pair in it")
            run.expect(f"{corpus} lines", counts["read"], self.lines.get(corpus, counts["read"]))
            return dict(counts)

        folder, counts = run.stage(f"clean-{corpus}", inputs, build)
        if not run.args.keep:  # now, to save disk space
            shutil.rmtree(run.work / "extracted", ignore_errors=True)
        return folder, inputs, counts

    def train_pieces(self, run: Run, folders: list[Path], total: int, key: Any) -> Path:
        """The SentencePiece model of the training text, or of a sample of it."""
        args = run.args

        def build(partial: Path) -> Result:
            texts = [folder / f"text.{language}" for folder in folders for language in LANGUAGES]
            taken = total
            if args.spm_sample:
                texts = [partial / "scratch" / "sample.txt"]
                taken = write_sample(folders, total, args.spm_sample, args.seed, texts[0])
            run.say(f"SentencePiece: {args.vocab_size:,} joint pieces from {taken:,} pairs")
            train_sentencepiece(
                texts, partial / MODEL, args.vocab_size, args.spm_type, self.coverage
            )
            return {"sample": taken}

        return run.stage("spm", key, build)[0] / MODEL

    def encode_train(
        self, run: Run, folders: list[Path], total: int, model: Path, key: Any
    ) -> tuple[Path, Result]:
        """Encode and filter all pairs into shards train.{en,de}, train1.{en,de}, ..., and write the
        dictionary with the counts of their pieces."""
        args = run.args
        limits = None if args.max_len is None else (args.max_len, args.max_ratio)

        def build(partial: Path) -> Result:
            run.say("encoding the training text")
            writer = LineWriter(partial / "train", LANGUAGES, args.shard_pairs)
            counts, used = encode(model, text_lines(folders), writer, run.workers, limits, total)
            if not counts["kept"]:
                raise PrepareError(
                    f"--max-len {args.max_len} --max-ratio {args.max_ratio}: no pair is left"
                )
            write_dictionary(partial / "dict.txt", SentencePieces(model).words, used)
            return {"counts": dict(counts), "shards": len(writer.shards)}

        return run.stage("encoded", key, build)

    def build(self, run: Run, folder: Path) -> list[str]:
        scratch = folder / "scratch"
        # Test sets are small, so errors show early.
        held_out = {}
        for name, title in self.test_sets(run).items():
            paths = list(run.sources.obtain(self.test_set(run, title)).values())
            held_out[name] = pairs = read_test_set(paths)
            run.expect(f"{title} pairs", len(pairs), self.lines.get(title, len(pairs)))
        stages = {corpus: self.clean_corpus(run, corpus) for corpus in self.chosen(run)}
        folders = [stage for stage, _, _ in stages.values()]
        total = sum(counts["kept"] for _, _, counts in stages.values())
        key = _values(run, "vocab_size", "spm_type", "spm_sample", "seed")
        key["corpora"] = [inputs for _, inputs, _ in stages.values()]
        model = self.train_pieces(run, folders, total, key)
        key = {"spm": key, **_values(run, "max_len", "max_ratio", "shard_pairs")}
        encoded, result = self.encode_train(run, folders, total, model, key)
        shutil.copyfile(model, folder / MODEL)
        (folder / "raw").mkdir()
        for name, pairs in held_out.items():
            with LineWriter(folder / "raw" / name, LANGUAGES) as raw:
                for pair in pairs:
                    raw.write(*pair)
            # Entities of SGM become characters, as in the other text.
            plain = html.unescape if self.test_files[0].endswith(".sgm") else str
            lines = [(plain(one).encode(), plain(other).encode()) for one, other in pairs]
            encode(model, lines, LineWriter(scratch / name, LANGUAGES), workers=1)
        base = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
        base += ["--srcdict", str(encoded / "dict.txt")]
        shards = [encoded / f"train{number or ''}" for number in range(result["shards"])]
        prefixes = [str(scratch / name) for name in held_out]
        held = ["--validpref", prefixes[0], "--testpref", ",".join(prefixes[1:])]
        preprocess_shards(folder, base, shards, held, run.workers)
        report = []
        for corpus, (_, inputs, counts) in stages.items():
            found = f"{counts['read']:,} read, {counts['kept']:,} pairs kept"
            report.append(f"{corpus} ({', '.join(inputs)}): {found}{_dropped(counts)}")
        known = f" (documented: {self.pairs:,})" if len(stages) == len(self.corpora) else ""
        report.append(f"after cleaning: {total:,} pairs{known}")
        kept = f"{result['counts']['kept']:,} pairs in {result['shards']} shard(s)"
        report.append(f"after SentencePiece: {kept}{_dropped(result['counts'])}")
        for name, title in self.test_sets(run).items():
            used = {run.sources.used[item.name].name for item in self.test_set(run, title)}
            origin = f"{title} from {', '.join(sorted(used))}"
            report.append(f"{name} ({origin}): {len(held_out[name]):,} pairs")
        entries = dictionary_size(folder / "dict.en.txt")
        return [*report, f"{entries:,} dictionary entries in fairseq, joint"]


class Multi30k(EnglishGerman):
    """Captions of task 1."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        parser.add_argument("--test-sets", default=self.held_out[1], metavar="A,B",
            help="become fairseq's test, test1, ...; e.g. test_2017_flickr, test_2017_mscoco, "
            "test_2018_flickr (default: %(default)s)")  # fmt: skip

    def options(self, run: Run) -> Result:
        tests = split_commas(run.args.test_sets)
        if not tests:
            raise PrepareError("--test-sets: name at least one, such as test_2016_flickr")
        return {"test_sets": tests, **_values(run, "vocab_size", "spm_type")}


class Wmt19(EnglishGerman):
    """The task of 2019; newstest2018 is `valid`, newstest2019 is `test`."""

    optional: ClassVar[str] = "--corpora"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        add = parser.add_argument
        add("--corpora", default=",".join(self.corpora), metavar="A,B",
            help="training corpora (default: %(default)s)")  # fmt: skip
        add("--paracrawl", choices=("tmx", "txt"), default="tmx",
            help="form of ParaCrawl to try first; the tmx has a known checksum, the txt is smaller "
            "(default: %(default)s)")  # fmt: skip
        add("--spm-sample", type=int, default=1000000, metavar="N",
            help="pairs on which SentencePiece is trained (default: %(default)s)")  # fmt: skip
        add("--seed", type=int, default=1, help="of that sample (default: %(default)s)")
        add("--max-len", type=int, default=250, metavar="N",
            help="drop training pairs with more pieces on a side (default: %(default)s)"
            )  # fmt: skip
        add("--max-ratio", type=float, default=1.5, metavar="R",
            help="drop training pairs of a larger length ratio (default: %(default)s)")  # fmt: skip
        add("--shard-pairs", type=int, default=5000000, metavar="N",
            help="pairs per binarised training file (default: %(default)s)")  # fmt: skip

    def options(self, run: Run) -> Result:
        at_least(run.args, vocab_size=16, spm_sample=1, max_len=1, max_ratio=1, shard_pairs=1)
        flags = ("paracrawl", "vocab_size", "spm_type", "spm_sample", "seed", "max_len",
                 "max_ratio", "shard_pairs")  # fmt: skip
        return {**_values(run, *flags), "corpora": self.chosen(run)}


SETS = {
    "multi30k": Multi30k(
        title="Multi30k English-German",
        corpora={"train": ["train.de train.en"]},
        test_files=("{}.en", "{}.de"),
        held_out=("val", "test_2016_flickr"),
        lines={"train": 29000, "val": 1014, "test_2016_flickr": 1000},
        pairs=29000,
        pieces=8000,
    ),
    "wmt19": Wmt19(
        title="WMT19 English-German",
        corpora={
            "europarl": ["europarl-v9.de-en.tsv.gz", "europarl-v9.de-en.tsv"],
            "paracrawl": [f"en-de.bicleaner07.{end}" for end in ("tmx.gz", "txt.gz", "tmx", "txt")],
            "commoncrawl": ["commoncrawl.de-en.de commoncrawl.de-en.en"],
            "newscommentary": ["news-commentary-v14.de-en.tsv.gz", "news-commentary-v14.de-en.tsv"],
            "wikititles": ["wikititles-v1.de-en.tsv.gz", "wikititles-v1.de-en.tsv"],
            "rapid": ["rapid2019.de-en.de rapid2019.de-en.en", "rapid2019.de-en.tmx"],
        },
        test_files=("{}-ende-src.en.sgm", "{}-ende-ref.de.sgm"),
        held_out=("newstest2018", "newstest2019"),
        lines={"commoncrawl": 2399123, "newstest2018": 2998, "newstest2019": 1997},
        pairs=38690334,
        pieces=32000,
        # Web text has thousands of characters that occur a few times in a million lines.
        # SentencePiece's default maps those to <unk>.
        coverage=0.9995,
    ),
}
