"""WMT19 English-German: six corpora, cleaning, 32,000 joint SentencePiece pieces."""

from __future__ import annotations

import argparse
import html
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterator, List

from experiments.datasets import PrepareError, pairs, readers
from experiments.datasets.binarize import dictionary_size, preprocess_shards, write_dictionary
from experiments.datasets.cli import DataSet, Result, Run
from experiments.datasets.folders import build_folder
from experiments.datasets.pairs import LANGUAGES, Lines, parallel_chunks
from experiments.datasets.pieces import SentencePieces, train_sentencepiece
from experiments.datasets.sources import Choice, RequiredFile, required
from experiments.datasets.text import LineWriter, ordered_map

# The forms of each corpus, tried in order: one file, or two that are side by side.
CORPORA = {
    "europarl": ["europarl-v9.de-en.tsv.gz", "europarl-v9.de-en.tsv"],
    "paracrawl": [f"en-de.bicleaner07.{end}" for end in ("tmx.gz", "txt.gz", "tmx", "txt")],
    "commoncrawl": ["commoncrawl.de-en.de commoncrawl.de-en.en"],
    "newscommentary": ["news-commentary-v14.de-en.tsv.gz", "news-commentary-v14.de-en.tsv"],
    "wikititles": ["wikititles-v1.de-en.tsv.gz", "wikititles-v1.de-en.tsv"],
    "rapid": ["rapid2019.de-en.de rapid2019.de-en.en", "rapid2019.de-en.tmx"],
}
CRAWL_LINES = 2399123
PAIRS = 38690334  # all six, without empty and malformed pairs
# fairseq's name -> the set's, its number of segments
HELD_OUT = {"valid": ("newstest2018", 2998), "test": ("newstest2019", 1997)}
# Web text has thousands of characters that occur a few times in a million lines. SentencePiece's
# default maps those to <unk>.
COVERAGE = 0.9995
Form = List[RequiredFile]


def _forms(run: Run, corpus: str) -> list[Form]:
    """The forms to try, with the one of --paracrawl first."""
    forms = [[required("wmt19", name) for name in names.split()] for names in CORPORA[corpus]]
    ending = f".{run.args.paracrawl}" if corpus == "paracrawl" else ""
    return sorted(forms, key=lambda form: ending not in form[0].name)


def _local_form(run: Run, corpus: str) -> Form:
    """The form that is in --from."""
    forms = _forms(run, corpus)
    for form in forms:
        if all(run.sources.locate(item) is not None for item in form):
            return form
    items = [item for form in forms for item in form]
    names = [[*(route.name for route in item.routes), item.name] for item in items]
    found = " or ".join(dict.fromkeys(name for each in names for name in each))
    raise PrepareError(
        f"--from {run.args.from_dir}: no {corpus} ({found}); leave it out with --corpora"
    )


def held_out_files(name: str) -> Form:
    """Source and reference of newstest2018 or newstest2019."""
    title = HELD_OUT[name][0]
    return [required("wmt19", f"{title}-ende-{side}.sgm") for side in ("src.en", "ref.de")]


def _clean_corpus(run: Run, corpus: str) -> tuple[Path, Result, Result]:
    """Download, unpack and clean one corpus; returns its folder, the stage's key and counts."""
    if run.args.from_dir is not None:
        form = _local_form(run, corpus)
        archives = [path for path, _ in run.sources.local(form).values()]
        return _clean_form(run, corpus, form, archives, lambda: run.sources.obtain(form))
    choices = {(form[0], way): form for form in _forms(run, corpus) for way in form[0].routes}

    def use(choice: Choice, path: Path) -> tuple[Path, Result, Result]:
        form = choices[choice]
        unpack = lambda: run.sources.unpack(form, choice, path)  # noqa: E731
        found = _clean_form(run, corpus, form, [path], unpack)
        run.sources.used.update({item.name: path for item in form})
        return found

    return run.sources.first(list(choices), use)


def _clean_form(
    run: Run,
    corpus: str,
    form: Form,
    archives: list[Path],
    unpack: Callable[[], dict[str, Path]],
) -> tuple[Path, Result, Result]:
    kind = readers.kind_of([item.name for item in form])
    key: Result = {"corpus": corpus, "kind": kind, "inputs": run.checks.hashes(archives)}
    folder = run.work / "stages" / f"clean-{corpus}"

    def build(partial: Path) -> Result:
        run.say(f"{corpus}: reading and cleaning")
        paths = unpack()
        files = [paths[item.name] for item in form]
        counts: Counter[str] = Counter()
        with open(partial / "text.en", "wb") as english, open(partial / "text.de", "wb") as german:
            for chunk in ordered_map(readers.clean_chunk, readers.read_tasks(files), run.workers):
                english.write(chunk.english)
                german.write(chunk.german)
                counts.update(chunk.counts)
        if corpus == "commoncrawl":
            run.expect(f"{corpus} lines", counts["read"], CRAWL_LINES)
        if not counts["kept"]:
            raise PrepareError(f"{files[0]}: no sentence pair in it")
        return dict(counts)

    counts = build_folder(folder, key, build, force=run.args.force)
    if not run.args.keep:  # now, to save disk space
        shutil.rmtree(run.work / "extracted", ignore_errors=True)
    return folder, key, counts


