"""IWSLT'15 English-Vietnamese as Stanford released it: tokenised, with fixed word vocabularies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from experiments.datasets import PrepareError
from experiments.datasets.binarize import dictionary_size, preprocess, write_dictionary
from experiments.datasets.cli import DataSet, Run
from experiments.datasets.detokenize import detokenize
from experiments.datasets.parallel import parallel_lines
from experiments.datasets.sources import RequiredFile, required
from experiments.datasets.text import LineWriter, read_lines

LANGUAGES = ("en", "vi")
# fairseq's name -> the set's, its number of lines
SPLITS = {"train": ("train", 133317), "valid": ("tst2012", 1553), "test": ("tst2013", 1268)}
SPECIALS = ["<unk>", "<s>", "</s>"]  # the first three lines of each vocabulary
VOCABULARY = {"en": 17191, "vi": 7709}  # including those three


def read_vocabulary(path: Path) -> list[str]:
    """The words of a released vocabulary without its three specials."""
    words = [line.rstrip("\n") for line in read_lines(path)]
    if words[:3] != SPECIALS:
        raise PrepareError(f"{path}: begins with {words[:3]}, expected {SPECIALS}")
    return words[3:]


class Iwslt15(DataSet):
    """Words, in both directions; references also detokenised, for sacreBLEU."""

    title = "IWSLT'15 English-Vietnamese"
    description = ("{}: download, check, fairseq-preprocess with the released vocabularies. One "
                   "folder serves both directions (fairseq-train -s en -t vi or -s vi -t en)."
                   )  # fmt: skip

    def files(self, run: Run) -> list[RequiredFile]:
        stems = [*(stem for stem, _ in SPLITS.values()), "vocab"]
        return [required(run.name, f"{s}.{language}") for s in stems for language in LANGUAGES]

    def build(self, run: Run, folder: Path) -> list[str]:
        paths = run.sources.obtain(self.files(run))
        text, raw = folder / "scratch", folder / "raw"
        raw.mkdir()
        vocabularies = []
        arguments = ["--source-lang", "en", "--target-lang", "vi"]
        for language, flag in zip(LANGUAGES, ("--srcdict", "--tgtdict")):
            words = read_vocabulary(paths[f"vocab.{language}"])
            entries = len(words) + len(SPECIALS)
            run.expect(f"vocab.{language} entries", entries, VOCABULARY[language])
            write_dictionary(text / f"dict.{language}.txt", words)
            vocabularies.append({*words, *SPECIALS})
            arguments += [flag, str(text / f"dict.{language}.txt")]
        report = []
        for name, (stem, documented) in SPLITS.items():
            pair = [paths[f"{stem}.{language}"] for language in LANGUAGES]
            train = name == "train"
            prefix = (text if train else raw) / name
            counts = self._write_split(pair, prefix, vocabularies, train)
            run.expect(f"{stem} pairs", counts["pairs"] + counts["empty side"], documented)
            arguments += [f"--{name}pref", str(prefix)]
            parts = [f"{counts['pairs']:,} pairs"]
            if counts["empty side"]:
                parts.append(f"{counts['empty side']:,} dropped: empty side")
            for language in LANGUAGES:
                tokens, unknown = counts[f"{language} tokens"], counts[f"{language} unknown"]
                rate = 100 * unknown / max(tokens, 1)
                parts.append(f"{language} {tokens:,} tokens, {rate:.2f} % unknown")
            report.append(f"{name} ({stem}): " + "; ".join(parts))
        run.say("fairseq-preprocess")
        preprocess(folder, arguments, run.workers)
        sizes = [f"{lang} {dictionary_size(folder / f'dict.{lang}.txt'):,}" for lang in LANGUAGES]
        return [*report, f"dictionary entries in fairseq: {', '.join(sizes)}"]

    def _write_split(
        self, pair: list[Path], prefix: Path, vocabularies: list[set[str]], train: bool
    ) -> Counter[str]:
        """Write the lines of a split unchanged; count tokens and unknown ones. Validation and test
        text keeps every line, and is written both as released (tokenised) and detokenised."""
        counts: Counter[str] = Counter()
        running = [f"detok.{language}" for language in LANGUAGES] if not train else []
        with LineWriter(prefix, [*LANGUAGES, *running]) as writer:
            for lines in parallel_lines(pair, read_lines):
                sides = [line.split() for line in lines]
                if train and not all(sides):
                    counts["empty side"] += 1
                    continue
                counts["pairs"] += 1
                for language, words, known in zip(LANGUAGES, sides, vocabularies):
                    counts[f"{language} tokens"] += len(words)
                    counts[f"{language} unknown"] += sum(word not in known for word in words)
                joined = [" ".join(words) for words in sides]
                writer.write(*joined, *(map(detokenize, joined) if running else ()))
        return counts


SETS = {"iwslt15": Iwslt15()}
