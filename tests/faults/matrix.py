"""The fault matrix: what may go wrong, where, and what every rank says about it."""

import signal
from dataclasses import replace

from tests.faults.faults import (
    CloseEarly,
    CloseMeanwhile,
    CountOneMore,
    Damage,
    Exit,
    Fork,
    Kill,
    KillDuring,
    KillWithChild,
    LeaveOutstanding,
    Mismatch,
    NeverCome,
    Nothing,
    Patch,
    PressCtrlC,
    Raise,
    Replay,
    ShortMemory,
    SignalStore,
    Stop,
    UseUpDescriptors,
    another_host,
)
from tests.faults.plays import leave_unread, pipeline
from tests.faults.row import KILLED, SETUP, Row
from tests.faults.service_rows import RESHARDING, SERVICE

NEVER = 3600.0
LARGE = 500_000  # int64 numbers, 4 MB, of which a slot has room for some 500
DIED = ("PeerDiedError",)
DAMAGED = ("ProtocolError",)

_dead = Row(
    "",
    Kill(),
    errors=DIED,
    words=("rank 1 died while this rank waited for it to send", "look at that rank's own output"),
    end="ProcessDied",
    exit_code=KILLED,
    deadline=30.0,
    within=1.0,
)

DEATH = [
    replace(_dead, name=f"{name}, {world} ranks", fault=fault, moment=moment, world=world)
    for name, fault, moment in [
        ("SIGKILL before post", Kill(), "post"),
        ("SIGKILL between post and wait", Kill(), "wait"),
        ("SIGKILL while peers sleep in wait", Kill(after=0.3), "post"),
    ]
    for world in (2, 4, 8)
] + [
    replace(_dead, name="process exits without closing", fault=Exit(7), exit_code=7),
    replace(
        _dead,
        name="SIGKILL while a forked child lives on",
        fault=KillWithChild(seconds=70.0),
        deadline=60.0,
        within=5.0,
    ),
    replace(
        _dead,
        name="SIGKILL before a large message is read",
        moment="wait",
        held="wait",
        hold_longer=0.2,
        items=LARGE,
        words=("rank 1 died while this rank waited for it to be read",),
    ),
    replace(_dead, name="SIGKILL between a pipeline's batches", moment="between", play=pipeline),
    replace(_dead, name="SIGKILL in a model's forward", moment="forward", play=pipeline),
]

_stopped = Row(
    "SIGSTOP longer than the deadline",
    Stop(seconds=4.0),
    errors=("PeerTimeoutError",),
    words=(
        "rank 1 did not send within 2.0",
        "Missing: rank 1",
        "A rank that is stuck, stopped or ran fewer iterations causes this",
    ),
    end="PoisonedError",
    exit_code=1,
    words_of_struck=("did not send within 2.0",),
)
DELAY = [
    _stopped,
    replace(_stopped, name="SIGSTOP between post and wait", moment="wait", iteration=3),
    Row("SIGSTOP shorter than the deadline", Stop(seconds=1.0), deadline=10.0),
]

LEAVING = [
    Row(
        "exception between post and wait",
        Raise("no such table"),
        errors=("PoisonedError",),
        words=("because rank 1 failed: ", "KeyError: 'no such table'"),
        moment="wait",
        end="KeyError",
        exit_code=1,
        deadline=30.0,
        within=1.0,
    ),
    Row(
        "close, some iterations early",
        CloseEarly(),
        errors=("PeerClosedError",),
        words=("rank 1 closed the channel", "all ranks must run the same number of iterations"),
        deadline=30.0,
        within=1.0,
    ),
    Row(
        "close during wait from another thread",
        CloseMeanwhile(after=0.3),
        errors=("PeerClosedError",),
        words=("rank 1 closed the channel",),
        bound=0,
        held="post",
        hold_longer=0.3,
        end="ChannelClosedError",
        exit_code=1,
        words_of_struck=("closed the channel during a wait",),
        deadline=30.0,
        within=1.0,
    ),
    *(
        Row(
            f"interpreter shutdown with posts outstanding{and_thread}",
            LeaveOutstanding(thread_waits),
            errors=("PeerClosedError",),
            words=("rank 1 closed the channel",),
            moment="wait",
            held="post",
            hold_longer=0.5,
            bound=2,
            world=2,
            deadline=30.0,
            within=5.0,
            fresh_interpreters=True,
        )
        for thread_waits, and_thread in ((False, ""), (True, " and a thread in wait"))
    ),
    Row("two ranks post large messages to each other", Nothing(), world=2, items=LARGE),
]

