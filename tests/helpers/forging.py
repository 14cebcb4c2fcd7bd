"""Forged checkpoints, and all attacks for some minutes:

PYTHONPATH=tests python -m helpers.forging --minutes 10 [--seed 1]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import torch

from fairseq_dpq.cli import compact, export, inspect, quantize
from fairseq_dpq.config import DPQConfigError
from fairseq_dpq.fairseq_plugin.validation import check_state
from fairseq_dpq.files.memory import tensor_crc32
from helpers.fuzzing import JUNK, Failure, N
from helpers.refitting import Refitted
from helpers.toy_checkpoints import ALIAS, PATH, edit_record, load


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path | str, function: Any = os.mkdir) -> None:
        self.marker, self.function = str(marker), function

    def __reduce__(self) -> tuple:
        return self.function, (self.marker,)


class Attack(Refitted):
    """All families of cases."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.families.update(
            record=self.forged_record,
            tensors=self.forged_tensors,
            codes=self.forged_codes,
            state=self.forged_state,
            names=self.forged_names,
            pickles=self.pickles,
        )

    def forged_record(self) -> str:
        origin, state = self._load()
        said = []
        for _ in range(self.rng.choice([1, 1, 2])):
            with contextlib.suppress(IndexError):
                edit_record(state, lambda record: said.append(self._spoil(record)))
        torch.save(state, self.bad)
        self.fairseq(origin)
        # A record that is forged into another true one of the same tensors stands for itself.
        self._run(inspect.main, [str(self.bad)])
        code, _ = self._run(compact.main, [str(self.bad), str(self.out), "--force"])
        if code == 0:
            self._compare_compact(said[0])
        self._run(export.main, [str(self.bad), str(self.out), "--no-symbols", "--force"])
        return f"{origin}: {said}"

    def forged_tensors(self) -> str:
        origin, state = self._load()
        model = state["model"]
        key = self.rng.choice([k for k in model if k.startswith(PATH)] + ["encoder.fc.weight"])
        key = key if model[key].dim() else f"{PATH}.values"
        old = model[key]
        changes: dict[str, Callable[[], Any]] = {
            "float64": lambda: old.double(),
            "float16": lambda: old.to(torch.float16),
            "int64": lambda: old.long(),
            "complex": lambda: old.to(torch.complex64),
            "bool": lambda: old.bool(),
            "first": lambda: old[:1].clone(),
            "one": lambda: old.reshape(-1)[:1].clone(),
            "scalar": lambda: old.reshape(-1)[0].clone(),
            "expanded": lambda: old[:1].clone().expand(old.shape),
            "huge": lambda: old.reshape(-1)[:1].clone().expand(2**31, 4),
            "wide": lambda: old.reshape(-1)[:1].clone().expand(len(old), 2**27),
            "transposed": lambda: old.t() if old.dim() == 2 else old.flip(0),
            "strided": lambda: torch.stack([old, old], -1)[..., 0],
            "empty": lambda: old[:0].clone(),
            "more": lambda: torch.cat([old, old]),
            "unsqueezed": lambda: old.unsqueeze(0),
            "sparse": lambda: old.to_sparse(),
            "meta": lambda: old.to("meta"),
            "missing": lambda: None,
        }
        how = self.rng.choice(list(changes))
        new = changes[how]()
        names = [key] if self.rng.random() < 0.5 else [key, key.replace(PATH, ALIAS)]
        for name in names:
            if new is None:
                model.pop(name, None)
            else:
                model[name] = new
        if self.rng.random() < 0.5 and origin != "trained" and new is not None and how != "meta":
            leaf = key.rsplit(".", 1)[1]
            with contextlib.suppress(Exception):  # the checksum is made to fit where there is one
                crc = tensor_crc32(new) if how not in ("huge", "wide", "sparse") else 0
                edit_record(
                    state, lambda record: record["tables"][PATH]["checksums"].update({leaf: crc})
                )
        torch.save(state, self.bad)
        self.fairseq(how)
        # In a stored form other numbers with a fitting checksum are another table.
        same = "trained" if origin == "trained" or key.endswith(".values") else origin
        if same != origin:
            self._run(inspect.main, [str(self.bad)])
            self._run(export.main, [str(self.bad), str(self.out), "--no-symbols", "--force"])
            return f"{origin}: {key} {how}"
        return self.tools(origin, f"{origin}: {key} {how}, {len(names)} names")

    def forged_codes(self) -> str:
        """Codes beyond K, or spare bits, with checksums that fit."""
        origin, state = self._load("compact", "shrunk")
        codes = state["model"][f"{PATH}.codes"].clone()
        row = self.rng.choice([0, 1, self.rng.randrange(N)])
        codes[row] = 255
        for name in (PATH, ALIAS):
            state["model"][f"{name}.codes"] = codes
        edit_record(
            state,
            lambda record: record["tables"][PATH]["checksums"].update(codes=tensor_crc32(codes)),
        )
        torch.save(state, self.bad)
        for main, more in ((inspect.main, []), (export.main, [str(self.out), "--no-symbols"])):
            if self._run(main, [str(self.bad), *more])[0] == 0:
                raise Failure(f"{origin}: codes beyond their range in row {row} were accepted")
        with contextlib.suppress(DPQConfigError):
            check_state(load(self.bad), "")
            raise Failure(f"{origin}: codes beyond their range in row {row} passed validation")
        return f"{origin}: row {row}"

    def forged_state(self) -> str:
        """Parts of the checkpoint that are something else."""
        origin, state = self._load()
        knot: dict[Any, Any] = {}
        knot["self"] = [knot]
        deep: list[Any] = []
        for _ in range(200):
            deep = [deep]
        things = [*JUNK, knot, torch.zeros(3), argparse.Namespace(a=1), [knot], {1: 2}, deep]
        key = self.rng.choice([*state, "last_optimizer_state", "extra_state"])
        value = self.rng.choice(things)
        if self.rng.random() < 0.3 and key in ("cfg", "model") and origin == "trained":
            state[key][self.rng.choice([*state[key], 5, "model", "a\nb"])] = value
        else:
            state[key] = value
        torch.save(state, self.bad)
        for main, more in (
            (inspect.main, []),
            (compact.main, [str(self.out), "--force"]),
            (export.main, [str(self.out), "--no-symbols", "--force"]),
        ):
            self._run(main, [str(self.bad), *more])
        return f"{origin}: {key} = {type(value).__name__}"

    def forged_names(self) -> str:
        """Control characters in the names of tables and layers."""
        origin, state = self._load()
        ugly = self.rng.choice(["a\nb", "\x1b[31mred", "\r", "\u202e", "\x07", "\udc80"])
        kind = self.rng.choice(["table", "alias", "layer", "source", "option"])

        def edit(record: dict) -> None:
            table = record["tables"][PATH]
            if kind == "table":
                record["tables"][f"{ugly}.embed_tokens"] = record["tables"].pop(PATH)
            elif kind == "alias":
                table["aliases"] = [f"{ugly}.embed_tokens"]
            elif kind == "source":
                record["source"] = ugly
            elif kind == "option":
                table["options"][ugly] = 1

        edit_record(state, edit)
        if kind == "table":
            for key in [k for k in state["model"] if k.startswith(PATH)]:
                state["model"][key.replace("encoder", ugly)] = state["model"].pop(key)
        elif kind == "layer":
            state["model"][f"{ugly}.embed_positions.weight"] = torch.zeros(4, 4)
        torch.save(state, self.bad)
        for main, more in ((inspect.main, []), (compact.main, [str(self.out), "--force"])):
            code, text = self._run(main, [str(self.bad), *more])
            if code == 0 and not text.replace("\n", "").isprintable():
                raise Failure(f"{origin}: {kind} {ugly!r} printed raw: {text!r}")
        return f"{origin}: {kind} {ugly!r}"

    def pickles(self) -> str:
        """Code in the file, in several places and styles."""
        origin, state = self._load("trained", "compact")
        function = self.rng.choice([os.mkdir, os.makedirs, os.system, exec, eval, open])
        marker = str(self.marker)
        if function in (exec, eval):
            marker = f"__import__('os').mkdir({marker!r})"
        elif function is os.system:
            marker = f"mkdir {marker}"
        elif function is open:
            function, marker = os.mkdir, marker
        evil: Any = Evil(Path("x"), function)
        evil.marker = marker
        style = self.rng.choice(["plain", "list", "key", "nested", "state"])
        if style == "list":
            evil = [evil]
        elif style == "nested":
            evil = {"a": [{"b": (evil,)}]}
        elif style == "state":
            evil = argparse.Namespace(a=evil)
        elif style == "key":
            evil = {(1, evil): 2} if not isinstance(evil, dict) else evil
        place = self.rng.choice(["top", "cfg", "model", "extra_state", "optimizer", "meters"])
        if place == "top":
            state["more"] = evil
        elif place == "cfg":
            state["cfg"]["task"] = evil
        elif place == "model":
            state["model"]["x"] = evil
        elif place == "extra_state":
            state["extra_state"] = {"metrics": evil}
        elif place == "optimizer":
            state["last_optimizer_state"] = {"state": {0: evil}}
        else:
            state["extra_state"] = {"train_meter": {"loss": evil}}
        zipped = self.rng.random() < 0.7
        torch.save(state, self.bad, _use_new_zipfile_serialization=zipped)
        for main, more in (
            (inspect.main, []),
            (compact.main, [str(self.out), "--force"]),
            (export.main, [str(self.out), "--no-symbols", "--force"]),
            (quantize.main, [str(self.out), "--dpq-K", "4", "--force"]),
        ):
            if self._run(main, [str(self.bad), *more])[0] == 0:
                raise Failure(f"{main.__module__}: a pickle with {function.__name__} was accepted")
        from fairseq import checkpoint_utils

        if torch.__version__ < "2":  # fairseq itself unpickles everything there
            return f"{origin}: {function.__name__} {style} in {place}"
        try:
            checkpoint_utils.load_checkpoint_to_cpu(str(self.bad))
        except Exception:
            return f"{origin}: {function.__name__} {style} in {place}"
        raise Failure(f"fairseq loaded a pickle with {function.__name__}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Attack the readers of files for some minutes.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--family", help="only this one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {args.seed}, {args.minutes} minutes")
    counts: dict[str, int] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        attack = Attack(Path(folder), args.seed)
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            for family in [args.family] if args.family else list(attack.families):
                counts[family] = counts.get(family, 0) + 1
                try:
                    attack.run(family)
                except Exception as error:
                    failed += 1
                    print(f"FAILED {family} {counts[family]}: {type(error).__name__}: {error}")
    for family, count in counts.items():
        print(f"{family:15} {count:7} cases")
    print(f"{sum(counts.values())} cases, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
