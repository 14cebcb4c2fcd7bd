"""Attacks on everything that reads files: damaged bytes here, forged ones in forging.py.

Every case must end in one of two ways: one line of error and exit code 2 (CheckpointError in
Python), or a result that is exactly what the input stands for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import time
from pathlib import Path
from typing import Any, Callable

import torch

from fairseq_dpq import CompactEmbedding, DPQEmbedding
from fairseq_dpq.cli import compact, export, inspect, quantize
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.validation import check_state
from fairseq_dpq.files.checkpoint import Checkpoint
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.reader import read_symbols
from helpers.toy_checkpoints import ALIAS, PATH, load, make_layer, make_state

SECONDS, KILOBYTES = 10, 1_000_000  # most that one case may take
N = 60
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 59, 61, 10**6, 10**9, 10**12 + 1, 2**31, 2**63, 10**30),
    *(0.5, 1e308, float("nan"), float("inf"), "", "8", "a\nb", "\x1b[31m", "\udc80", "x" * 5000),
    *([], {}, [1], [[]], {"a": 1}, [PATH], [ALIAS], ["encoder.layers.0.fc1"], ["decoder.fc"]),
    *(["a\nb.embed_tokens"], ["encoder.fc"], [ALIAS, ALIAS], [PATH, ALIAS], "sx", "vq", "low_rank"),
]


class Failure(AssertionError):
    """A case that ended in another way than it may."""


class Damage:
    """The inputs, made once, how cases are run, and those of damaged bytes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.bad, self.out = folder / "bad", folder / "out"
        self.marker = folder / "marker"
        layer = make_layer(n=N, K=6)
        self.trained = make_state(layer)
        torch.save(self.trained, folder / "trained.pt")
        self.files = {"trained": folder / "trained.pt"}
        for name, flags in (("compact", []), ("shrunk", ["--lossless-shrink"])):
            self.files[name] = folder / f"{name}.pt"
            self._run(compact.main, [str(self.files["trained"]), str(self.files[name]), *flags])
        torch.save(self.trained, folder / "legacy.pt", _use_new_zipfile_serialization=False)
        self.files["legacy"] = folder / "legacy.pt"
        words = folder / "dict.txt"
        words.write_text("".join(f"w{i} 1\n" for i in range(N - 4)))
        self.table = folder / "table.safetensors"
        argv = [str(self.files["compact"]), str(self.table), "--dict", str(words)]
        code, text = self._run(export.main, argv)
        assert code == 0, text
        self.rows = CompactEmbedding.from_file(self.table).dense()
        self.symbols = read_symbols(self.table)
        self.bytes = {name: path.read_bytes() for name, path in self.files.items()}
        self.whole = self.table.read_bytes()
        self.families: dict[str, Callable[[], str]] = {
            "export_header": self.export_header,
            "export_data": self.export_data,
            "export_json": self.export_json,
            "bytes": self.damaged_bytes,
        }

    # Running -------------------------------------------------------------------------------

    def _run(self, main: Callable, argv: list[str]) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
        text = err.getvalue()
        if code == 0:
            return 0, out.getvalue()
        if code != 2 or text.count("\n") != 1 or "unexpected" in text or not text.isascii():
            raise Failure(f"{main.__module__}: exit {code}: {text!r}")
        if "\x1b" in text or out.getvalue():
            raise Failure(f"{main.__module__}: printed {text!r}, {out.getvalue()!r}")
        return code, text

    def run(self, family: str) -> str:
        """One case; what it was. Failure if it took too much or ended wrongly."""
        start, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        what = self.families[family]()
        seconds = time.monotonic() - start
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        if seconds > SECONDS or grown > KILOBYTES:
            raise Failure(f"{family}: {what}: {seconds:.1f} s, {grown} kB")
        if self.marker.exists():
            raise Failure(f"{family}: {what}: code of the file has run")
        return what

    def tools(self, origin: str, what: str) -> str:
        """Give `bad` to every tool; what they make of it must be what it stands for."""
        bad, out = str(self.bad), self.out
        out.unlink(missing_ok=True)
        self._run(inspect.main, [bad])
        code, _ = self._run(compact.main, [bad, str(out)])
        if code == 0:
            self._compare_compact(what)
        code, _ = self._run(export.main, [bad, str(out), "--no-symbols", "--force"])
        if code == 0:
            self._compare_export(origin, what)
        out.unlink(missing_ok=True)
        self._run(quantize.main, [bad, str(out), "--dpq-K", "4", "--dpq-D", "2"])
        out.unlink(missing_ok=True)
        return what

    def fairseq(self, what: str) -> None:
        """The same through the gate that fairseq's loading passes."""
        with contextlib.suppress(DPQConfigError):
            check_state(load(self.bad), what)

    def _plain_rows(self) -> torch.Tensor:
        """The rows of the training checkpoint `bad`, by torch's own strict loading."""
        state = load(self.bad)
        cfg = state["cfg"]["model"]
        table = json.loads(
            (vars(cfg) if isinstance(cfg, argparse.Namespace) else cfg)["dpq_tables"]
        )
        table = table["tables"][PATH]
        size = table["num_embeddings"], table["embedding_dim"], table["padding_idx"]
        layer = DPQEmbedding(*size, **table["options"])
        own = {k[len(PATH) + 1 :]: t for k, t in state["model"].items() if k.startswith(PATH + ".")}
        # What only further training needs may be missing: `idle`, if a record asks for re-seeding.
        layer.load_state_dict({**layer.state_dict(), **own}, strict=True)
        with torch.no_grad():
            return layer.eval()(torch.arange(size[0]))

    def _compare_compact(self, what: str) -> None:
        copy = Checkpoint.load(self.out)
        rows = copy.form(PATH).dense()
        check_state(load(self.out), what)  # a verified file must load
        if not torch.equal(rows, self._plain_rows()):
            raise Failure(f"compact: {what}: other rows")

    def _compare_export(self, origin: str, what: str) -> None:
        rows = CompactEmbedding.from_file(self.out).dense()
        wanted = self.rows if origin in ("compact", "shrunk") else self._plain_rows()
        if not torch.equal(rows, wanted.to(rows.dtype)):
            raise Failure(f"export of {origin}: {what}: other rows")

    def from_file(self, what: str) -> str:
        """`bad` as an exported table: an CheckpointError of one line, or the rows and symbols."""
        try:
            rows, symbols = CompactEmbedding.from_file(self.bad).dense(), read_symbols(self.bad)
        except CheckpointError as error:
            if not str(error).isprintable():
                raise Failure(f"{what}: {str(error)!r}") from error
            return what
        if not torch.equal(rows, self.rows) or symbols not in (None, self.symbols):
            raise Failure(f"from_file: {what}: read wrongly without a word")
        return what

    # Exported tables ------------------------------------------------------------------------

    def _flip(self, data: bytes, low: int, high: int) -> tuple[bytes, str]:
        rng, spoiled = self.rng, bytearray(data)
        kind = rng.choice(["bit", "byte", "zeros", "cut", "insert"])
        at = rng.randrange(low, high)
        if kind == "bit":
            spoiled[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            spoiled[at] = rng.randrange(256)
        elif kind == "zeros":
            end = min(high, at + rng.randrange(1, 64))
            spoiled[at:end] = bytes(end - at)
        elif kind == "cut":
            del spoiled[at : at + rng.randrange(1, 64)]
        else:
            spoiled[at:at] = rng.randbytes(rng.randrange(1, 16))
        return bytes(spoiled), f"{kind} at {at}"

    def _header_end(self) -> int:
        return 8 + int.from_bytes(self.whole[:8], "little")

    def export_header(self) -> str:
        data, what = self._flip(self.whole, 0, self._header_end())
        self.bad.write_bytes(data)
        return self.from_file(what)

    def export_data(self) -> str:
        data, what = self._flip(self.whole, self._header_end(), len(self.whole))
        self.bad.write_bytes(data)
        return self.from_file(what)

    def export_json(self) -> str:
        end = self._header_end()
        header = json.loads(self.whole[8:end])
        what = self._spoil(header)
        text = json.dumps(header).encode("utf-8", "surrogatepass")
        self.bad.write_bytes(len(text).to_bytes(8, "little") + text + self.whole[end:])
        return self.from_file(what)

    # Checkpoints ------------------------------------------------------------------------------

    def _spoil(self, tree: Any) -> str:
        """Change one place of nested dicts and lists."""
        rng, where = self.rng, []
        while True:
            keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
            key = rng.choice(keys)
            where.append(str(key))
            inner = tree[key]
            if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
                tree = inner
                continue
            if rng.random() < 0.15:
                del tree[key]
                return f"{'/'.join(where)} removed"
            tree[key] = rng.choice(JUNK)
            return f"{'/'.join(where)} = {tree[key]!r:.60}"

    def _load(self, *names: str) -> tuple[str, dict]:
        origin = self.rng.choice(names or ("trained", "compact", "shrunk"))
        return origin, load(self.files[origin])

    def damaged_bytes(self) -> str:
        origin = self.rng.choice(list(self.files))
        data = self.bytes[origin]
        low = 0 if self.rng.random() < 0.5 else len(data) * 3 // 4  # the directory is at the end
        spoiled, what = self._flip(data, low, len(data))
        self.bad.write_bytes(spoiled)
        out = str(self.out)
        # Damaged numbers of a training checkpoint are numbers: verification compares them.
        for main, more in ((inspect.main, []), (compact.main, [out, "--force"])):
            self._run(main, [str(self.bad), *more])
        code, _ = self._run(export.main, [str(self.bad), out, "--no-symbols", "--force"])
        if code == 0 and origin in ("compact", "shrunk"):
            self._compare_export(origin, what)
        return f"{origin}: {what}"