_interrupted = Row(
    "",
    PressCtrlC(after=0.3),
    errors=("PoisonedError",),
    words=("because rank 1 failed: channel 'exchange' on rank 1, sequence ", "KeyboardInterrupt"),
    end="KeyboardInterrupt",
    exit_code=1,
    deadline=30.0,
    within=1.0,
)
INTERRUPTS = [
    # It strikes before, in or after the native call.
    replace(_interrupted, name="SIGINT in post", fault=PressCtrlC(after=0.001), items=LARGE),
    replace(_interrupted, name="SIGINT in wait", moment="wait", bound=0, held="post"),
    replace(
        _interrupted,
        name="SIGINT in close",
        moment="close",
        held="close",
        hold_longer=0.3,
        play=leave_unread,
        items=LARGE,
    ),
]

_damaged = Row(
    "",
    Nothing(),
    errors=DAMAGED,
    moment="wait",
    held="wait",
    end="PoisonedError",
    exit_code=1,
    deadline=30.0,
    within=1.0,
)
_CAUSE = "Two versions of torchrec-bls, or a write out of bounds"


def _damage(field: str, value: int, words: str, **changes: object) -> Row:
    fault, name = Damage(field, value), f"{field} {value:#x}"
    row = replace(_damaged, name=name, fault=fault, words=(words, _CAUSE))
    return replace(row, **changes)  # type: ignore[arg-type]


DAMAGE = [
    _damage("arrival", 100, "wrote sequence 99 into the slot of 3"),
    _damage("magic", 0x3F3F, "magic 16191"),
    _damage("version", 99, "wire version 99"),
    _damage("flags", 0x80, "unknown flags"),
    _damage("flags", 1, "pulled message", name="flags: pulled, which it is not"),
    _damage("source", 2, "it says it comes from rank 2"),
    _damage("parts", 99, "99 parts, at most 16"),
    replace(
        _damaged,
        name="credit 0x10",
        fault=Damage("credit", 16),
        words=("rank 1 says it read 16 of 5 messages", _CAUSE),
    ),
    replace(
        _damaged,
        name="batch 0x7",
        fault=Damage("batch", 7),
        words=("sent what belongs to batch 7, but this rank waits for batch 0", "left out an exch"),
    ),
    _damage("length", 1 << 20, "bytes in a slot of"),
    _damage("length", (1 << 64) - 1, "part 0 has"),
    _damage("address pid", 1, "memory of a foreign process", items=LARGE),
    _damage("address device", 0x777, "is not there any more", items=LARGE),
    _damage("address inode", 1, "is not there any more", items=LARGE),
    _damage(
        "address bytes", 100, f"{8 * LARGE} bytes in a pulled message's memory of 100", items=LARGE
    ),
    _damage("address bytes", 1 << 40, "is not there any more", items=LARGE),
    replace(
        _damaged,
        name="address fd 0x100000",
        fault=Damage("address fd", 1 << 20),
        errors=SETUP,
        words=("rank 1", "cannot open shared memory"),
        items=LARGE,
    ),
    *(
        replace(
            _damaged,
            name=name,
            fault=Damage(field, value),
            play=pipeline,
            moment="between",
            held="between",
            words=("ids from rank 1 do not fit", "All ranks must shard the same module"),
        )
        for name, field, value in [
            ("payload truncated", "third length", 0),
            ("message truncated", "parts", 0),
        ]
    ),
    replace(
        _damaged,
        name="frame of encoded rows damaged",
        fault=Damage("frame rows", 999),
        play=pipeline,
        moment="between",
        # Rank 0 finds the damage outside of the pipeline, and rank 1 waits for its ids by then.
        world=2,
        held="output",
        hold_longer=0.5,
        within=1.5,
        arguments=(("codec", "uint4"), ("direction", "embeddings")),
        words=("from rank 1, the frame of encoded rows is damaged", "A network that changes bytes"),
    ),
    *(
        replace(
            _damaged,
            name=name,
            fault=Replay(back),
            errors=("PeerTimeoutError",),
            words=("rank 1 did not send within 2.0",),
            deadline=2.0,
            within=None,
        )
        for name, back in [
            ("message of the iteration before replayed", 1),
            ("older message replayed", 2),
        ]
    ),
]

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
            ("without memory", "", ("ranks [1] did not come to phase 'memory'",)),
            ("with memory", ".connect", ("rank",)),
        ]
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
            "one host and one PID namespace",
        ),
        arguments=(("transport", "shm"),),
    ),
    replace(
        _setup,
        name="world size differs",
        fault=CountOneMore(),
        words=("world_size differs between ranks", "ranks [1]: 4"),
        words_of_struck=("ranks [3] did not come to phase 'terms'",),
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
            words=("the process group's store does not answer in phase 'terms'", "start the ranks"),
            own_store=True,
        )
        for what, number in (("dies", signal.SIGKILL), ("hangs", signal.SIGSTOP))
    ),
]

