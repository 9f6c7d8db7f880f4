"""The fault matrix: what may go wrong, where, and what every rank says about it."""

import signal
from dataclasses import replace

from tests.faults.all_reduce_rows import ALL_REDUCE
from tests.faults.creation_rows import CREATION
from tests.faults.damage_rows import DAMAGE
from tests.faults.faults import (
    CloseEarly,
    CloseMeanwhile,
    Exit,
    Fork,
    Kill,
    KillWithChild,
    LeaveOutstanding,
    Nothing,
    PressCtrlC,
    Raise,
    ShortMemory,
    SignalStore,
    Stop,
    UseUpDescriptors,
)
from tests.faults.keeper_rows import KEEPER
from tests.faults.plays import leave_unread, pipeline
from tests.faults.row import KILLED, LARGE, Row
from tests.faults.service_rows import RESHARDING, SERVICE

DIED = ("PeerDiedError",)

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
        "torchrec_bls.EndTogether ends all ranks together",
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
        words=(
            "rank 1 closed the channel",
            "all ranks must run the same number of iterations",
            "torchrec_bls.EndTogether ends all ranks together",
        ),
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
_STOPPED_ELSEWHERE = {"end": ("PeerDiedError", "PoisonedError"), "words_of_struck": ()}
# Not over TCP: what strikes shared memory and its descriptors, and the large message of a killed
# rank, which may have arrived or not. The protocol above is the same.
OVER_TCP = [
    replace(
        row,
        name=f"{row.name}, tcp",
        arguments=(("transport", "tcp"),),
        **(_STOPPED_ELSEWHERE if row in DELAY and row.errors else {}),
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
    *KEEPER,
    *ALL_REDUCE,
    *INTERRUPTS,
    *DAMAGE,
    *CREATION,
    *LATER,
    *OVER_TCP,
]
