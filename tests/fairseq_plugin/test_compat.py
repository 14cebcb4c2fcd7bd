"""Each patch of fairseq is tested by the failure it prevents, through fairseq's own commands.
The half that shows stock fairseq failing is skipped on versions that do not have the fault.
"""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
import textwrap
from pathlib import Path

import fairseq
import numpy as np
import pytest
import torch

from fairseq_dpq.fairseq_plugin import compat
from helpers import fsq

pytestmark = pytest.mark.slow

LSTM_LM = shlex.split(
    "--task language_modeling --arch lstm_lm --decoder-embed-dim 16 --decoder-hidden-size 16 "
    "--decoder-out-embed-dim 16 --tokens-per-sample 20"
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with toy data and a trained translation model."""
    root = tmp_path_factory.mktemp("compat")
    fsq.make_corpus(root, n_lines=200, n_valid=20, n_test=100)
    fsq.make_lm_corpus(root)
    args = [str(root / "bin"), "--arch", "transformer", *fsq.TINY]
    fsq.main("train", [*args, "--save-dir", str(root / "ck")])
    return root


@pytest.fixture(scope="module")
def patched() -> None:
    compat.apply()


@pytest.fixture(scope="module")
def stock(work: Path) -> dict:
    """The outcome of the commands below without patches, all run in one new process."""
    script = """
        import json, sys
        from helpers import fsq
        outcome = {}
        for name, (command, argv) in json.load(open("cases.json")).items():
            try:
                log = fsq.main(command, argv)
                outcome[name] = f"ran {log.count('begin training epoch')}"
            except BaseException as error:
                outcome[name] = f"{type(error).__name__}: {error}"
        json.dump(outcome, open("outcome.json", "w"))
    """
    script = textwrap.dedent(script)
    (work / "cases.json").write_text(json.dumps({k: (c, a) for k, (c, a) in cases(work).items()}))
    fsq.run([sys.executable, "-c", script], cwd=work, env=fsq.WITH_HELPERS)
    return json.loads((work / "outcome.json").read_text())


def cases(work: Path) -> dict[str, tuple[str, list[str]]]:
    """Commands that stock fairseq fails on, here or on other versions."""
    train = [str(work / "bin"), "--arch", "transformer", *fsq.TINY, "--no-save"]
    lm = [str(work / "lm"), *LSTM_LM, *fsq.QUICK, "--no-save"]
    return {
        "generate": ("generate", generate_args(work)),
        "eos": ("train", [*lm, "--sample-break-mode", "eos"]),
        "buckets": ("train", [*train, "--num-batch-buckets", "2"]),
        "fp16": ("train", [*train, "--fp16"]),
        "bf16": ("train", [*train, "--bf16"]),
        "tcp": ("train", [*train, *BY_HAND]),
        "world": ("train", [*train, "--distributed-world-size", "2"]),
    }


def generate_args(work: Path) -> list[str]:
    path = str(work / "ck" / "checkpoint_last.pt")
    return [str(work / "bin"), "--path", path, "--cpu", "--max-tokens", "500", "--beam", "1"]


BY_HAND = ["--distributed-init-method", "tcp://127.0.0.1:29566", "--distributed-world-size", "2"]


# ---------------------------------------------------------------------- checkpoint loading


def test_generate_loads_and_translates_every_sentence(work: Path, patched: None) -> None:
    log = fsq.main("generate", generate_args(work))
    ids = sorted(int(line.split("\t")[0][2:]) for line in log.splitlines() if line[:2] == "H-")
    assert ids == list(range(100))


def test_stock_generate_does_not_load(stock: dict) -> None:
    if not fsq.torch_at_least(2, 6):
        pytest.skip("torch < 2.6 loads without an allow-list")
    assert "Unsupported global: GLOBAL argparse.Namespace" in stock["generate"]


class Evil:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("evil",)


@pytest.mark.skipif(not fsq.torch_at_least(2, 6), reason="torch < 2.6 has no such allow-list")
def test_allow_list_holds_data_and_nothing_that_runs(
    tmp_path: Path, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = {
        "score": np.float64(1.5),
        "counts": np.arange(3),
        "half": np.float16(0.5),
        "name": np.str_("x"),
        "flag": np.bool_(True),
    }
    # The older format is one plain pickle, so names can be changed to those of numpy 1 or 2.
    torch.save(state, "np.pt", _use_new_zipfile_serialization=False)
    raw = Path("np.pt").read_bytes()
    here = b"cnumpy._core." if b"cnumpy._core." in raw else b"cnumpy.core."
    assert raw.count(here) >= 2
    for name in (b"cnumpy._core.", b"cnumpy.core."):
        Path("np.pt").write_bytes(raw.replace(here, name))
        loaded = torch.load("np.pt")
        assert loaded["score"] == 1.5 and loaded["counts"].tolist() == [0, 1, 2]
        assert loaded["half"] == 0.5 and loaded["name"] == "x" and loaded["flag"]

    torch.save({"model": Evil()}, "evil.pt")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        torch.load("evil.pt")
    assert not Path("evil").exists()


def test_allow_list_has_what_rank_0_sends(patched: None, tmp_path: Path) -> None:
    """At resume the other ranks get the checkpoint as pickled OmegaConf with placeholders."""
    from argparse import Namespace

    from fairseq.distributed import utils as distributed_utils
    from omegaconf import OmegaConf, open_dict

    cfg = OmegaConf.create({"task": {"x": [1, 2.5, None, "s"]}})
    with open_dict(cfg):
        cfg._set_flag("allow_objects", True)
        if hasattr(OmegaConf, "to_object"):  # omegaconf >= 2.1 can hold other objects
            cfg.model = Namespace(dim=7)
    tensors: list = []
    sent = distributed_utils._split_tensors_from_obj({"cfg": cfg, "w": torch.ones(2)}, tensors)
    torch.save(sent, tmp_path / "sent.pt")
    got = torch.load(tmp_path / "sent.pt")
    assert got["cfg"].task.x[1] == 2.5 and got["w"].index == 0 and len(tensors) == 1
    assert got["cfg"].get("model", Namespace(dim=7)).dim == 7


# ------------------------------------------------------------------------------------ numpy


@pytest.mark.parametrize("case", ["eos", "buckets"])
def test_numpy_names(case: str, work: Path, stock: dict, patched: None) -> None:
    command, argv = cases(work)[case]
    log = fsq.main(command, argv)
    assert fsq.logged(log, "num_updates")[-1] >= 4 and fsq.logged(log, "loss")[-1] < 7
    if int(np.__version__.split(".")[0]) >= 2:
        assert "no attribute 'compat'" in stock[case] or "'interpolation'" in stock[case]
        assert not hasattr(np, "compat"), "numpy itself must stay as it is"


def test_numpy_float_in_the_crf(patched: None) -> None:
    """The CRF's training loss uses np.float, which numpy 1.24 removed."""
    from fairseq.modules import DynamicCRF

    torch.manual_seed(0)
    crf = DynamicCRF(num_embedding=20, low_rank=4, beam_size=8)
    emissions, targets = torch.randn(2, 5, 20), torch.randint(20, (2, 5))
    likelihood = crf(emissions, targets, torch.ones(2, 5, dtype=torch.bool))
    assert likelihood.shape == (2,) and (likelihood < 0).all()


# ---------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("n, multiple", [(100, 8), (5, 8), (64, 8), (99, 1)])
def test_no_sentence_is_dropped(n: int, multiple: int, patched: None) -> None:
    from fairseq.data import data_utils

    def batches(function: object, n: int) -> list:
        return function(  # type: ignore[operator]
            (i for i in range(n)),
            num_tokens_fn=lambda i: 1 + i % 7,
            max_tokens=200,
            required_batch_size_multiple=multiple,
        )

    now = batches(data_utils.batch_by_size, n)
    assert np.concatenate(now).tolist() == list(range(n))
    assert all(len(b) % multiple == 0 for b in now[:-1])
    old = getattr(data_utils.batch_by_size, "__wrapped__", None)
    if old is not None:  # what it kept is unchanged, the rest is added
        kept = batches(old, n)
        assert [b.tolist() for b in kept] == [b.tolist() for b in now[: len(kept)]]
        lost = 0 if fairseq.__version__ == "0.12.2" else n % multiple  # 0.12.2 has no such fault
        assert sum(map(len, kept)) == n - lost
    assert batches(data_utils.batch_by_size, 0) == []


# -------------------------------------------------------------------------------------- exit

ABORT = """
import sys, torch
from fairseq.data.iterators import BufferedIterator
if sys.argv[1] == "patched":
    from fairseq_dpq.fairseq_plugin import compat
    compat.apply()
class Source:
    def __len__(self):
        return 10**6
    def __iter__(self):
        parts = [torch.zeros(64, 8) for _ in range(400)]
        while True:
            yield torch.cat(parts)
iterators = [BufferedIterator(size, Source()) for size in (10**6, 2)]  # in torch; out of room
for iterator in iterators:
    next(iterator)
print("done", flush=True)
"""


def test_no_abort_at_exit(work: Path) -> None:
    done = fsq.run([sys.executable, "-c", ABORT, "patched"], cwd=work)
    assert done.stdout == "done\n" and done.stderr == ""


def test_stock_aborts_at_exit(work: Path) -> None:
    command = [sys.executable, "-c", ABORT, "stock"]
    codes = {fsq.run(command, cwd=work, ok=None).returncode for _ in range(3)}
    assert codes <= {-6, 0}
    if sys.version_info < (3, 13):  # later, a thread of a Python that ends is stopped quietly
        assert -6 in codes, "the patch is no longer needed"


# ------------------------------------------------------------------------------- CPU workers
# Valid launches are in test_workers.py.


def test_stock_launches_fail_or_train_nothing(stock: dict) -> None:
    assert "world size is 2 but have 0 available devices" in stock["world"]
    assert stock["tcp"] == "ran 0", "returned without an error and without training"


# ---------------------------------------------------------------------------- half precision


def test_half_precision_on_cpu(work: Path, stock: dict, patched: None) -> None:
    train = [a for a in cases(work)["fp16"][1] if a not in ("--fp16", "--no-save")]
    losses = []
    for flags, dtype in (
        ([], torch.float32),
        (["--fp16"], torch.float16),
        (["--bf16"], torch.bfloat16),
        (["--memory-efficient-bf16"], torch.bfloat16),
    ):
        if flags == ["--fp16"] and not fsq.torch_at_least(2, 1):
            continue  # torch had no float16 arithmetic on CPU
        save = work / ("half" + "".join(flags))
        log = fsq.main("train", [*train, *flags, "--save-dir", str(save)])
        losses += fsq.logged(log, r"train \| .* loss")[-1:]
        # fairseq saves in single precision what was trained in half precision.
        for w in fsq.weights(save / "checkpoint_last.pt").values():
            assert torch.equal(w, w.to(dtype).to(w.dtype)), flags
    assert len(losses) >= 3 and max(losses) - min(losses) < 0.05, losses
    assert "CUDA" in stock["fp16"] or "NVIDIA" in stock["fp16"]
    assert "xla_device" in stock["bf16"]


def test_tpu_flag_is_kept(work: Path, patched: None) -> None:
    from fairseq import options

    parser = options.get_training_parser()
    argv = [str(work / "bin"), "--arch", "transformer", "--bf16", "--tpu"]
    assert options.parse_args_and_arch(parser, argv).tpu


# ---------------------------------------------------------------------------------- warnings


def test_no_warning_noise(work: Path) -> None:
    """A training run and a generation with the plugin write nothing to stderr."""
    script = """
        import sys
        from helpers import fsq
        plugin = ["--user-dir", fsq.USER_DIR]
        quick = [*fsq.QUICK, "--no-save", "--max-update", "2", *plugin]
        train = ["bin", *quick]
        fsq.main("train", [*train, "--arch", "transformer", *fsq.SMALL])
        fsq.main("train", [*train, "--arch", "fconv", "--encoder-layers", "[(16, 3)]",
                           "--decoder-layers", "[(16, 3)]"])
        fsq.main("train", [*train, "--arch", "lstm"])
        fsq.main("train", ["lm", *quick, "--task", "masked_lm", "--criterion", "masked_lm",
                           "--arch", "roberta_base", "--encoder-layers", "1", "--encoder-embed-dim",
                           "16", "--encoder-ffn-embed-dim", "16", "--encoder-attention-heads", "2",
                           "--tokens-per-sample", "30"])
        fsq.main("generate", ["bin", "--path", "ck/checkpoint_last.pt", "--cpu", *plugin])
    """
    script = textwrap.dedent(script)
    done = fsq.run([sys.executable, "-c", script], cwd=work, env=fsq.WITH_HELPERS)
    seen = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert not seen, "\n".join(seen)


def test_warnings_of_others_still_show(patched: None) -> None:
    import warnings

    with pytest.warns(UserWarning, match="no longer experimental"):
        compat.apply()
        warnings.warn("hydra.experimental.compose() is no longer experimental", stacklevel=1)


# ---------------------------------------------------------------------------------- user-dir

USER_DIR_TWICE = """
import sys
from argparse import Namespace
if sys.argv[1] == "patched":
    import fairseq_dpq
else:  # stock fairseq, with a module of that name imported from elsewhere
    import types
    sys.modules["fairseq_dpq"] = types.ModuleType("fairseq_dpq")
    sys.modules["fairseq_dpq"].__path__ = ["elsewhere"]
from fairseq.utils import import_user_module
import_user_module(Namespace(user_dir="linked/fairseq_dpq"))
print("done")
"""


def test_user_dir_may_be_imported_before(work: Path) -> None:
    """Also by another path to the same folder; a different folder of that name is an error."""
    (work / "linked").mkdir()
    (work / "linked" / "fairseq_dpq").symlink_to(fsq.USER_DIR)
    command = [sys.executable, "-c", USER_DIR_TWICE]
    assert fsq.run([*command, "patched"], cwd=work).stdout == "done\n"
    assert "not globally unique" in fsq.run([*command, "stock"], cwd=work, ok=False).stderr
    (work / "linked" / "fairseq_dpq").unlink()
    (work / "linked" / "fairseq_dpq").mkdir()
    assert "not globally unique" in fsq.run([*command, "patched"], cwd=work, ok=False).stderr


BY_NAME = """
import sys
from argparse import Namespace
import fairseq_dpq
from fairseq.utils import import_user_module
sys.path.insert(0, "elsewhere")
import_user_module(Namespace(user_dir=sys.argv[1]))
print("late_arch_for_user_dir" in sys.modules)
"""


def test_user_dir_may_be_the_name_of_any_package(work: Path) -> None:
    """fairseq looks for folders here and beside itself; with the plugin, also where Python does."""
    (work / "elsewhere" / "late_arch_for_user_dir").mkdir(parents=True)
    (work / "elsewhere" / "late_arch_for_user_dir" / "__init__.py").touch()
    command = [sys.executable, "-c", BY_NAME]
    assert fsq.run([*command, "late_arch_for_user_dir"], cwd=work).stdout == "True\n"
    done = fsq.run([*command, "fairseq_dqp"], cwd=work, ok=False)
    assert done.stderr.splitlines()[-1] == (
        "fairseq_dpq: error: --user-dir fairseq_dqp: there is no such folder here or beside "
        "fairseq, and no Python package of that name; the plugin is fairseq_dpq, in "
        f"{os.path.realpath(fsq.USER_DIR)}"
    )
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------- apply


def test_apply_is_idempotent_and_light(work: Path) -> None:
    """Nothing new is imported but fairseq's own compiled part, and the second call does nothing."""
    script = """
        import json, sys, types
        import fairseq_cli.train
        # The package without its __init__, which would apply the patches itself.
        package = sys.modules["fairseq_dpq"] = types.ModuleType("fairseq_dpq")
        package.__path__ = [USER_DIR]
        import fairseq_dpq.marker
        from fairseq_dpq.fairseq_plugin import compat
        before = set(sys.modules)
        first = compat.apply()
        new = sorted(set(sys.modules) - before)
        print(json.dumps([first, compat.apply(), new]))
    """
    script = textwrap.dedent(script).replace("USER_DIR", repr(fsq.USER_DIR))
    done = fsq.run([sys.executable, "-c", script], cwd=work)
    first, second, new = json.loads(done.stdout.splitlines()[-1])
    assert {"abort_at_exit", "cpu_workers", "ddp_on_cpu"} <= set(first)
    assert ("checkpoint_loading" in first) == fsq.torch_at_least(2, 4)
    assert ("numpy_names" in first) == (tuple(map(int, np.__version__.split(".")[:2])) >= (1, 24))
    assert second == []
    assert [m for m in new if m != "fairseq.data.data_utils_fast" and "cython" not in m] == []


def test_every_patch_says_why() -> None:
    for patch in compat.PATCHES:
        assert len((patch.__doc__ or "").split()) > 25, patch.__name__
        assert "ithout it" in patch.__doc__, patch.__name__
