"""Rows of the fault matrix of a model that serves, and whose tables change ranks."""

from dataclasses import replace

from tests.faults.faults import (
    EndOfRequests,
    Kill,
    Malform,
    Mismatch,
    Nothing,
    Raise,
    with_bad_id,
    with_tensor,
    without_ids,
)
from tests.faults.plays import move, serve
from tests.faults.row import KILLED, SETUP, Row

_request = Row("", Nothing(), play=serve, moment="request", bound=2, deadline=30.0)
SERVICE = [
    *(
        replace(
            _request,
            name=f"malformed request: {what}{over}",
            fault=Malform(make),
            end_of_request="BadBatchError",
            arguments=arguments,
        )
        for what, make in (
            ("id without a row", with_bad_id),
            ("no KeyedJaggedTensor", with_tensor),
            ("without the attribute", without_ids),
        )
        for over, arguments in (("", ()), (", tcp", (("transport", "tcp"),)))
    ),
    replace(
        _request,
        name="exception in a model's forward",
        fault=Raise("no such table"),
        moment="forward",
        end_of_request="PipelineError",
    ),
    replace(
        _request,
        name="malformed first request",
        fault=Malform(with_bad_id),
        iteration=0,
        end_of_request="BadBatchError",
    ),
    replace(_request, name="a rank has fewer requests", fault=EndOfRequests()),
    replace(_request, name="a rank has no request", fault=EndOfRequests(), iteration=0),
    replace(
        _request,
        name="a rank has fewer requests, tcp",
        fault=EndOfRequests(),
        arguments=(("transport", "tcp"),),
    ),
    *(
        replace(_request, name=f"refresh under load{over}", arguments=(("refresh", True), *more))
        for over, more in (("", ()), (", tcp", (("transport", "tcp"),)))
    ),
]

_moved = Row("", Nothing(), play=move, moment="reshard", deadline=5.0)
RESHARDING = [
    *(
        replace(_moved, name=f"tables go to other ranks{over}", arguments=arguments)
        for over, arguments in (("", ()), (", tcp", (("transport", "tcp"),)))
    ),
    replace(
        _moved,
        name="SIGKILL before a reshard",
        fault=Kill(),
        errors=SETUP,
        words=("ranks [1] did not come to phase",),
        end="ProcessDied",
        exit_code=KILLED,
    ),
    replace(
        _moved,
        name="tables would go to different ranks",
        fault=Mismatch("by", 2),
        errors=SETUP,
        words=("table 0 differs between ranks", "Shard the same model by the same plan"),
        words_of_struck=("table 0 differs between ranks",),
        end="RendezvousError",
        exit_code=1,
        within=1.0,
    ),
]
