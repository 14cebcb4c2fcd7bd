"""Files that are changed and then made consistent again: every checksum in them fits, the CRC-32 of
the zip file, of the record and of a safetensors file's metadata."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_dpq import CompactEmbedding, compress, load_compact, save_compact
from fairseq_dpq.cli import compact, export, inspect, quantize, report
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.memory import tensor_crc32
from fairseq_dpq.files.reader import FORMAT, VERSION, _crc32, read_symbols
from fairseq_dpq.files.record import RECORD_KEY, sealed
from fairseq_dpq.files.writer import DTYPES
from helpers.any_model import some_ids, toy
from helpers.fuzzing import Damage, Failure
from helpers.toy_checkpoints import ALIAS, PATH, edit_record

SPOILED = [0.0, -1.0, 1e30, 3e38, float("nan"), float("inf")]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the bytes of its tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def joined(header: dict[str, Any], body: bytes, seal: bool = True) -> bytes:
    """A safetensors file whose checksums fit its bytes, as far as they can be read as tensors."""
    meta = header.get("__metadata__")
    if seal and isinstance(meta, dict):
        sums = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                part = bytearray(body[start:end])
                tensor = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0)
                try:
                    tensor = tensor.view(DTYPES[entry["dtype"]]).view(entry["shape"])
                except (KeyError, RuntimeError, TypeError):
                    continue
                sums[name] = tensor_crc32(tensor)
        meta["checksums"] = json.dumps(sums)
        meta.update({"format": FORMAT, "version": str(VERSION)})
        meta["crc32"] = str(_crc32(meta))
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + body


class Refitted(Damage):
    """Cases that no checksum tells from what a tool has written."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        state = dict(self.trained)
        cfg = type(state["cfg"]["model"])(**vars(state["cfg"]["model"]))
        delattr(cfg, RECORD_KEY)
        state["cfg"] = {**state["cfg"], "model": cfg}
        state["model"] = {f"{PATH}.weight": torch.randn(60, 12), "encoder.fc.weight": torch.eye(8)}
        self.full = folder / "full.pt"
        torch.save(state, self.full)
        self.saved = folder / "saved"
        small = toy()
        compress(small, K=8, min_rows=100)
        save_compact(small, self.saved)
        self.page = folder / "report"
        self.families.update(
            refit_zip=self.refit_zip,
            refit_table=self.refit_table,
            refit_export=self.refit_export,
            refit_model=self.refit_model,
        )

    def all_tools(self) -> list[int]:
        """Give `bad` to every tool; the exit codes of compact and export."""
        bad, out = str(self.bad), str(self.out)
        self._run(inspect.main, [bad])
        self._run(quantize.main, [bad, out, "--dpq-K", "4", "--dpq-D", "2", "--force"])
        self._run(report.main, [bad, "--out", str(self.page), "--force"])
        code, _ = self._run(compact.main, [bad, out, "--force"])
        more = ["--no-symbols", "--force"]
        return [code, self._run(export.main, [bad, out, *more])[0]]

    def refit_zip(self) -> str:
        """The bytes of one entry."""
        sources = {**self.files, "full": self.full}
        sources.pop("legacy")  # not a zip file
        origin = self.rng.choice(list(sources))
        with zipfile.ZipFile(sources[origin]) as old:
            entries = {info.filename: old.read(info) for info in old.infolist()}
        names = [name for name in entries if len(entries[name]) > 8]
        pickled = next(name for name in names if name.endswith("data.pkl"))
        name = pickled if self.rng.random() < 0.5 else self.rng.choice(names)
        entries[name], what = self._flip(entries[name], 0, len(entries[name]))
        if name == pickled:  # torch ignores a wrong protocol; what the rows are read by refuses it
            entries[name] = entries[name][:1] + b"\x02" + entries[name][2:]
        with zipfile.ZipFile(self.bad, "w", zipfile.ZIP_STORED) as new:
            for key, data in entries.items():
                new.writestr(key, data)
        what = f"{origin}: {name} {what}"
        _, exported = self.all_tools()
        if exported == 0 and origin != "full":
            self._compare_export(origin, what)
        return what

    def _spoil_tensor(self, tensor: Tensor) -> Tensor:
        """Some of its numbers changed."""
        flat = tensor.clone().reshape(-1)
        for _ in range(self.rng.choice([1, 3])):
            at = self.rng.randrange(len(flat))
            floats = flat.is_floating_point()
            flat[at] = self.rng.choice(SPOILED) if floats else self.rng.randrange(256)
        return flat.view(tensor.shape)

    def _check_form(self, what: str, form: CompactEmbedding) -> None:
        """What was accepted must be its codes' values, by plain indexing."""
        rows, codes = form.dense(), form.unpacked_codes().long()
        if bool((codes >= torch.tensor(form.sizes)).any()):
            raise Failure(f"{what}: codes beyond K were accepted")
        plain = form.values[codes + form.offsets].reshape(rows.shape)
        if form.padding_idx is not None:
            plain[form.padding_idx] = rows[form.padding_idx]
        if not torch.equal(rows.nan_to_num(), plain.nan_to_num()):
            raise Failure(f"{what}: rows that its codes do not spell")

    def refit_table(self) -> str:
        """Numbers of a compact checkpoint's table, or a layer beside it."""
        origin, state = self._load("compact", "shrunk")
        leaf = self.rng.choice(["codes", "values", "values", "fc"])
        key = f"{PATH}.{leaf}" if leaf != "fc" else "encoder.fc.weight"
        new = self._spoil_tensor(state["model"][key])
        state["model"][key] = new
        if leaf != "fc":
            state["model"][key.replace(PATH, ALIAS)] = new
            crc = tensor_crc32(new)
            edit_record(
                state, lambda record: record["tables"][PATH]["checksums"].update({leaf: crc})
            )
        torch.save(state, self.bad)
        what = f"{origin}: {leaf}"
        if self.all_tools()[1] == 0:
            form = CompactEmbedding.from_file(self.out)
            self._check_form(what, form)
            values, wanted = form.export_tensors()["values"], state["model"][f"{PATH}.values"]
            if not torch.equal(values.nan_to_num(), wanted.nan_to_num()):
                raise Failure(f"export of {what}: other values")
        return what

    def _forge(self, header: dict[str, Any], body: bytes) -> tuple[bytes, str]:
        """Change the config, the layout or the bytes of a safetensors file, checksums refitted."""
        kind = self.rng.choice(["config", "config", "tensor", "layout", "meta"])
        meta = header["__metadata__"]
        if kind == "config":
            config = json.loads(meta["config"])
            what = self._spoil(config)
            record = config.get("record") if isinstance(config, dict) else None
            if isinstance(record, dict) and not what.startswith("record/crc32"):
                record.pop("crc32", None)
                config["record"] = json.loads(sealed(record))
            meta["config"] = json.dumps(config)
        elif kind == "tensor":
            body, what = self._flip(body, 0, len(body))
        elif kind == "layout":
            name = self.rng.choice([name for name in header if name != "__metadata__"])
            entry = header[name]
            how = self.rng.choice(["dtype", "shape", "name", "gone", "order"])
            what = f"{name} {how}"
            if how == "dtype":
                entry["dtype"] = self.rng.choice([*DTYPES, "F8_E4M3", "U64"])
            elif how == "shape":
                shape = entry["shape"]
                entry["shape"] = self.rng.choice(
                    [shape[::-1], [*shape, 1], [1, *shape], [], [0], [2**40, 2**40], shape[:-1]]
                )
            elif how == "name":
                header[self.rng.choice(["a\nb", "symbols", "weight", "\x1b[31m"])] = header.pop(
                    name
                )
            elif how == "gone":
                del header[name]
            else:
                other = self.rng.choice([key for key in header if key != "__metadata__"])
                header[name], header[other] = header[other], header[name]
        else:
            key = self.rng.choice([*meta, "more"])
            meta[key] = self.rng.choice(
                ["", "0", "{}", "[]", "null", "x" * 9000, "a\nb", "\x1b[0m"]
            )
            what = f"metadata {key}"
            return joined(header, body, seal=key not in ("checksums", "crc32")), what
        return joined(header, body), f"{kind}: {what}"

    def refit_export(self) -> str:
        """An exported table."""
        data, what = self._forge(*split(self.whole))
        self.bad.write_bytes(data)
        self._run(inspect.main, [str(self.bad)])
        self._run(report.main, [str(self.bad), "--out", str(self.page), "--force"])
        try:
            form = CompactEmbedding.from_file(self.bad)
            self._check_form(what, form)
            symbols = read_symbols(self.bad)
        except CheckpointError as error:
            if not str(error).isprintable():
                raise Failure(f"{what}: {str(error)!r}") from error
            return what
        if symbols is not None and len(symbols) != form.num_embeddings:
            raise Failure(f"{what}: {len(symbols)} symbols for {form.num_embeddings} rows")
        return what

    def refit_model(self) -> str:
        """A saved model: refused, with the model untouched, or loaded and able to run."""
        file = self.saved / "model.safetensors"
        whole = file.read_bytes()
        data, what = self._forge(*split(whole))
        forged = self.folder / "forged"
        forged.mkdir(exist_ok=True)
        (forged / file.name).write_bytes(data)
        model = toy()
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        try:
            model = load_compact(forged, model)
        except CheckpointError as error:
            if not str(error).isprintable():
                raise Failure(f"{what}: {str(error)!r}") from error
            after = model.state_dict()
            if before.keys() != after.keys() or any(
                not torch.equal(tensor, after[key]) for key, tensor in before.items()
            ):
                raise Failure(f"{what}: refused, yet the model was changed") from error
            return what
        model(some_ids())
        for module in model.modules():
            if isinstance(module, CompactEmbedding):
                self._check_form(what, module)
        return what
