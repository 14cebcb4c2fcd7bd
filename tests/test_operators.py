"""Lookup and logits as operators of torch: one node of a graph, the bits of eager mode."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from fairseq_dpq import CodesLinear, CompactEmbedding, native
from helpers.native_cases import by_pytorch, no_library, random_form

pytestmark = pytest.mark.skipif(
    not hasattr(getattr(torch, "compiler", None), "is_exporting"),
    reason="this torch does not tell export from compile",
)
needs_library = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def layout(form: CompactEmbedding) -> list[Any]:
    pad = -1 if form.padding_idx is None else form.padding_idx
    return [form.D, form.sizes, form.share_subspaces, form.packed, pad]


def nodes(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


class Recorder:
    """A backend of torch.compile that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.nodes += nodes(module.graph)
        return module.forward


def compiled(module: torch.nn.Module) -> tuple[Any, list[str]]:
    torch._dynamo.reset()
    recorder = Recorder()
    return torch.compile(module, fullgraph=True, backend=recorder, dynamic=True), recorder.nodes


@pytest.mark.parametrize("library", [contextlib.nullcontext, no_library])
def test_operators_have_the_bits_of_the_modules(library: Any) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        form = random_form(rng)
        ids = torch.randint(
            form.num_embeddings, (3, 2), dtype=rng.choice([torch.int32, torch.int64])
        )
        h = torch.randn(2, 3, form.embedding_dim)
        with library():
            found = torch.ops.fairseq_dpq.lookup(form.codes, form.values, ids, *layout(form))
            scores = torch.ops.fairseq_dpq.logits(form.codes, form.values, h, *layout(form))
            form._fast = None
            assert torch.equal(scores, CodesLinear(form)(h))
        assert found.dtype == form.values.dtype and torch.equal(found, by_pytorch(form, ids)), form


@pytest.mark.parametrize("packed", [False, True])
def test_torch_finds_no_fault_with_the_operators(packed: bool) -> None:
    """opcheck: the schema, the fake implementation and the graph agree with what is computed."""
    form = random_form(random.Random(1), packed=packed, D=8, K=32)
    n, d = form.num_embeddings, form.embedding_dim
    for name, given in (("lookup", torch.randint(n, (3, 2))), ("logits", torch.randn(2, d))):
        operator = getattr(torch.ops.fairseq_dpq, name).default
        torch.library.opcheck(operator, (form.codes, form.values, given, *layout(form)))


@needs_library
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_module_calls_the_operator(packed: bool) -> None:
    torch.manual_seed(0)
    codes, values = torch.randint(12, (50, 8)), torch.randn(8, 12, 4)
    form = CompactEmbedding.from_codes(codes, values, 32, 1, packed=packed)
    output = CodesLinear(form)
    lookup, called = compiled(form)
    for shape in ((3,), (2, 5), (0,)):
        ids = torch.randint(50, shape)
        assert torch.equal(lookup(ids), form(ids))
    assert set(called) == {"fairseq_dpq.lookup"}
    with pytest.raises(IndexError):
        lookup(torch.tensor([2, 50]))
    logits, called = compiled(output)
    with torch.no_grad():
        for rows in (2, 5):
            h = torch.randn(rows, 32)
            assert torch.equal(logits(h), output(h))
    assert "fairseq_dpq.logits" in called


def test_graphs_have_standard_operators_where_the_library_would_not_serve() -> None:
    form = CompactEmbedding.from_codes(torch.randint(12, (50, 8)), torch.randn(8, 12, 4), 32, 1)
    ids, h = torch.tensor([4, 7]), torch.randn(2, 32, requires_grad=True)
    with no_library():
        lookup, called = compiled(form)
        assert torch.equal(lookup(ids), form(ids)) and not any("fairseq" in c for c in called)
    logits, called = compiled(CodesLinear(form))  # h wants a gradient
    logits(h).sum().backward()
    assert torch.allclose(h.grad, form.dense().sum(0).expand(2, 32), atol=1e-4)
    assert not any("fairseq" in c for c in called)
    form.values.requires_grad_()
    lookup, called = compiled(form)
    lookup(ids).sum().backward()
    assert form.values.grad is not None and form.values.grad.sum() == 2 * 32
    assert not any("fairseq" in c for c in called)


def test_torch_s_compiler_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, fairseq_dpq; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@needs_library
def test_an_exported_program_is_saved_and_loaded() -> None:
    torch.manual_seed(0)
    form = CompactEmbedding.from_codes(torch.randint(12, (50, 8)), torch.randn(8, 12, 4), 32, 1)
    model = torch.nn.Sequential(form, CodesLinear(form))
    batch = torch.export.Dim("batch", min=2, max=100)
    shapes = ({0: batch},)
    program = torch.export.export(model, (torch.randint(50, (4, 5)),), dynamic_shapes=shapes)
    names = nodes(program.graph)
    assert names == ["fairseq_dpq.lookup.default", "fairseq_dpq.logits.default"]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    ids = torch.randint(50, (9, 5))
    assert torch.equal(loaded(ids), model(ids))
    with no_library():  # as on a machine without it
        assert torch.allclose(loaded(ids), model(ids), atol=1e-5)
