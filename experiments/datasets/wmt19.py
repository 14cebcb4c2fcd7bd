"""WMT19 English-German: six corpora, cleaning, 32,000 joint SentencePiece pieces."""

from __future__ import annotations

import html
import random
import shutil
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Iterator

from experiments.datasets import readers, subwords
from experiments.datasets.binarize import dictionary_size, preprocess_shards
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.download import progress
from experiments.datasets.errors import PrepareError, Rejected
from experiments.datasets.folders import build_folder
from experiments.datasets.sources import Held, RequiredFile
from experiments.datasets.text import ordered_map, parallel_chunks
from experiments.datasets.wmt19_files import CORPORA, HELD_OUT, PAIRS, Corpus, Variant

LANGUAGES = ("en", "de")
# Web text has thousands of characters that occur a few times in a million lines. SentencePiece's
# default maps those to <unk>.
COVERAGE = 0.9995


def _variants(run: Run, corpus: Corpus) -> list[Variant]:
    """The forms to try, with the one of --paracrawl first."""
    preferred = run.args.paracrawl if corpus.name == "paracrawl" else ""
    ending = f".{preferred}" if preferred else ""
    return sorted(corpus.variants, key=lambda v: ending not in v.files[0].name)


def _choose_local(run: Run, corpus: Corpus) -> Variant:
    """The form that is in --from."""
    for variant in _variants(run, corpus):
        if all(run.sources.locate(item) is not None for item in variant.files):
            return variant
    names = " or ".join(
        dict.fromkeys(
            remote
            for variant in _variants(run, corpus)
            for item in variant.files
            for remote in [*(route.remote.name for route in item.routes), item.name]
        )
    )
    raise PrepareError(
        f"--from {run.args.from_dir}: no {corpus.name} ({names}); leave it out with --corpora"
    )


def _clean_corpus(run: Run, corpus: Corpus) -> tuple[Path, Result, Result]:
    """Download, unpack and clean one corpus; returns its folder, the stage's key and counts."""
    if run.args.from_dir is not None:
        variants = [_choose_local(run, corpus)]
    else:
        variants = [v for v in _variants(run, corpus) if all(item.routes for item in v.files)]
    while True:
        with suppress(Rejected):  # the next one is tried
            index, held = run.sources.fetch_first([variant.files for variant in variants])
            return _clean_variant(run, corpus, variants[index], held)


def _clean_variant(
    run: Run, corpus: Corpus, variant: Variant, held: dict[str, Held]
) -> tuple[Path, Result, Result]:
    key: Result = {
        "corpus": corpus.name,
        "kind": variant.kind,
        "inputs": run.sources.hashes(held),
    }
    folder = run.work / "stages" / f"clean-{corpus.name}"

    def build(partial: Path) -> Result:
        run.say(f"{corpus.name}: reading and cleaning")
        paths = run.sources.unpack(held, variant.files)
        try:
            return read(partial, [paths[item.name] for item in variant.files])
        except PrepareError as error:
            if not run.sources.checked(held, variant.files):
                run.sources.reject(held, variant.files, error)
            raise

    def read(partial: Path, files: list[Path]) -> Result:
        if variant.kind == "tsv":
            tasks = readers.tsv_tasks(files[0], variant.languages)
        elif variant.kind == "tmx":
            tasks = readers.tmx_tasks(files[0])
        else:
            tasks = readers.plain_tasks((files[0], files[1]), variant.languages)
        counts: Counter[str] = Counter()
        with open(partial / "text.en", "wb") as english, open(partial / "text.de", "wb") as german:
            for chunk in ordered_map(readers.clean_chunk, tasks, run.workers):
                english.write(chunk.english)
                german.write(chunk.german)
                counts += chunk.counts
        if corpus.lines is not None:
            run.expect(f"{corpus.name} lines", counts["read"], corpus.lines)
        if not counts["kept"]:
            raise PrepareError(f"{files[0]}: no sentence pair in it")
        return dict(counts)

    counts = build_folder(folder, key, build, force=run.args.force)
    if not run.args.keep:  # now, to save disk space
        shutil.rmtree(run.work / "extracted", ignore_errors=True)
    return folder, key, counts


def _held_out(run: Run, name: str) -> tuple[list[str], list[str]]:
    """Source and reference of newstest2018 or newstest2019."""
    title, files, segments = HELD_OUT[name]
    paths = run.sources.obtain(files)
    pair = readers.read_sgm_pair(paths[files[0].name], paths[files[1].name])
    run.expect(f"{title} segments", len(pair[0]), segments)
    return pair


