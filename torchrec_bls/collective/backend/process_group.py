"""The torch.distributed backend "bls". All-to-alls go through a bounded-lag channel, the
all-reduces of one host through another one, and everything else goes by gloo.

Importing torchrec_bls registers it (docs/design/backend.md).
"""

import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchrec_bls import _native
from torchrec_bls.collective.backend import buffers
from torchrec_bls.collective.backend.all_reduces import SLOT_BYTES, AllReduces, reduction_of
from torchrec_bls.collective.backend.calls import CallQueue, CallWork, Receive
from torchrec_bls.collective.backend.options import DEFAULT_SLOT_BYTES, BLSOptions
from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.transport.deadlines import LONGEST_DEADLINE
from torchrec_bls.collective.transport.rendezvous import (
    Rendezvous,
    host_identity,
    require_equal,
)

NAME = "bls"
_DEADLINE = "BLSOptions(deadline=...) or TORCHREC_BLS_BACKEND='deadline=SECONDS'"
# torch's names for it; the first one is used from 2.13 on.
_REDUCE_SCATTER = next(
    name
    for name in ("reduce_scatter_single", "_reduce_scatter_base")
    if hasattr(dist.ProcessGroup, name)
)


def register() -> None:
    """Makes `init_process_group("cpu:bls")` and `new_group(backend="bls")` known to torch."""
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])
    # A private name, since torch decides: without TorchComms the variable does nothing.
    switched_on = getattr(distributed_c10d, "_use_torchcomms_enabled", None)
    takes_its_own = hasattr(distributed_c10d, "_torchcomms_handles_backend")
    if switched_on is not None and switched_on() and not takes_its_own:
        warnings.warn(
            f"TORCH_DISTRIBUTED_USE_TORCHCOMMS is set: torch {torch.__version__} gives every group "
            "to TorchComms then, which fails with 'failed to find backend bls'. Unset it where "
            "backend 'bls' is used, or install torch 2.14 or later",
            RuntimeWarning,
            stacklevel=2,
        )


def _make_group(given: Any, options: object) -> "BLSProcessGroup":
    """Makes a group. torch calls it with its _DistributedBackendOptions and the `pg_options`."""
    if options is None:
        options = BLSOptions.from_environment()
    if not isinstance(options, BLSOptions):
        raise TypeError(
            f"pg_options of backend 'bls' are a torchrec_bls.BLSOptions, not {options!r}"
        )
    return BLSProcessGroup(given, options)


def _by_plain_group(name: str) -> Any:
    """Returns a method that calls the same method of a group that is not of a Python class."""

    def method(self: "BLSProcessGroup", *arguments: Any, **options: Any) -> dist.Work:
        work: dist.Work = getattr(self._plain, name)(*arguments, **options)
        return work

    return method


