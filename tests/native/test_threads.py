"""The library's pool of threads: the same bits, several callers at once, fork, thread numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Callable

import pytest
import torch
from torch import Tensor

from fairseq_dpq import CompactEmbedding, native
from fairseq_dpq.files.memory import memory_of
from helpers.native_cases import table_of

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
needs_tasks = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads")


def calls() -> dict[str, Callable[[], list[Tensor]]]:
    """One call of each kind that is large enough for several threads."""
    torch.manual_seed(0)
    codes = torch.randint(32, (20_000, 64))
    form = CompactEmbedding.from_codes(codes, torch.randn(64, 32, 8), 512, 3)
    table, h, indices = table_of(form), torch.randn(17, 512), torch.randint(20_000, (4096,))
    query, keys = torch.randn(5000, 16, 4), torch.randn(16, 32, 4)
    draws, offset, grad = torch.rand(16, 64), torch.randn(16, 32), torch.randn(5000, 16, 4)
    own = torch.randint(32, (5000, 16))
    packed = native.pack(form.codes, form.bits, 40)
    return {
        "lookup": lambda: [table.lookup(indices)],
        "logits": lambda: [table.logits(h)],
        "codes": lambda: [native.codes(query, keys, "euclidean")],
        "gradients": lambda: list(native.softmax_gradients(query, keys, offset, keys, own, grad)),
        "nearest": lambda: list(native.nearest(query, keys)),
        "sums": lambda: list(native.centroid_sums(query, own, 32)),
        "first": lambda: [native.first_centroids(query, draws)],
        "pack": lambda: [native.pack(form.codes, form.bits, 40)],
        "unpack": lambda: [native.unpack(packed, form.bits, torch.uint8)],
    }


def test_the_number_of_threads_changes_no_bit(two_threads: None) -> None:
    all_calls = calls()
    torch.set_num_threads(1)
    expected = {name: call() for name, call in all_calls.items()}
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        for name, call in all_calls.items():
            assert all(map(torch.equal, call(), expected[name])), (name, threads)


def test_eight_threads_at_once(two_threads: None) -> None:
    all_calls = calls()
    expected = {name: call() for name, call in all_calls.items()}
    wrong: list[str] = []

    def use(number: int) -> None:
        torch.set_num_threads(2)  # a thread of Python has a number of its own
        for name in [*all_calls][number:] + [*all_calls][:number]:
            for _ in range(3):
                if not all(map(torch.equal, all_calls[name](), expected[name])):
                    wrong.append(name)

    users = [threading.Thread(target=use, args=(i,)) for i in range(8)]
    for user in users:
        user.start()
    for user in users:
        user.join(120)
    assert not any(user.is_alive() for user in users) and not wrong


def rows_as_bytes(lookup: Callable[[], list[Tensor]]) -> bytes:
    rows = lookup()[0]
    return bytes(memory_of(rows))


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


@needs_tasks
def test_a_forked_child_starts_threads_of_its_own(two_threads: None) -> None:
    """Also a child of the child. torch's own operators would wait for threads that are not there,
    so bytes are compared."""
    lookup = calls()["lookup"]
    want = rows_as_bytes(lookup)

    def right() -> bool:
        return all(rows_as_bytes(lookup) == want for _ in range(5))

    child = os.fork()
    if child == 0:
        alone = tasks() == 1
        good = right() and alone and tasks() == 2
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(0 if right() and tasks() == 2 else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        os._exit(code if good and right() else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert right()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_while_other_threads_are_in_a_call(two_threads: None) -> None:
    lookup = calls()["lookup"]
    want = rows_as_bytes(lookup)
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            lookup()

    users = [threading.Thread(target=use) for _ in range(2)]
    for user in users:
        user.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                os._exit(0 if rows_as_bytes(lookup) == want else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for user in users:
            user.join()


COUNT = """
import os, sys, time, torch
from fairseq_dpq import CompactEmbedding
tasks = lambda: len(os.listdir("/proc/self/task"))
form = CompactEmbedding.from_codes(torch.randint(32, (9000, 64)), torch.randn(64, 32, 8), 512)
indices, found = torch.randint(9000, (8192,)), []
before = tasks()
for threads in (1, 2, 4, 2):
    torch.set_num_threads(threads)
    form(indices)
    found.append(tasks() - before)
torch.set_num_threads(4)
form(indices[:1])
time.sleep(0.2)
idle = time.process_time()
time.sleep(0.5)
print(found, time.process_time() - idle < 0.1)
"""


@needs_tasks
def test_the_number_of_threads_is_torchs_and_they_sleep() -> None:
    command = [sys.executable, "-c", COUNT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    own = [0, 2, 6, 4] if torch.__version__ < "2" else [0, 1, 3, 3]  # torch 1 has OpenMP's too
    assert done.stdout.strip() == f"{own} True"


def test_an_error_in_any_thread_is_the_first_one(two_threads: None) -> None:
    """Damaged rows in each share: the first of the ids that has one is named, each time."""
    codes = torch.randint(30, (9000, 64), dtype=torch.uint8)
    form = CompactEmbedding.from_codes(codes, torch.randn(64, 30, 8), 512)
    form.codes[100:] = 255
    indices = torch.arange(9000)
    indices[:5] = 0
    for _ in range(20):
        with pytest.raises(IndexError, match="row 100 of the table has a code"):
            table_of(form).lookup(indices)
        with pytest.raises(IndexError, match="row 100 of the table has a code"):
            table_of(form).logits(torch.randn(2, 512))