def _archives(run: Run, name: str) -> list[str]:
    return sorted({run.sources.used[item.name].path.name for item in HELD_OUT[name][1]})


def _text_chunks(folders: list[Path]) -> Iterator[tuple[list[bytes], list[bytes]]]:
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
        sample = partial / "sample.txt"
        taken = _write_sample(folders, total, args.spm_sample, args.seed, sample)
        run.say(f"SentencePiece: {args.vocab_size:,} joint pieces from {taken:,} pairs")
        model = partial / "spm.model"
        subwords.train([sample], model, args.vocab_size, args.spm_type, COVERAGE)
        sample.unlink()
        return {"sample": taken}

    folder = run.work / "stages" / "spm"
    build_folder(folder, key, build, force=args.force)
    return folder / "spm.model", key


def _encode_train(
    run: Run, folders: list[Path], total: int, model: Path, spm_key: Any
) -> tuple[Path, Result]:
    """Encode and filter all pairs into shards train.{en,de}, train1.{en,de}, ..."""
    args = run.args
    limits = subwords.Limits(args.max_len, args.max_ratio)
    key = {"spm": spm_key, "max_len": args.max_len, "max_ratio": args.max_ratio,
           "shard": args.shard_pairs}  # fmt: skip

    def build(partial: Path) -> Result:
        run.say("encoding the training text")
        counts: Counter[str] = Counter()
        shards = 0
        room = 0
        with ExitStack() as stack, progress(total, "encode", unit=" pairs") as bar:
            outputs: list[IO[str]] = []
            chunks = _text_chunks(folders)
            for english, german, found in subwords.encode(model, chunks, limits, run.workers):
                bar.update(sum(found.values()))
                counts += found
                start = 0
                while start < len(english):
                    if not room:
                        stack.close()
                        outputs = [
                            stack.enter_context(
                                open(partial / f"train{shards or ''}.{language}", "w",
                                     encoding="utf-8", newline="\n")
                            )
                            for language in LANGUAGES
                        ]  # fmt: skip
                        shards, room = shards + 1, args.shard_pairs
                    stop = min(len(english), start + room)
                    outputs[0].writelines(english[start:stop])
                    outputs[1].writelines(german[start:stop])
                    room -= stop - start
                    start = stop
        if not counts["kept"]:
            raise PrepareError(
                f"--max-len {args.max_len} --max-ratio {args.max_ratio}: no pair is left"
            )
        return {"counts": dict(counts), "shards": shards}

    folder = run.work / "stages" / "encoded"
    return folder, build_folder(folder, key, build, force=args.force)


def _encode_held_out(
    run: Run, model: Path, pair: tuple[list[str], list[str]], prefix: Path
) -> None:
    """Encode a test set, every line of it. Entities become characters, as in the other text."""
    sides = tuple([html.unescape(line).encode("utf-8") for line in side] for side in pair)
    lines = 0
    for english, german, _ in subwords.encode(model, [(sides[0], sides[1])], None, workers=1):
        for language, text in zip(LANGUAGES, (english, german)):
            Path(f"{prefix}.{language}").write_bytes("".join(text).encode("utf-8"))
        lines += len(english)
    if lines != len(pair[0]):
        raise PrepareError(f"{prefix.name}: {lines} lines encoded of {len(pair[0])}")


def _build(run: Run, corpora: list[Corpus], folder: Path) -> Result:
    held_out = {name: _held_out(run, name) for name in HELD_OUT}  # small, so errors show early
    stages = [_clean_corpus(run, corpus) for corpus in corpora]
    folders = [stage[0] for stage in stages]
    total = sum(stage[2]["kept"] for stage in stages)
    model, spm_key = _train_spm(run, folders, total, [stage[1] for stage in stages])
    encoded, result = _encode_train(run, folders, total, model, spm_key)
    scratch = folder / "scratch"
    scratch.mkdir()
    (folder / "raw").mkdir()
    shutil.copyfile(model, folder / "spm.model")
    subwords.export_dictionary(model, scratch / "dict.txt")
    for name, pair in held_out.items():
        _encode_held_out(run, model, pair, scratch / name)
        for language, side in zip(LANGUAGES, pair):
            raw = "".join(line + "\n" for line in side)
            (folder / "raw" / f"{name}.{language}").write_bytes(raw.encode("utf-8"))
    base = ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary"]
    base += ["--srcdict", str(scratch / "dict.txt")]
    shards = [encoded / f"train{number or ''}" for number in range(result["shards"])]
    held = ["--validpref", str(scratch / "valid"), "--testpref", str(scratch / "test")]
    preprocess_shards(folder, base, shards, held, run.workers)
    shutil.rmtree(scratch)
    return {
        "corpora": {corpus.name: stage[2] for corpus, stage in zip(corpora, stages)},
        "clean": total,
        "encoded": result["counts"],
        "shards": result["shards"],
        "files": {
            **{corpus.name: sorted(stage[1]["inputs"]) for corpus, stage in zip(corpora, stages)},
            **{name: _archives(run, name) for name in held_out},
        },
        "held_out": {name: len(pair[0]) for name, pair in held_out.items()},
        "dictionary": dictionary_size(folder / "dict.en.txt"),
    }