LATER = [
    *(
        Row(
            f"descriptors exhausted when {what} a large message",
            UseUpDescriptors(),
            errors=("PoisonedError",),
            words=(words, "Too many open files. Raise the limit of open files (ulimit -n)"),
            items=LARGE,
            # At iteration 4 the sender's memory is used again, and that of the others is new.
            iteration=iteration,
            end="RendezvousError",
            exit_code=1,
            words_of_struck=(words, "Raise the limit of open files (ulimit -n)"),
            deadline=30.0,
            within=1.0,
        )
        for what, words, iteration in [
            ("sending", "cannot get a message: cannot create shared memory", 2),
            ("reading", "sent a message that cannot be read: cannot open shared memory", 4),
        ]
    ),
    Row(
        "no memory for a large message",
        ShortMemory(kibibytes=16),
        errors=("PoisonedError",),
        words=("cannot get a message: no memory for a message of rank 1", "--memory"),
        items=LARGE,
        iteration=2,
        end="RendezvousError",
        exit_code=1,
        words_of_struck=("cannot get a message: no memory for a message of rank 1",),
        deadline=30.0,
        within=1.0,
    ),
    Row("descriptors exhausted, small messages", UseUpDescriptors()),
    Row("the store dies after creation", SignalStore(signal.SIGKILL), own_store=True),
    Row("fork after creation", Fork(), moment="read"),
]

# A rank that goes on too late may find its connections reset, and what its peers told it lost.
_STOPPED_TWO_SIDED = {"end": ("PeerDiedError", "PoisonedError"), "words_of_struck": ()}
# Not over it: what strikes shared memory and its descriptors, and the large message of a killed
# rank, which may have arrived or not. The protocol above is the same.
TWO_SIDED = [
    replace(
        row,
        name=f"{row.name}, c10d",
        arguments=(("transport", "c10d"),),
        **(_STOPPED_TWO_SIDED if row in DELAY and row.errors else {}),
    )
    for row in (*DEATH, *DELAY, *LEAVING, *INTERRUPTS, *LATER)
    if row.world < 8
    and "SIGKILL before a large message" not in row.name
    and not isinstance(row.fault, (UseUpDescriptors, ShortMemory))
]

MATRIX: list[Row] = [
    *DEATH,
    *DELAY,
    *LEAVING,
    *SERVICE,
    *RESHARDING,
    *INTERRUPTS,
    *DAMAGE,
    *CREATION,
    *LATER,
    *TWO_SIDED,
]
