"""Two processes that register the same memory; the owner is killed while the other one reads."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from typing import Any

from benchmarks.gpu import memory, vmm
from benchmarks.gpu.children import Child, Open, Reports
from benchmarks.gpu.memory import READ, WRITE, Mapping
from benchmarks.gpu.registrations import WAYS, check_rows, guard, prepare
from benchmarks.gpu.runtime import Runtime

_READS_AFTER_DEATH = 20
VMM = {"CUDA's, of a NUMA node": vmm.HOST_NUMA, "CUDA's, of the host": vmm.HOST}


def measure_vmm(runtime: Runtime, way: str, size: int) -> Iterator[dict[str, Any]]:
    """Makes host memory by CUDA and reads it by the GPU, in one process."""
    kind, start, free = VMM[way], time.perf_counter(), runtime.free_hbm()
    with (
        vmm.created(runtime, kind, size) as handle,
        vmm.mapped(runtime, handle, kind, size) as mapping,
    ):
        gib = size / 2**30
        made_s = time.perf_counter() - start
        taken = (free - runtime.free_hbm()) / 2**20
        mapping.fill()
        os.close(vmm.exported(runtime, handle))
        yield {
            "s_per_gib": made_s / gib,
            "hbm_mib_per_gib": taken / gib,
            **memory.memory_kib(),
            **memory.host_kib(),
            **check_rows(runtime, mapping, mapping.address),
        }


def measure(
    open_runtime: Open, way: str, huge: bool, size: int, deadline: float
) -> Iterator[dict[str, Any]]:
    """Kills the owner of memory while another process reads it by the GPU.

    Args:
        open_runtime: makes each process's Runtime.
        way: key of WAYS or VMM.
        huge: with pages of 2 MiB rather than 4 KiB.
        size: bytes, whole pages of 2 MiB.
        deadline: of `time.monotonic()`.

    Yields:
        The result, once. Raises ChildError.
    """
    at_owner, at_reader = Pipe()
    with at_owner, at_reader:
        arguments = open_runtime, way, huge, size
        before = memory.host_kib()
        with (
            Child(_own, at_owner, *arguments) as owner,
            Child(_join, at_reader, *arguments) as peer,
        ):
            peer.send(owner.receive(deadline))
            joined = peer.receive(deadline)
            pss = {who: memory.memory_kib(each.pid) for who, each in _named(owner, peer)}
            while_both = memory.host_kib()
            owner.kill()
            peer.send("the owner is dead")
            after = peer.receive(deadline)
    yield {**joined, **after, "memory": pss, "host": {"before": before, "both": while_both}}


def _named(owner: Child, peer: Child) -> tuple[tuple[str, Child], tuple[str, Child]]:
    return ("owner", owner), ("reader", peer)


def _own(
    reports: Reports, peer: Connection, open_runtime: Open, way: str, huge: bool, size: int
) -> None:
    """Makes memory, registers it, tells where it is, and waits for its death."""
    runtime = open_runtime()
    with ExitStack() as stack:
        if way in VMM:
            handle = stack.enter_context(vmm.created(runtime, VMM[way], size))
            mapping = stack.enter_context(vmm.mapped(runtime, handle, VMM[way], size))
            mapping.fill()
            fd = vmm.exported(runtime, handle)
            stack.callback(os.close, fd)
            reduction.send_handle(peer, fd, 0)
        else:
            fd, mapping = prepare(stack, WAYS[way], huge, size)
            stack.enter_context(runtime.register(mapping.address, size, size, WAYS[way].flags))
            if WAYS[way].guarded:
                mapping.protect(READ)  # sealed by the process that comes last
        reports.send((os.getpid(), fd))
        reports.receive()


def _join(
    reports: Reports, peer: Connection, open_runtime: Open, way: str, huge: bool, size: int
) -> None:
    """Registers the owner's memory and reads it, while the owner lives and after its death."""
    runtime = open_runtime()
    with ExitStack() as stack:
        pid, there = reports.receive()
        start = time.perf_counter()
        found: dict[str, Any] = {}
        if way in VMM:
            fd = reduction.recv_handle(peer)
            stack.callback(os.close, fd)
            handle = stack.enter_context(vmm.imported(runtime, fd))
            mapping = stack.enter_context(vmm.mapped(runtime, handle, VMM[way], size))
            pointer = mapping.address
        else:
            mapping = _join_file(stack, runtime, way, f"/proc/{pid}/fd/{there}", size, found)
            pointer = runtime.device_pointer(mapping.address)
        found["s_per_gib"] = (time.perf_counter() - start) / (size / 2**30)
        reads, wrong = 0, check_rows(runtime, mapping, pointer)["wrong_rows"]
        reports.send(found)
        while not reports.has_message():  # the owner is killed meanwhile
            wrong += check_rows(runtime, mapping, pointer)["wrong_rows"]
            reads += 1
        reports.receive()
        for _ in range(_READS_AFTER_DEATH):
            wrong += check_rows(runtime, mapping, pointer)["wrong_rows"]
        after = {"reads_before_and_at_death": reads, "reads_after_death": _READS_AFTER_DEATH}
    reports.send({**after, "wrong_rows": wrong})


def _join_file(
    stack: ExitStack, runtime: Runtime, way: str, path: str, size: int, found: dict[str, Any]
) -> Mapping:
    how = WAYS[way]
    fd = os.open(path, (os.O_RDWR if how.protection & WRITE else os.O_RDONLY) | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    mapping = stack.enter_context(memory.mapped(fd, size, how.protection, how.kind))
    mapping.populate()
    stack.enter_context(runtime.register(mapping.address, size, size, how.flags))
    if how.guarded:
        found |= guard(mapping, fd)
        found["later_writable_mapping"] = ""
        try:
            with memory.mapped(fd, size, READ | WRITE, how.kind):
                pass
        except OSError as error:
            found["later_writable_mapping"] = str(error)
    return mapping
