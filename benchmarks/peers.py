"""Other compressed tables beside ours, one table, the same ids, one thread: lookup of 4,096 ids,
logits of 1 and of 64 rows, bytes of the table, and the rows' error. A peer that is not installed is
named as such.

    python benchmarks/peers.py [--rounds N] [--only NAME ...]

For all of them, in a folder of its own, so that no package changes torch:

    pip install --no-deps --target /tmp/peers faiss-cpu bitsandbytes torchao onnxruntime onnx \\
        onnxscript onnx_ir ml_dtypes flatbuffers
    PYTHONPATH=/tmp/peers python benchmarks/peers.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import statistics
import tempfile
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Iterator

import harness

N, DIM, K, IDS = 32_000, 512, 32, 4096
BATCHES = (1, 64)
BLOCK = 32  # numbers that share a scale in the 4-bit forms that have blocks


@dataclass
class Peer:
    """A table: how rows are looked up, how logits are computed, and its bytes in memory."""

    name: str
    size: int
    lookup: Callable[[Any], Any] | None = None
    logits: Callable[[Any], Any] | None = None
    exact: bool = False  # random codes stand for no table: its rows have no error


def ours(table: Any) -> Iterator[Peer]:
    import torch

    from fairseq_dpq import CodesLinear, CompactEmbedding

    for D in (DIM // 4, DIM // 2):
        codes, values = torch.randint(K, (N, D), dtype=torch.uint8), torch.randn(D, K, DIM // D)
        for packed in (False, True):
            form = CompactEmbedding.from_codes(codes, values, DIM, packed=packed)
            size = form.codes.nbytes + form.values.nbytes
            name = f"ours, K = {K}, D = {D}{', packed' if packed else ''}"
            yield Peer(name, size, form, CodesLinear(form), exact=True)


def dense(table: Any) -> Iterator[Peer]:
    import torch

    full = torch.nn.Embedding.from_pretrained(table)
    yield Peer("nn.Embedding", table.nbytes, full, lambda h: torch.nn.functional.linear(h, table))


def torch_ao(table: Any) -> Iterator[Peer]:
    import torch

    bag = torch.ops.quantized
    offsets = torch.arange(IDS)
    layer = torch.nn.Linear(DIM, N, bias=False)
    layer.weight = torch.nn.Parameter(table)
    product = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(layer))
    for bits, pack, look in (
        (8, bag.embedding_bag_byte_prepack, bag.embedding_bag_byte_rowwise_offsets),
        (4, bag.embedding_bag_4bit_prepack, bag.embedding_bag_4bit_rowwise_offsets),
    ):
        packed = pack(table)
        yield Peer(
            f"torch int{bits} embedding",
            packed.nbytes,
            lambda ids, look=look, packed=packed: look(
                packed, ids, offsets[: ids.numel()], False, 0, False, None, None, False
            ),
        )
    yield Peer("torch int8 dynamic linear", table.numel() + 8 * N, None, product)


def torchao(table: Any) -> Iterator[Peer]:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    def layer(kind: type, *sizes: Any) -> Any:
        made = torch.nn.Sequential(kind(*sizes))
        made[0].weight = torch.nn.Parameter(table.clone(), requires_grad=False)
        return made

    for kind, granularity, scales in (
        (torch.int8, PerAxis(0), N),
        (torch.int4, PerGroup(BLOCK), table.numel() // BLOCK),
    ):
        found = layer(torch.nn.Embedding, N, DIM)
        config = IntxWeightOnlyConfig(weight_dtype=kind, granularity=granularity)
        quantize_(found, config, filter_fn=lambda m, _: isinstance(m, torch.nn.Embedding))
        # Its int4 weights take a byte each in this form.
        yield Peer(f"torchao {kind} embedding", table.numel() + 4 * scales, found)
    linear = layer(torch.nn.Linear, DIM, N, False)
    quantize_(linear, Int8WeightOnlyConfig())
    yield Peer("torchao int8 weight-only linear", table.numel() + 4 * N, None, linear)


def bitsandbytes(table: Any) -> Iterator[Peer]:
    import torch
    from bitsandbytes import nn

    def loaded(layer: Any) -> Any:
        layer.load_state_dict({"weight": table}, strict=False)
        return layer.to("cpu")  # this is when it quantises

    wide = loaded(nn.Linear8bitLt(DIM, N, bias=False, has_fp16_weights=False))
    yield Peer("bitsandbytes 8 bit", table.numel() + 4 * N, loaded(nn.Embedding8bit(N, DIM)), wide)
    four = loaded(nn.Linear4bit(DIM, N, False, torch.float32, quant_type="nf4"))
    size = table.numel() // 2 + 4 * table.numel() // 64
    yield Peer("bitsandbytes NF4", size, loaded(nn.EmbeddingNF4(N, DIM)), four)


def faiss(table: Any) -> Iterator[Peer]:
    """Rows by `reconstruct_batch`. It computes no logits of all rows, only the best few."""
    import faiss as library
    import torch

    library.omp_set_num_threads(1)
    scalar = library.IndexScalarQuantizer(DIM, library.ScalarQuantizer.QT_8bit)
    scalar.train(table[:4096].numpy())
    scalar.add(table.numpy())
    size = N * scalar.sa_code_size()
    yield Peer("faiss 8 bit", size, lambda ids: scalar.reconstruct_batch(ids.numpy()))
    D = DIM // 4
    product = library.IndexPQ(DIM, D, 5)
    library.copy_array_to_vector(torch.randn(D * K * 4).numpy(), product.pq.centroids)
    product.is_trained = True
    product.add(table.numpy())
    size = N * product.sa_code_size() + 4 * K * DIM
    name = f"faiss PQ, K = {K}, D = {D}"
    yield Peer(name, size, lambda ids: product.reconstruct_batch(ids.numpy()), exact=True)


class Graph:
    """An ONNX graph in onnxruntime, with one thread."""

    def __init__(self, file: bytes | str) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(file, options)
        self._input = self._session.get_inputs()[0].name

    def __call__(self, given: Any) -> Any:
        return self._session.run(None, {self._input: given.numpy()})[0]


def one_node(operator: str, given: str, constants: dict[str, Any], **attributes: Any) -> Graph:
    """A graph of one operator, whose first input or else whose second one is `given`."""
    from onnx import TensorProto, helper, numpy_helper

    names = [*constants]
    inputs = [given, *names] if operator.startswith("MatMul") else [names[0], given, *names[1:]]
    domain = "" if operator in ("Gather", "MatMul") else "com.microsoft"
    node = helper.make_node(operator, inputs, ["out"], domain=domain, **attributes)
    kind, shape = (
        (TensorProto.INT64, ["ids"]) if given == "ids" else (TensorProto.FLOAT, ["rows", DIM])
    )
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(given, kind, shape)],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    return Graph(model.SerializeToString())


def in_blocks(table: Any, bits: int) -> tuple[Any, Any]:
    """Unsigned numbers (N, bytes) and scales (N, blocks) of BLOCK numbers each."""
    import torch

    middle = 1 << (bits - 1)
    parts = table.view(N, -1, BLOCK)
    scale = parts.abs().amax(-1) / (middle - 1)
    whole = (parts / scale.unsqueeze(-1)).round().add(middle).to(torch.uint8).view(N, DIM)
    if bits == 4:
        whole = whole[:, ::2] | (whole[:, 1::2] << 4)
    return whole.numpy(), scale.numpy()


def onnxruntime(table: Any) -> Iterator[Peer]:
    importlib.import_module("onnxruntime")
    turned = table.t().contiguous().numpy()
    gather = one_node("Gather", "ids", {"table": table.numpy()})
    yield Peer(
        "onnxruntime Gather, MatMul", table.nbytes, gather, one_node("MatMul", "h", {"w": turned})
    )
    for bits in (8, 4):
        data, scale = in_blocks(table, bits)
        shape: dict[str, Any] = {"block_size": BLOCK, "bits": bits}
        gather = one_node(
            "GatherBlockQuantized",
            "ids",
            {"data": data, "scales": scale},
            gather_axis=0,
            quantize_axis=1,
            **shape,
        )
        blobs = {"B": data.reshape(N, DIM // BLOCK, -1), "scales": scale}
        product = one_node("MatMulNBits", "h", blobs, K=DIM, N=N, **shape)
        size = data.nbytes + scale.nbytes
        yield Peer(f"onnxruntime GatherBlockQuantized, {bits} bit", size, gather, product)


def ours_in_onnx(table: Any) -> Iterator[Peer]:
    """The graphs that torch.onnx.export writes of our modules."""
    import torch

    from fairseq_dpq import CodesLinear, CompactEmbedding

    for name in ("onnxruntime", "onnxscript"):
        importlib.import_module(name)
    for D in (DIM // 4, DIM // 2):
        codes, values = torch.randint(K, (N, D), dtype=torch.uint8), torch.randn(D, K, DIM // D)
        form = CompactEmbedding.from_codes(codes, values, DIM)
        modules = [(form, torch.zeros(IDS, dtype=torch.int64))]
        modules.append((CodesLinear(form), torch.zeros(BATCHES[-1], DIM)))
        graphs = []
        for module, example in modules:
            with tempfile.TemporaryDirectory() as folder, quiet():
                path = str(Path(folder) / "graph.onnx")
                sizes = ({0: "rows"},)
                torch.onnx.export(
                    module.eval(),
                    (example,),
                    path,
                    dynamic_shapes=sizes,
                    dynamo=True,
                    verbose=False,
                )
                graphs.append(Graph(path))
        # The bytes of the file: onnxruntime holds the table of a tied output layer in full.
        yield Peer(f"ours in onnxruntime, D = {D}", form.codes.nbytes + form.values.nbytes, *graphs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


SOURCES: dict[str, Callable[[Any], Iterator[Peer]]] = {
    "nn.Embedding": dense,
    "ours": ours,
    "torch": torch_ao,
    "torchao": torchao,
    "bitsandbytes": bitsandbytes,
    "faiss": faiss,
    "onnxruntime": onnxruntime,
    "ours in onnxruntime": ours_in_onnx,
}


def collect(table: Any, names: list[str]) -> tuple[list[Peer], list[str]]:
    """The peers that are here, and a line about each that is not."""
    found, missing = [], []
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += list(SOURCES[name](table))
        except ImportError as error:
            missing.append(f"{name}: not installed ({error.name})")
        except Exception as error:  # a peer's own troubles end its row, not the others'
            missing.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return found, missing


def milliseconds(sides: dict[str, Callable[[Any], Any]], given: list[Any], rounds: int) -> Any:
    """CPU milliseconds of each side, taking turns."""
    calls = {name: lambda i, side=side: side(given[i % len(given)]) for name, side in sides.items()}
    times = harness.interleaved(calls, rounds, 2)
    return {name: statistics.median(taken) * 1e3 for name, taken in times.items()}


def error_of(peer: Peer, table: Any, ids: Any) -> float | None:
    """The relative error of the rows; None where codes are random."""
    import torch

    if peer.lookup is None or peer.exact or peer.name.startswith("ours"):
        return None
    rows = torch.as_tensor(peer.lookup(ids)).float().view(-1, DIM)
    return float((rows - table[ids]).norm() / table[ids].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", nargs="*", default=list(SOURCES), choices=list(SOURCES))
    args = parser.parse_args()
    harness.steady()
    logging.disable(logging.WARNING)

    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    table = torch.randn(N, DIM)
    ids = [torch.randint(N, (IDS,)) for _ in range(8)]
    peers, missing = collect(table, args.only)
    lookups = {p.name: p.lookup for p in peers if p.lookup is not None}
    products = {p.name: p.logits for p in peers if p.logits is not None}
    found = {"lookup": milliseconds(lookups, ids, args.rounds)}
    for batch in BATCHES:
        h = [torch.randn(batch, DIM) for _ in range(4)]
        found[f"logits {batch}"] = milliseconds(products, h, max(5, args.rounds // 6))
    rows, cells = [], []
    for peer in peers:
        row: dict[str, Any] = {"peer": peer.name, "bytes": peer.size}
        row["error"] = error_of(peer, table, ids[0])
        row.update({part: times.get(peer.name) for part, times in found.items()})
        rows.append(row)
        shown = [f"{row[part]:.2f}" if row[part] is not None else "-" for part in found]
        error = "-" if row["error"] is None else f"{row['error']:.4f}"
        cells.append([peer.name, *shown, f"{peer.size / 1e6:.1f}", error])
    header = ["", "lookup ms", *[f"logits {b} ms" for b in BATCHES], "MB", "error"]
    harness.show(f"n = {N:,}, d = {DIM}, {IDS:,} ids, one thread", header, cells)
    names = ("torch", "torchao", "bitsandbytes", "faiss-cpu", "onnxruntime")
    with contextlib.suppress(ImportError):
        for name in names:
            missing.append(f"{name} {version(name)}")
    print("\n".join(missing))
    harness.write("peers", rows)
    os._exit(0)  # some of these libraries crash as they are unloaded


if __name__ == "__main__":
    main()