class BLSProcessGroup(dist.ProcessGroup):
    """A process group of CPU tensors.

    Everything is gloo's, with these exceptions: `all_to_all_single`, `all_to_all`, sums of float32
    by `reduce_scatter_tensor`, and among the ranks of one host `all_reduce` of the usual dtypes by
    SUM, AVG, MAX and MIN. The first call of either kind sets up its channel: all ranks have to make
    it.

    - Inputs are copied if they are not contiguous, share memory with an output, or are views that
      negate or conjugate when they are read. Outputs that are not contiguous, share memory with
      each other or are such views are refused, and so is an all-reduce of a tensor whose elements
      share memory. A call that is refused raises ValueError on its rank, has sent nothing, and may
      be made again.
    - An input stays unchanged until its handle is completed. An output is undefined until then.
    - Sizes are checked: a rank has to send exactly what the receiver's output has room for.

    Args:
        given: torch's facts about the group: store, rank, size, timeout and name.
        options: options of the channels.
    """

    def __init__(self, given: Any, options: BLSOptions) -> None:
        # Python can subclass only what this constructor makes, and that has no store.
        super().__init__(given.group_rank, given.group_size)  # type: ignore[call-arg]
        self._store: Store = given.store
        self._world_size: int = given.group_size  # `size()` looks for an override every time
        gloo = dist.ProcessGroupGloo(
            PrefixStore("gloo/", given.store),
            given.group_rank,
            given.group_size,
            timeout=given.timeout,
        )
        gloo.options.global_ranks_in_group = given.global_ranks_in_group
        gloo.options.group_name = given.group_id
        self._plain = dist.ProcessGroup(given.store, given.group_rank, given.group_size)
        # Methods that this class does not override: the base uses the backend of the tensors'
        # device.
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._options = options
        self._deadline = options.deadline or min(given.timeout.total_seconds(), LONGEST_DEADLINE)
        self._queue: CallQueue | None = None
        # None before the first all-reduce, False where gloo does them.
        self._all_reduces: AllReduces | Literal[False] | None = None
        # One lock each: ranks whose threads make first calls of both kinds at once need no order.
        self._making_queue = threading.Lock()
        self._making_all_reduces = threading.Lock()

    @property
    def channel(self) -> BoundedLagChannel | None:
        """Returns the channel of the all-to-alls; None before the first."""
        return self._queue.channel if self._queue else None

    @property
    def all_reduce_channel(self) -> BoundedLagChannel | None:
        """Returns the channel of the all-reduces; None before the first, and where gloo does
        them."""
        return self._all_reduces.channel if self._all_reduces else None

    def all_to_all_single(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Any = None,
    ) -> CallWork:
        """Does the all-to-all of `torch.distributed.all_to_all_single`."""
        buffers.check_outputs([output])
        source = buffers.sent_part(input, [output])
        return self._post(
            buffers.split(source, input_split_sizes, self._world_size, "input"),
            buffers.copy_to(buffers.split(output, output_split_sizes, self._world_size, "output")),
            [source],
            [output],
            opts,
        )

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(  # type: ignore[override]
        self,
        output: list[torch.Tensor],
        input: list[torch.Tensor],
        opts: Any = None,
        timeout: Any = None,
    ) -> CallWork:
        """Does the all-to-all of `torch.distributed.all_to_all`."""
        for name, tensors in (("output", output), ("input", input)):
            if len(tensors) != self._world_size:
                raise ValueError(
                    f"{name}_tensor_list has {len(tensors)} tensors, but needs one for each of "
                    f"{self._world_size} ranks"
                )
        buffers.check_outputs(output)
        sources = [buffers.sent_part(tensor, output) for tensor in input]
        copy = buffers.copy_to(_native.Buffers.whole(output))
        return self._post(_native.Buffers.whole(sources), copy, sources, output, opts)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        """Does the reduce-scatter of `torch.distributed.reduce_scatter_tensor`.

        Sums of float32 go through the channel: gloo would all-reduce the whole input. The results
        are the same, bit for bit.
        """
        opts = opts or dist.ReduceScatterOptions()
        if opts.reduceOp != dist.ReduceOp.SUM or input.dtype != torch.float32:
            work: dist.Work = getattr(self._plain, _REDUCE_SCATTER)(output, input, opts)
            return work
        buffers.check_outputs([output])
        source = buffers.sent_part(input, [output])
        if output.dtype != input.dtype or input.numel() != self._world_size * output.numel():
            raise ValueError(
                f"reduce_scatter of {input.numel()} x {input.dtype} among {self._world_size} ranks "
                f"into an output of {output.numel()} x {output.dtype}: the input has one output "
                "for each rank"
            )
        send = _native.Buffers.split(source, [output.nbytes] * self._world_size)
        rank = self.rank()

        def add(arrival: _native.Arrival) -> None:
            _native.collect_sum(arrival, rank, output)

        return self._post(send, add, [source], [output], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def allreduce(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Does the all-reduce of `torch.distributed.all_reduce`. DistributedDataParallel also calls
        it, from autograd's thread.

        The channel adds in the order of ranks. So all ranks have the same bits in every run
        (docs/design/all-reduce.md).
        """
        opts = opts or dist.AllreduceOptions()
        reduction = reduction_of(tensors, opts.reduceOp)
        if reduction is not None:
            buffers.check_reduced(tensors[0])
        if reduction is not None and (all_reduces := self._made_all_reduces()):
            return all_reduces.start(tensors[0], reduction, not getattr(opts, "asyncOp", True))
        work: dist.Work = self._plain.allreduce(tensors, opts)
        return work

    def gather(  # type: ignore[override]
        self, output: list[list[torch.Tensor]], input: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Does the gather of `torch.distributed.gather`.

        Where TorchComms is switched on, torch gives ranks that receive nothing a list with an empty
        list, as TorchComms wants it, whatever the group's backend. gloo refuses that.
        """
        opts = opts or dist.GatherOptions()
        received = output if self.rank() == opts.rootRank else []
        work: dist.Work = self._plain.gather(received, input, opts)
        return work

    # If a subclass does not override these, torch calls them with the GIL held. gloo's own threads
    # need the GIL under gloo's lock: now and then each would wait for the other. torch never calls
    # a name that it has no function for; 2.14 has more of them than 2.13.
    all_gather_single = _by_plain_group("all_gather_single")
    allgather = _by_plain_group("allgather")
    all_gather_single_coalesced = _by_plain_group("all_gather_single_coalesced")
    allgather_into_tensor_coalesced = _by_plain_group("allgather_into_tensor_coalesced")
    allreduce_coalesced = _by_plain_group("allreduce_coalesced")
    barrier = _by_plain_group("barrier")
    broadcast = _by_plain_group("broadcast")
    reduce = _by_plain_group("reduce")
    reduce_scatter = _by_plain_group("reduce_scatter")
    reduce_scatter_single_coalesced = _by_plain_group("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _by_plain_group("reduce_scatter_tensor_coalesced")
    scatter = _by_plain_group("scatter")
    send = _by_plain_group("send")
    recv = _by_plain_group("recv")
    # Python finds the first one, and its caller asks the handle for the sender. C++ finds the
    # second one, and wraps the handle in another one that does not know the sender.
    recv_anysource = _by_plain_group("recv_anysource")
    recvAnysource = recv_anysource
    start_coalescing = _by_plain_group("_start_coalescing")
    end_coalescing = _by_plain_group("_end_coalescing")

    def _post(
        self,
        send: _native.Buffers,
        receive: Receive,
        inputs: Sequence[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
    ) -> CallWork:
        with self._making_queue:
            if self._queue is None:
                self._queue = CallQueue(self._make_channel())
        work = self._queue.post(send, receive, inputs, outputs)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work

    def _made_all_reduces(self) -> AllReduces | Literal[False]:
        with self._making_all_reduces:
            if self._all_reduces is None:
                self._all_reduces = self._make_all_reduces()
            return self._all_reduces

    def _make_all_reduces(self) -> AllReduces | Literal[False]:
        """Makes the channel of the all-reduces if all ranks share a host's memory."""
        name = f"all-reduce of group {self.group_name}"
        rendezvous = Rendezvous(self, f"{name}, hosts", self._deadline, _DEADLINE)
        with rendezvous.own_part():
            record = {"host": host_identity(), "transport": self._options.transport}
        records = rendezvous.exchange("hosts", record)
        cure = {"transport": "Give every rank the same transport"}
        require_equal(name, records, cure, rendezvous.names)
        one_host = len({each["host"] for each in records}) == 1
        if self._options.transport not in ("auto", "shm") or not one_host:
            return False
        return AllReduces(
            BoundedLagChannel(
                self,
                bound=_native.ALL_REDUCE_POSTS - 1,
                slot_bytes=SLOT_BYTES,
                name=name,
                deadline=self._deadline,
                transport="shm",
                rendezvous=Rendezvous(self, name, self._deadline, _DEADLINE, rendezvous.session),
            )
        )

    def _make_channel(self) -> BoundedLagChannel:
        name = f"all-to-all of group {self.group_name}"
        return BoundedLagChannel(
            self,
            bound=self._options.bound,
            slot_bytes=self._options.slot_bytes or DEFAULT_SLOT_BYTES,
            name=name,
            deadline=self._deadline,
            transport=self._options.transport,
            verbs=self._options.verbs,
            rendezvous=Rendezvous(self, name, self._deadline, _DEADLINE),
        )

    def get_group_store(self) -> Store:
        """Returns the store of this group."""
        return self._store

    def getBackendName(self) -> str:
        """Returns the backend's name, for torch's messages and traces."""
        return NAME

    def shutdown(self) -> None:
        """Closes the channels. `destroy_process_group` calls it."""
        try:
            self._close_channels()
        finally:
            super().shutdown()

    def abort(self) -> None:
        """Fails the all-to-alls and all-reduces of all ranks, and aborts gloo."""
        try:
            for channel in (self.channel, self.all_reduce_channel):
                if channel is not None:
                    channel.poison("aborted")
            self._close_channels()
        finally:
            super().abort()

    def _close_channels(self) -> None:
        with ExitStack() as stack:  # closes both, even if a signal ends the waiting of one
            if self.channel is not None:
                stack.callback(self.channel.close)
            if self._all_reduces:
                stack.callback(self._all_reduces.close)