def _held_out(run: Run, name: str) -> tuple[list[str], list[str]]:
    """Source and reference of newstest2018 or newstest2019."""
    title, segments = HELD_OUT[name]
    source, target = run.sources.obtain(held_out_files(name)).values()
    pair = readers.read_sgm_pair(source, target)
    run.expect(f"{title} segments", len(pair[0]), segments)
    return pair


def _text_chunks(folders: list[Path]) -> Iterator[Lines]:
    for folder in folders:
        yield from parallel_chunks((folder / "text.en", folder / "text.de"))


def _write_sample(folders: list[Path], total: int, size: int, seed: int, path: Path) -> int:
    """Exactly `size` pairs, each equally likely, in one pass and always the same for a seed."""
    rng = random.Random(seed)
    left, taken = total, 0
    with open(path, "wb") as out:
        for english, german in _text_chunks(folders):
            for pair in zip(english, german):
                if left * rng.random() < size - taken:
                    out.writelines(pair)
                    taken += 1
                left -= 1
    return taken


def _train_spm(
    run: Run, folders: list[Path], total: int, cleaned: list[Result]
) -> tuple[Path, Any]:
    args = run.args
    key = {
        "corpora": cleaned,
        "vocab_size": args.vocab_size,
        "spm_type": args.spm_type,
        "sample": args.spm_sample,
        "seed": args.seed,
    }

    def build(partial: Path) -> Result:
        sample = partial / "scratch" / "sample.txt"
        taken = _write_sample(folders, total, args.spm_sample, args.seed, sample)
        run.say(f"SentencePiece: {args.vocab_size:,} joint pieces from {taken:,} pairs")
        model = partial / "spm.model"
        train_sentencepiece([sample], model, args.vocab_size, args.spm_type, COVERAGE)
        return {"sample": taken}

    folder = run.work / "stages" / "spm"
    build_folder(folder, key, build, force=args.force)
    return folder / "spm.model", key


def _encode_train(
    run: Run, folders: list[Path], total: int, model: Path, spm_key: Any
) -> tuple[Path, Result]:
    """Encode and filter all pairs into shards train.{en,de}, train1.{en,de}, ..., and write the
    dictionary with the counts of their pieces."""
    args = run.args
    limits = pairs.Limits(args.max_len, args.max_ratio)
    key = {"spm": spm_key, "max_len": args.max_len, "max_ratio": args.max_ratio,
           "shard": args.shard_pairs, "dictionary": "counted"}  # fmt: skip

    def build(partial: Path) -> Result:
        run.say("encoding the training text")
        writer = LineWriter(partial / "train", LANGUAGES, args.shard_pairs)
        chunks = _text_chunks(folders)
        counts, used = pairs.encode(model, chunks, writer, run.workers, limits, total)
        if not counts["kept"]:
            raise PrepareError(
                f"--max-len {args.max_len} --max-ratio {args.max_ratio}: no pair is left"
            )
        write_dictionary(partial / "dict.txt", SentencePieces(model).words, used)
        return {"counts": dict(counts), "shards": len(writer.shards)}

    folder = run.work / "stages" / "encoded"
    return folder, build_folder(folder, key, build, force=args.force)


def _encode_held_out(model: Path, pair: tuple[list[str], list[str]], prefix: Path) -> None:
    """Encode a test set, every line of it. Entities become characters, as in the other text."""
    sides = tuple([html.unescape(line).encode("utf-8") for line in side] for side in pair)
    writer = LineWriter(prefix, LANGUAGES)
    counts, _ = pairs.encode(model, [(sides[0], sides[1])], writer, workers=1)
    if any(len(side) != counts["kept"] for side in pair):
        raise PrepareError(f"{prefix.name}: {counts['kept']} lines encoded of {len(pair[0])}")


def _dropped(counts: dict[str, int]) -> str:
    reasons = [f"{n:,} {why}" for why, n in counts.items() if why not in ("read", "kept")]
    return f"; dropped: {', '.join(sorted(reasons))}" if reasons else ""


