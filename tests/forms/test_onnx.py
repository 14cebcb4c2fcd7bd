"""ONNX export of CompactEmbedding: standard operators alone, the same bits in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fairseq_dpq import CompactEmbedding

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
