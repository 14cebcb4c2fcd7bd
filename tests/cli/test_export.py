"""fairseq-dpq-export and CompactEmbedding.from_file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from fairseq_dpq import CompactEmbedding
from fairseq_dpq.cli import compact, export
from fairseq_dpq.files.errors import CheckpointError
from fairseq_dpq.files.reader import read_symbols
from fairseq_dpq.files.writer import write_form
from helpers.toy_checkpoints import load, make_layer, save_toy


def _dictionary(path, words: int) -> None:
    path.write_text(
        "".join(f"w{i}\u2028x {i}\n" if i == 3 else f"w{i} {i}\n" for i in range(words))
    )


@pytest.mark.parametrize(
    "options", [{}, {"method": "vq", "share_subspaces": True, "K": 5}, {"K": 300, "n": 400}]
)
def test_rows_and_symbols(tmp_path, options) -> None:
    layer = make_layer(**options)
    n = layer.num_embeddings
    _dictionary(tmp_path / "dict.txt", n - 4)
    source, target = save_toy(tmp_path / "in.pt", layer), tmp_path / "out.safetensors"
    flags = ["--dict", str(tmp_path / "dict.txt")]
    assert export.main([str(source), str(target), *flags, "--debug"]) == 0
    module = CompactEmbedding.from_file(target)
    with torch.no_grad():
        expected = layer(torch.arange(n))
    assert torch.equal(module.dense(), expected)
    assert (module.num_embeddings, module.embedding_dim, module.padding_idx) == (n, 12, 1)
    symbols = read_symbols(target)
    assert symbols[:5] == ["<s>", "<pad>", "</s>", "<unk>", "w0"] and len(symbols) == n
    assert symbols[7] == "w3\u2028x"

    from safetensors import safe_open  # others can read it too

    with safe_open(str(target), "pt") as file:
        assert file.metadata()["format"] == "fairseq-dpq"
        assert torch.equal(file.get_tensor("codes"), module.codes)
    again = CompactEmbedding.from_codes(
        module.unpacked_codes(), module.values[: module.value_rows], 12, 1, sizes=module.sizes
    )
    assert torch.equal(again.dense(), expected)


def test_of_a_compact_checkpoint_with_uneven_groups(tmp_path) -> None:
    layer = make_layer(n=9, K=16)  # 8 symbols cannot use 16 codes
    source, small, target = (tmp_path / x for x in ("in.pt", "out.pt", "out.safetensors"))
    save_toy(source, layer)
    assert compact.main([str(source), str(small), "--lossless-shrink"]) == 0
    assert export.main([str(small), str(target), "--no-symbols"]) == 0
    module = CompactEmbedding.from_file(target)
    assert max(module.sizes) < 16 and read_symbols(target) is None
    with torch.no_grad():
        assert torch.equal(module.dense(), layer(torch.arange(9)))
    assert export.main([str(small), str(target), "--no-symbols", "--values-dtype", "float16"]) == 2
    flags = ["--no-symbols", "--values-dtype", "float16", "--force"]
    assert export.main([str(small), str(target), *flags]) == 0
    with torch.no_grad():
        assert torch.equal(
            CompactEmbedding.from_file(target).dense(), layer(torch.arange(9)).half()
        )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_table_opens_without_a_copy(tmp_path) -> None:
    """40 MB of codes are read once, for their checksum, and stay in the file."""
    n, D, path = 5_000_000, 16, tmp_path / "big.safetensors"
    form = CompactEmbedding(n, 32, 1, K=16, D=D, packed=True)
    form.values[:-1] = torch.arange(16.0 * D * 2).view(16 * D, 2)
    form.codes[-1] = 0x21  # the last row: codes 1, 2, 1, 2, ...
    write_form(path, form, "table")
    code = (
        "import re, sys, time, torch\n"
        "from fairseq_dpq import CompactEmbedding\n"
        "import safetensors\n"
        "own = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before, start = own(), time.process_time()\n"
        "e = CompactEmbedding.from_file(sys.argv[1])\n"
        "rows = e(torch.tensor([0, 1, 4_999_999]))\n"
        "print(time.process_time() - start, own() - before, rows[:, :4].flatten().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, kilobytes, rest = done.stdout.split(" ", 2)
    assert float(seconds) < 0.5 and int(kilobytes) < 10_000
    # row 0: codes 0 of groups 0 and 1; row 1: padding; last: code 1 of group 0, 2 of group 1
    assert json.loads(rest) == [0, 1, 32, 33, 0, 0, 0, 0, 2, 3, 36, 37]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff\xfe 1\n", "not a fairseq dictionary"), (None, "cannot read it: Is a directory")],
)
def test_a_dictionary_that_cannot_be_read(tmp_path, capsys, content, why) -> None:
    source, words = save_toy(tmp_path / "in.pt"), tmp_path / "dict"
    words.mkdir() if content is None else words.write_bytes(content)
    assert export.main([str(source), str(tmp_path / "out"), "--dict", str(words)]) == 2
    said = capsys.readouterr().err
    assert f"--dict {words}: {why}" in said and said.count("\n") == 1


def test_the_dictionary_of_the_checkpoints_data(tmp_path, capsys) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.safetensors"
    assert export.main([str(source), str(target)]) == 2
    assert "add --dict FILE, or --no-symbols" in capsys.readouterr().err
    state = load(source)
    state["cfg"]["task"] = {"data": str(tmp_path), "source_lang": "en", "target_lang": "de"}
    torch.save(state, source)
    _dictionary(tmp_path / "dict.en.txt", 50)
    assert export.main([str(source), str(target)]) == 2
    assert "has 54 symbols, encoder.embed_tokens has 60 rows" in capsys.readouterr().err
    _dictionary(tmp_path / "dict.en.txt", 56)
    assert export.main([str(source), str(target)]) == 0
    assert len(read_symbols(target)) == 60
    assert export.main([str(source), str(target), "--force", "--table", "x.y"]) == 2
    wanted = "--table x.y: "
    assert wanted in capsys.readouterr().err


def test_files_that_are_no_exports(tmp_path) -> None:
    source, target = save_toy(tmp_path / "in.pt"), tmp_path / "out.safetensors"
    assert export.main([str(source), str(target), "--no-symbols"]) == 0
    whole = target.read_bytes()
    part = tmp_path / "part.safetensors"
    for length in (0, 7, 50, len(whole) - 1):
        part.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"not a safetensors file|truncated"):
            CompactEmbedding.from_file(part)
    part.write_bytes(whole.replace(b'"version":"3"', b'"version":"7"'))
    with pytest.raises(CheckpointError, match="this fairseq-dpq reads version 3: update"):
        CompactEmbedding.from_file(part)
    with pytest.raises(CheckpointError):
        CompactEmbedding.from_file(source)


def test_languages_that_fairseq_inferred_are_found(tmp_path) -> None:
    """`fairseq-train DATA` without -s and -t leaves no language in the checkpoint."""
    from fairseq_dpq.files.data import _guess_languages

    assert _guess_languages([tmp_path / "nowhere", tmp_path]) == [None, None]
    (tmp_path / "train.de-en.de.idx").touch()
    (tmp_path / "train.de-en.en.idx").touch()
    assert _guess_languages([tmp_path / "nowhere", tmp_path]) == ["de", "en"]