class Wmt19(DataSet):
    """The task of 2019; newstest2018 is `valid`, newstest2019 is `test`."""

    title = "WMT19 English-German"
    description = ("{}: download, clean, SentencePiece, fairseq-preprocess; raw references are "
                   "kept in OUT/raw.")  # fmt: skip

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--corpora", default=",".join(CORPORA), metavar="A,B",
            help="training corpora (default: %(default)s)")  # fmt: skip
        add("--paracrawl", choices=("tmx", "txt"), default="tmx",
            help="form of ParaCrawl to try first; the tmx has a known checksum, the txt is smaller "
            "(default: %(default)s)")  # fmt: skip
        add("--vocab-size", type=int, default=32000, metavar="N",
            help="joint pieces, specials among them (default: %(default)s)")  # fmt: skip
        add("--spm-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
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

    def corpora(self, run: Run) -> list[str]:
        """Those of --corpora, in our order."""
        names = [part.strip() for part in run.args.corpora.split(",") if part.strip()]
        if not names or not set(names) <= set(CORPORA):
            raise PrepareError(f"--corpora {run.args.corpora}: choose from {','.join(CORPORA)}")
        return [name for name in CORPORA if name in names]

    def options(self, run: Run) -> Result:
        corpora = self.corpora(run)
        for flag, lowest in (("vocab_size", 16), ("spm_sample", 1), ("max_len", 1),
                             ("max_ratio", 1), ("shard_pairs", 1)):  # fmt: skip
            value = getattr(run.args, flag)
            if value < lowest:
                name = flag.replace("_", "-")
                raise PrepareError(f"--{name} {value}: must be at least {lowest}")
        flags = ("paracrawl", "vocab_size", "spm_type", "spm_sample", "seed", "max_len",
                 "max_ratio", "shard_pairs")  # fmt: skip
        return {**{flag: getattr(run.args, flag) for flag in flags}, "corpora": corpora}

    def files(self, run: Run) -> list[RequiredFile]:
        forms = [_local_form(run, corpus) for corpus in self.corpora(run)]
        return [item for form in [*forms, *map(held_out_files, HELD_OUT)] for item in form]

    def build(self, run: Run, folder: Path) -> Result:
        held_out = {name: _held_out(run, name) for name in HELD_OUT}  # small, so errors show early
        stages = {corpus: _clean_corpus(run, corpus) for corpus in self.corpora(run)}
        folders, keys, cleaned = (list(parts) for parts in zip(*stages.values()))
        total = sum(counts["kept"] for counts in cleaned)
        model, spm_key = _train_spm(run, folders, total, keys)
        encoded, result = _encode_train(run, folders, total, model, spm_key)
        scratch = folder / "scratch"
        (folder / "raw").mkdir()
        shutil.copyfile(model, folder / "spm.model")
        for name, pair in held_out.items():
            _encode_held_out(model, pair, scratch / name)
            for language, side in zip(LANGUAGES, pair):
                raw = "".join(line + "\n" for line in side)
                (folder / "raw" / f"{name}.{language}").write_bytes(raw.encode("utf-8"))
        base = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
        base += ["--srcdict", str(encoded / "dict.txt")]
        shards = [encoded / f"train{number or ''}" for number in range(result["shards"])]
        held = ["--validpref", str(scratch / "valid"), "--testpref", str(scratch / "test")]
        preprocess_shards(folder, base, shards, held, run.workers)
        files = {corpus: sorted(key["inputs"]) for corpus, key in zip(stages, keys)}
        for name in held_out:
            used = [run.sources.used[item.name].name for item in held_out_files(name)]
            files[name] = sorted(set(used))
        return {
            "corpora": dict(zip(stages, cleaned)),
            "clean": total,
            "encoded": result["counts"],
            "shards": result["shards"],
            "files": files,
            "held_out": {name: len(pair[0]) for name, pair in held_out.items()},
            "dictionary": dictionary_size(folder / "dict.en.txt"),
        }

    def report(self, result: Result) -> list[str]:
        files = {name: ", ".join(names) for name, names in result["files"].items()}
        lines = []
        for name, counts in result["corpora"].items():
            found = f"{counts['read']:,} read, {counts['kept']:,} pairs kept"
            lines.append(f"{name} ({files[name]}): {found}{_dropped(counts)}")
        known = f" (documented: {PAIRS:,})" if len(result["corpora"]) == len(CORPORA) else ""
        encoded = result["encoded"]
        lines.append(f"after cleaning: {result['clean']:,} pairs{known}")
        lines.append(
            f"after SentencePiece: {encoded['kept']:,} pairs in {result['shards']} shard(s)"
            + _dropped(encoded)
        )
        for name, number in result["held_out"].items():
            lines.append(f"{name} ({HELD_OUT[name][0]} from {files[name]}): {number:,} pairs")
        return [*lines, f"{result['dictionary']:,} dictionary entries in fairseq, joint"]


SETS = {"wmt19": Wmt19()}