def _dropped(counts: dict[str, int]) -> str:
    reasons = [f"{n:,} {why}" for why, n in counts.items() if why not in ("read", "kept")]
    return f"; dropped: {', '.join(sorted(reasons))}" if reasons else ""


def _report(result: Result) -> list[str]:
    # Folders of older versions do not name the files.
    files = {name: ", ".join(names) for name, names in result.get("files", {}).items()}
    lines = []
    for name, counts in result["corpora"].items():
        label = f"{name} ({files[name]})" if name in files else name
        found = f"{counts['read']:,} read, {counts['kept']:,} pairs kept"
        lines.append(f"{label}: {found}{_dropped(counts)}")
    known = f" (documented: {PAIRS:,})" if len(result["corpora"]) == len(CORPORA) else ""
    encoded = result["encoded"]
    lines.append(f"after cleaning: {result['clean']:,} pairs{known}")
    lines.append(
        f"after SentencePiece: {encoded['kept']:,} pairs in {result['shards']} shard(s)"
        + _dropped(encoded)
    )
    for name, number in result["held_out"].items():
        origin = f" from {files[name]}" if name in files else ""
        lines.append(f"{name} ({HELD_OUT[name][0]}{origin}): {number:,} pairs")
    return [*lines, f"{result['dictionary']:,} dictionary entries in fairseq, joint"]


def _chosen(text: str) -> list[Corpus]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in CORPORA]
    if unknown or not names:
        raise PrepareError(f"--corpora {text}: choose from {','.join(CORPORA)}")
    return [corpus for name, corpus in CORPORA.items() if name in names]


def _check(run: Run) -> None:
    for flag, lowest in (("vocab_size", 16), ("spm_sample", 1), ("max_len", 1), ("max_ratio", 1),
                         ("shard_pairs", 1)):  # fmt: skip
        value = getattr(run.args, flag)
        if value < lowest:
            name = flag.replace("_", "-")
            raise PrepareError(f"--{name} {value}: must be at least {lowest}")


def _inputs(run: Run, corpora: list[Corpus]) -> list[RequiredFile]:
    """All files that --from must hold; nothing to list when they come from the network."""
    if run.args.from_dir is None:
        return []
    files = [item for corpus in corpora for item in _choose_local(run, corpus).files]
    return files + [item for _, pair, _ in HELD_OUT.values() for item in pair]


def main(argv: list[str] | None = None) -> int:
    """Prepare WMT19 En-De; returns the exit code."""
    parser = make_parser("wmt19", "WMT19 English-German: download, clean, SentencePiece, "
                         "fairseq-preprocess; raw references are kept in OUT/raw.")  # fmt: skip
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
        help="drop training pairs with more pieces on a side (default: %(default)s)")  # fmt: skip
    add("--max-ratio", type=float, default=1.5, metavar="R",
        help="drop training pairs of a larger length ratio (default: %(default)s)")  # fmt: skip
    add("--shard-pairs", type=int, default=5000000, metavar="N",
        help="pairs per binarised training file (default: %(default)s)")  # fmt: skip

    def body(run: Run) -> None:
        corpora = _chosen(run.args.corpora)
        _check(run)
        flags = ("paracrawl", "vocab_size", "spm_type", "spm_sample", "seed", "max_len",
                 "max_ratio", "shard_pairs")  # fmt: skip
        options = {flag: getattr(run.args, flag) for flag in flags}
        options["corpora"] = [corpus.name for corpus in corpora]
        files = _inputs(run, corpora)
        run.publish(options, files, lambda folder: _build(run, corpora, folder), _report)

    return run_main("wmt19", parser, body, argv)
