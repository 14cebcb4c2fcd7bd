"""torch.compile, torch.export and ONNX of a whole compressed model, its tied output included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fairseq_dpq import compress
from helpers.any_model import SIZE, Toy, some_ids, toy

if not hasattr(torch, "export") or not hasattr(torch, "compile"):
    pytest.skip("needs torch 2.1 or later", allow_module_level=True)


@pytest.fixture
def model() -> Toy:
    """Without the bag, which ONNX turns into a loop."""
    model = toy()
    model.bag = nn.Embedding(700, SIZE)  # type: ignore[assignment]
    compress(model, K=8, which=["token", "first", "bag"])
    return model.eval()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@torch.no_grad()
def test_compile(model: Toy, backend: str) -> None:
    right = model(some_ids())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.allclose(compiled(some_ids()), right, atol=1e-4)


@torch.no_grad()
def test_export(model: Toy) -> None:
    ids = some_ids()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (ids,), dynamic_shapes=({0: batch},))
    assert torch.allclose(program.module()(ids[:2]), model(ids[:2]), atol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_onnx(model: Toy, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path, ids = str(tmp_path / "model.onnx"), some_ids()
    torch.onnx.export(
        model,
        (ids,),
        path,
        input_names=["ids"],
        dynamic_shapes=({0: "batch"},),
        dynamo=True,
        verbose=False,
    )
    graph = onnx.load(path).graph
    assert {node.domain for node in graph.node} == {""}
    assert "Loop" not in {node.op_type for node in graph.node}
    session = onnxruntime.InferenceSession(path)
    (found,) = session.run(None, {"ids": ids[:2].numpy()})
    assert torch.allclose(torch.from_numpy(found), model(ids[:2]), atol=1e-4)
