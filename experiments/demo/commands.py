"""The commands of the demo, as a user would type them: fairseq's own, with ``--user-dir`` and the
DPQ flags, and the compaction tool. Paths are relative to the output folder."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.demo.corpus import SOURCE, TARGET

# No data workers and no prefetching: with data this small they cost more than they save. Batches
# need not be multiples of 8, because the fork would drop the last batch and its test sentences.
DATA = "--cpu --num-workers 0 --data-buffer-size 0 --required-batch-size-multiple 1"
# No dropout: two epochs of a generated corpus do not overfit.
WIDTH = 64
MODEL = "--arch transformer --share-decoder-input-output-embed --dropout 0 " + " ".join(
    f"--{side}-layers 1 --{side}-embed-dim {WIDTH} --{side}-ffn-embed-dim {2 * WIDTH} "
    f"--{side}-attention-heads 4"
    for side in ("encoder", "decoder")
)
TRAINING = (
    "--criterion cross_entropy --optimizer adam --adam-betas (0.9,0.98) --lr 5e-3 "
    "--lr-scheduler polynomial_decay --warmup-updates 200 --max-tokens 500"
)
CHECKPOINTS = "--no-epoch-checkpoints --no-last-checkpoints"


@dataclass(frozen=True)
class Setting:
    """Sizes of one demo run; the defaults take less than four minutes on two cores."""

    seed: int = 1
    train: int = 60000
    valid: int = 500
    test: int = 500
    updates: int = 2800
    K: int = 8
    D: int = 32
    model_seed: int = 1
    tables: str = "source"  # or all: one table for source, target and output
    full_start: float = 0.5  # of the full table's initial scale, chosen on valid (docs/quality.md)


@dataclass(frozen=True)
class Model:
    """One row of the table: a title, a folder, and the DPQ method (None: full table)."""

    title: str
    folder: str
    method: str | None = None


MODELS = (
    Model("full table", "full"),
    Model("DPQ-SX", "sx", "sx"),
    Model("DPQ-VQ", "vq", "vq"),
)


def corpus(setting: Setting) -> list[str]:
    """The sentences, as text."""
    sizes = f"--train {setting.train} --valid {setting.valid} --test {setting.test}"
    return f"python -m experiments.demo.corpus corpus --seed {setting.seed} {sizes}".split()


def preprocess(setting: Setting) -> list[str]:
    """Text to binary data."""
    files = "--trainpref corpus/train --validpref corpus/valid --testpref corpus/test"
    command = f"fairseq-preprocess -s {SOURCE} -t {TARGET} {files} --destdir bin"
    return (command + (" --joined-dictionary" if setting.tables == "all" else "")).split()


def train(setting: Setting, model: Model, flags: str = "") -> list[str]:
    """Training; the commands differ in the DPQ flags only (`flags`, instead of the model's)."""
    if model.method is not None:
        own = f"--dpq-K {setting.K} --dpq-D {setting.D} --dpq-method {model.method}"
    else:  # DPQ tables start small: the full table too, or the start would be compared
        own = f"--dpq-full-start {setting.full_start:g}"
    command = ["fairseq-train", "bin", "--user-dir", "fairseq_dpq", *(flags or own).split()]
    command += ["--dpq-embeddings", "all"] if setting.tables == "all" else []
    shared = "--share-decoder-input-output-embed", "--share-all-embeddings"
    model_flags = MODEL.replace(*shared) if setting.tables == "all" else MODEL
    command += [*model_flags.split(), *TRAINING.split(), *DATA.split()]
    command += f"--total-num-update {setting.updates} --max-update {setting.updates}".split()
    command += f"--seed {setting.model_seed}".split()
    command += f"--save-dir {model.folder}".split()
    return command + f"{CHECKPOINTS} --log-format json --log-interval 10".split()


def compact(model: Model) -> list[str]:
    """Compact the trained checkpoint."""
    files = f"{model.folder}/checkpoint_best.pt {model.folder}/compact.pt"
    return f"fairseq-dpq-compact {files} --force".split()


def shipped(model: Model) -> str:
    """The file used to translate: the compact one if there is DPQ."""
    name = "checkpoint_best.pt" if model.method is None else "compact.pt"
    return f"{model.folder}/{name}"


def generate(model: Model) -> list[str]:
    """Translate and score the test set."""
    command = ["fairseq-generate", "bin", "--user-dir", "fairseq_dpq", "--path", shipped(model)]
    command += ["--beam", "5", "--max-len-a", "1.5", "--max-len-b", "10", "--max-tokens", "4000"]
    command += ["--scoring", "sacrebleu", "--sacrebleu-tokenizer", "none"]
    return command + DATA.split()


def report() -> list[str]:
    """Codes, neighbours and curves of the three models, as a page."""
    command = ["fairseq-dpq-report"]
    for model in MODELS:
        command.append(f"{model.title}={model.folder}/checkpoint_best.pt")
        if model.method is not None:
            command.append(f"{model.title} compact={shipped(model)}")
    for model in MODELS:
        command += ["--log", f"{model.title}=logs/{model.folder}/train.log"]
    command += ["--words", "horse", "house", "doctor", "bread", "quickly", "took"]
    return [*command, "--title", "DPQ demo", "--out", "report", "--force"]
