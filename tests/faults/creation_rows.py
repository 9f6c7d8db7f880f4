"""Rows of the fault matrix in which ranks fail to create a channel together."""

import signal
from dataclasses import replace

from tests.faults.faults import (
    CountOneMore,
    KillDuring,
    Mismatch,
    NeverCome,
    Nothing,
    Patch,
    PressCtrlC,
    ShortMemory,
    SignalStore,
    UseUpDescriptors,
    another_host,
)
from tests.faults.plays import pipeline
from tests.faults.row import KILLED, SETUP, Row

_setup = Row("", Nothing(), errors=SETUP, moment="create", end="RendezvousError", exit_code=1)
_SET_UP = "torchrec_bls.collective.channel"


def _differs(name: str, fault: Mismatch | Patch, *words: str) -> Row:
    return replace(_setup, name=name, fault=fault, words=words, words_of_struck=words)


CREATION = [
    replace(
        _setup,
        name="a rank that never arrives at rendezvous",
        fault=NeverCome(),
        words=("ranks [1] did not come to phase 'terms'", "must create the channel"),
        end=None,
        exit_code=0,
    ),
    replace(
        _setup,
        name="SIGINT in the rendezvous",
        fault=PressCtrlC(after=0.3),
        held="create",
        words=("rank 1 could not set it up: channel 'exchange' on rank 1: KeyboardInterrupt",),
        end="KeyboardInterrupt",
        deadline=30.0,
        within=1.0,
    ),
    *(
        replace(
            _setup,
            name=f"SIGKILL during the rendezvous, {when}",
            fault=KillDuring(f"{_SET_UP}._native.ShmTransport{method}"),
            words=words,
            end="ProcessDied",
            exit_code=KILLED,
        )
        for when, method, words in [
            ("without memory", "", ("did not come to phase 'memory'",)),
            ("with memory", ".connect", ("rank",)),
        ]
    ),
    replace(
        _setup,
        name="SIGKILL while ranks connect, tcp",
        fault=KillDuring("torchrec_bls.collective.transport.set_up.connected"),
        words=("no connection over TCP within 2 s: rank 1",),
        end="ProcessDied",
        exit_code=KILLED,
        arguments=(("transport", "tcp"),),
    ),
    _differs(
        "bound differs", Mismatch("bound", 2), "bound differs", "ranks [1]: 2", "the same bound"
    ),
    _differs(
        "slot size differs",
        Mismatch("slot_bytes", 8192),
        "slot_bytes differs",
        "ranks [1]: 8192",
        "Give every rank the same slot_bytes",
    ),
    replace(
        _differs(
            "sharding plan differs",
            Mismatch("plan", "row_wise"),
            "table 0 differs between ranks",
            "ranks [0, 2]: 't0' of 41 x 8 FP32",
            "Shard the same model by the same plan",
        ),
        play=pipeline,
    ),
    replace(
        _differs(
            "codec plan differs",
            Mismatch("codec", "uint2"),
            "codecs of table 0 differs between ranks",
            "ranks [0, 2]: UINT4 for embeddings, FP32 for gradients",
            "ranks [1]: UINT2",
            "Shard the same model by the same plan and configuration",
        ),
        play=pipeline,
        arguments=(("codec", "uint4"),),
    ),
    _differs(
        "package version differs",
        Patch(f"{_SET_UP}._PACKAGE_VERSION", "0.0.9"),
        "package differs",
        "ranks [1]: 0.0.9",
        "Install one version of torchrec-bls",
    ),
    _differs(
        "wire version differs",
        Patch(f"{_SET_UP}._native.WIRE_VERSION", 99),
        "wire_version differs",
        "ranks [1]: 99",
        "Install one version of torchrec-bls",
    ),
    replace(
        _differs(
            "host differs",
            Patch(f"{_SET_UP}.host_identity", another_host),
            "host differs",
            "ranks [1] on host elsewhere",
            "one host, one PID namespace and one user namespace",
        ),
        arguments=(("transport", "shm"),),
    ),
    replace(
        _setup,
        name="world size differs",
        fault=CountOneMore(),
        words=("world_size differs between ranks", "ranks [1]: 4"),
        words_of_struck=("world_size differs between ranks", "ranks [1]: 4"),
    ),
    replace(
        _setup,
        name="memory is short at creation",
        fault=ShortMemory(kibibytes=16),
        words=("rank 1 could not set it up", "no memory for 3 x 4 slots", "--memory"),
        words_of_struck=("no memory for 3 x 4 slots", "0 MiB left"),
    ),
    replace(
        _setup,
        name="slots that no rank has memory for",
        words=("no memory for 3 x 4 slots", "MiB needed", "Lower the bound, slot_bytes"),
        arguments=(("slot_bytes", 1 << 40),),
    ),
    replace(
        _setup,
        name="descriptors exhausted at creation",
        fault=UseUpDescriptors(),
        words=("rank 1 could not set it up", "Too many open files", "(ulimit -n)"),
        words_of_struck=("Too many open files", "(ulimit -n)"),
    ),
    *(
        replace(
            _setup,
            name=f"the store {what} before the rendezvous",
            fault=SignalStore(number),
            # The signal may come one phase earlier or later: the store is another process.
            words=("the process group's store does not answer in phase", "start the ranks"),
            own_store=True,
        )
        for what, number in (("dies", signal.SIGKILL), ("hangs", signal.SIGSTOP))
    ),
]
