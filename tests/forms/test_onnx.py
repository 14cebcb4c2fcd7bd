"""ONNX export of CompactEmbedding: standard operators alone, the same bits in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fairseq_dpq import CodesLinear, CompactEmbedding

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("K,shared,pad", [(12, False, 1), (300, True, 1), (2000, False, None)])
def test_export(K: int, shared: bool, pad: int | None, packed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, values = torch.randint(K, (50, 5)), torch.randn(1 if shared else 5, K, 6)
    form = CompactEmbedding.from_codes(codes, values, 30, pad, packed=packed).eval()
    path = str(tmp_path / "table.onnx")
    torch.onnx.export(
        form,
        (torch.randint(50, (4, 5)),),
        path,
        input_names=["ids"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
    )
    assert {node.domain for node in onnx.load(path).graph.node} == {""}
    session = onnxruntime.InferenceSession(path)
    ids = torch.arange(50).view(10, 5)  # another batch than at export
    (found,) = session.run(None, {"ids": ids.numpy()})
    assert torch.equal(torch.from_numpy(found), form(ids))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_logits_are_a_product_with_the_table_that_is_rebuilt(packed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    n, d = 20_000, 64
    codes, values = torch.randint(32, (n, 16)), torch.randn(16, 32, 4)
    output = CodesLinear(CompactEmbedding.from_codes(codes, values, d, 1, packed=packed)).eval()
    path = tmp_path / "output.onnx"
    torch.onnx.export(
        output,
        (torch.randn(3, d),),
        str(path),
        input_names=["h"],
        dynamic_shapes=({0: "rows"},),
        dynamo=True,
        verbose=False,
    )
    operators = [node.op_type for node in onnx.load(str(path)).graph.node]
    assert operators.count("MatMul") + operators.count("Gemm") == 1 and "Loop" not in operators
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4 * n * d / 5
    h = torch.randn(7, d)
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"h": h.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), output(h), rtol=1e-4, atol=1e-4)
    assert (found[:, 1] == 0).all()
