"""Score against size on the demo corpus: full table, DPQ, and what others do.

    python docs/figures/score_against_size.py                  # draw from the measured figures
    python docs/figures/score_against_size.py --measure DIR    # measure them first, resumable

Measuring trains the demo's model (fairseq_dpq/demo) once for each row, then translates the
test set from the stored file. It takes about 12 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fairseq_dpq.cli.common import text_table
from fairseq_dpq.demo import commands, table
from fairseq_dpq.demo.commands import Model, Setting
from fairseq_dpq.demo.run import Runner
from fairseq_dpq.demo.status import Status
from fairseq_dpq.figures import style
from fairseq_dpq.sweeps.figures import mark_bytes

HERE = Path(__file__).resolve().parent
DATA = HERE / "score_against_size.json"
SIZES = ((8, 16), (32, 16))  # K, D
SCALAR = (8, 4, 2)  # bits
RANKS = (3, 6)
FULL = Model("full table", "full")

# family, marker
FAMILIES = (
    ("DPQ-SX", "o"),
    ("DPQ-VQ", "s"),
    ("product quantisation after training", "^"),
    ("scalar quantisation after training", "v"),
    ("low rank, trained", "D"),
)


def rows() -> list[tuple[str, str, str, list[str], list[str]]]:
    """Name, family, label, flags of training, flags of fairseq-dpq-quantize."""
    out = [("full", "full table", "", [], [])]
    for K, D in SIZES:
        size = ["--dpq-K", str(K), "--dpq-D", str(D)]
        label = f"K={K} D={D}"
        for method in ("sx", "vq"):
            flags = [*size, "--dpq-method", method]
            out.append((f"{method}-{K}-{D}", f"DPQ-{method.upper()}", label, flags, []))
        out.append((f"pq-{K}-{D}", FAMILIES[2][0], label, [], size))
    for bits in SCALAR:
        flags = ["--form", "scalar", "--bits", str(bits)]
        out.append((f"scalar-{bits}", FAMILIES[3][0], f"{bits} bits", [], flags))
    for rank in RANKS:
        flags = ["--dpq-method", "low_rank", "--dpq-rank", str(rank)]
        out.append((f"rank-{rank}", FAMILIES[4][0], f"rank {rank}", flags, []))
    return out


def measure(out: Path, only: list[str]) -> list[dict]:
    """Train, store and translate; what an earlier call did is kept."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    setting = Setting()
    runner = Runner(out, setting, Status({"corpus": 1, "preprocess": 1}))
    runner.data()
    found = []
    for name, family, label, training, quantizing in rows():
        if only and name not in only:
            continue
        source = FULL if quantizing else Model(name, name)
        command = commands.train(setting, source)
        runner.step(f"train-{source.folder}", [*command, *training])
        stored = f"{source.folder}/checkpoint_best.pt"
        if training or quantizing:
            (out / name).mkdir(exist_ok=True)
            stored, trained = f"{name}/compact.pt", stored
            tool = ["fairseq-dpq-quantize"] if quantizing else ["fairseq-dpq-compact"]
            runner.step(f"store-{name}", [*tool, trained, stored, *quantizing, "--force"])
        command = commands.generate(source)
        command[command.index("--path") + 1] = stored
        runner.step(f"generate-{name}", command)
        output = (out / "logs" / f"generate-{name}.log").read_text(encoding="utf-8")
        row = {"name": name, "family": family, "label": label}
        row["bytes"] = table.embedding_bytes(out / stored)
        row["bleu"] = table.read_bleu(output, setting.test)
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def draw(found: list[dict], stem: Path) -> list[Path]:
    """BLEU of the test set against the bytes of the table; the full table as a dashed line."""
    with style.figure((7.2, 3.6)) as figure:
        axes = figure.subplots()
        full = next(row for row in found if row["name"] == "full")
        ink = style.LIGHT.ink
        axes.axhline(full["bleu"], color=ink, linestyle="--", linewidth=1)
        axes.plot(full["bytes"], full["bleu"], "*", color=ink, markersize=9, label="full table")
        for (family, marker), colour in zip(FAMILIES, style.LIGHT.series):
            mine = sorted((r for r in found if r["family"] == family), key=lambda r: r["bytes"])
            x, y = [r["bytes"] for r in mine], [r["bleu"] for r in mine]
            axes.plot(x, y, marker=marker, color=colour, linewidth=1.2, label=family)
            for row in mine:
                # sx and vq share their sizes: the label of one is enough
                if family != FAMILIES[1][0]:
                    on_the_line = full["bleu"] - 3 <= row["bleu"] <= full["bleu"]
                    offset = (6, -10) if on_the_line else (6, -3)
                    place = {"textcoords": "offset points", "fontsize": 7, "color": ink}
                    axes.annotate(row["label"], (row["bytes"], row["bleu"]), offset, **place)
        axes.set_xscale("log")
        mark_bytes(axes)
        axes.set_ylim(0, 84)
        axes.set_xlabel("size of the embedding table")
        axes.set_ylabel("BLEU of the test set")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.05))
        return style.save(figure, stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path, metavar="DIR", help="folder of the runs")
    parser.add_argument("--only", nargs="+", default=[], help="some rows; nothing is drawn")
    args = parser.parse_args()
    if args.measure:
        found = measure(args.measure, args.only)
        if args.only:
            return
        lines = ",\n".join(f" {json.dumps(row)}" for row in found)
        DATA.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    found = json.loads(DATA.read_text(encoding="utf-8"))
    cells = [["model", "size", "bytes", "BLEU"]]
    cells += [[r["family"], r["label"], f"{r['bytes']:,}", f"{r['bleu']:.1f}"] for r in found]
    print(text_table(cells))
    for path in draw(found, DATA.with_suffix("")):
        print(path)


if __name__ == "__main__":
    main()
