"""Output dists: send embeddings back to the ranks that asked for them, one message per peer.

Each replaces one of TorchRec's output dists. The rows go straight from the lookup's result, or from
the tables themselves, into the slots of their receivers. The receiver writes its output straight
from its slots.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division

from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.exchanges.exchange import Exchange, Pending
from torchrec_bls.distributed.inputs.input_dist import IdsLayout, layout_of
from torchrec_bls.distributed.outputs.output_memory import EmptyOutput, empty_output


class EmbeddingsAwaitable(ExchangeAwaitable[torch.Tensor]):
    """The embeddings of this rank's samples. `finish` returns them, and is called once."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._embeddings: torch.Tensor | None = None

    def _wait_impl(self) -> torch.Tensor:
        if self._finish is not None:
            self._embeddings = self._finish()
            self._finish = None
        assert self._embeddings is not None
        return self._embeddings


class _Forwards(threading.local):
    """The number of forwards that autograd has followed in this thread, of all output dists.

    It stays below the numbers that torch gives to the nodes of this thread's graphs: each forward
    makes several nodes.
    """

    number = 0

    def next(self) -> int:
        """Returns the number of the next forward, from 0 on."""
        self.number += 1
        return self.number - 1


_forwards = _Forwards()


class OutputDist(nn.Module):
    """Sends looked-up rows to the ranks that asked for them, and gradients back when training.

    Args:
        rank: this rank.
        exchange: the module's channel for embeddings.
        gradients: the module's channel for gradients, made at the first forward that needs them.
        gradient_divisors: numbers by which TorchRec divides gradients, one after the other.
        callbacks: operations of TorchRec's own output dist on the embeddings that have arrived.
        empty_output: function that returns memory for embeddings, see output_memory.
    """

    def __init__(
        self,
        rank: int,
        exchange: Exchange,
        gradients: Exchange,
        gradient_divisors: list[int],
        callbacks: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (),
        empty_output: EmptyOutput = empty_output,
    ) -> None:
        super().__init__()
        self._rank = rank
        self._exchange = exchange
        self._gradients = gradients
        self._gradient_divisors = gradient_divisors
        self._callbacks = list(callbacks)
        self._empty_output = empty_output

    def forward(self, local_embs: torch.Tensor, sharding_ctx: Any) -> EmbeddingsAwaitable:
        """Posts the rows. Returns the awaitable of this rank's embeddings.

        Args:
            local_embs: rows of the lookup, for the samples of all ranks.
            sharding_ctx: TorchRec's context, in which the input dist left its layout.
        """
        request = Request(self, sharding_ctx, local_embs)
        pending = self.post(request, local_embs.detach().contiguous())
        finish: Callable[[], torch.Tensor] = pending.wait
        if torch.is_grad_enabled() and local_embs.requires_grad:
            dummy = _Send.apply(request, local_embs)  # type: ignore[no-untyped-call]
            # Without this, a module used several times in a step would update its rows in that
            # order.
            run_last(dummy, _forwards.next())
            finish = partial(_Receive.apply, request, pending, dummy)
        awaitable = EmbeddingsAwaitable(finish)
        awaitable.callbacks.extend(self._callbacks)
        return awaitable

    @abstractmethod
    def post(self, request: "Request", rows: torch.Tensor) -> Pending[torch.Tensor]:
        """Posts `rows`, contiguous, to the ranks that asked for them."""

    @abstractmethod
    def post_gradient(self, request: "Request", gradient: torch.Tensor) -> Pending[torch.Tensor]:
        """Posts the gradient of this rank's output to the ranks that looked the rows up."""

    def divide_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divides in place as TorchRec does, unless its users switched that off."""
        if get_gradient_division():
            for divisor in self._gradient_divisors:
                gradient.div_(divisor)
        return gradient


class Request:
    """The facts of one forward through an output dist that its posts and its backward need.

    The nodes of the graph own it. So it may not own the output, nor anything that does: the
    garbage collector does not see a cycle that goes through the graph.

    Attributes:
        gradient: gradient of the rows, from its post in the backward until it is waited for.
    """

    def __init__(self, output_dist: OutputDist, sharding_ctx: Any, local: torch.Tensor) -> None:
        self.dist = output_dist
        self.sharding_ctx = sharding_ctx
        self.layout: IdsLayout = layout_of(sharding_ctx)
        self.shape = local.shape
        self.dtype = local.dtype
        self.gradient: Pending[torch.Tensor] | None = None


def run_last(output: torch.Tensor, place: int) -> None:
    """Makes a backward run the node of `output` only when no other node can run. Of several such
    nodes the one with the largest `place` runs first.

    Of the nodes whose gradients are there, autograd runs the one with the largest number first. The
    forward numbers them as it makes them. So the wait for embeddings' gradients would come before
    the backward of layers that a model computes before its lookup: in a DLRM the bottom MLP.
    """
    node: Any = output.grad_fn
    node._set_sequence_nr(place)


# As in TorchRec, the two halves of the exchange are two nodes of the autograd graph. The gradient's
# exchange starts in the backward of the second node and ends in that of the first. In between comes
# all other backward work that does not need the gradient. The dummy tensor joins the two nodes.
class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, rows: torch.Tensor) -> torch.Tensor:
        ctx.request = request
        return rows.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, torch.Tensor]:
        request: Request = ctx.request
        gradient, request.gradient = request.gradient, None
        assert gradient is not None, "_Receive's backward comes before"
        return None, request.dist.divide_gradient(gradient.wait())


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, request: Request, pending: Pending[torch.Tensor], dummy: torch.Tensor
    ) -> torch.Tensor:
        ctx.request = request
        return pending.wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        request: Request = ctx.request
        request.gradient = request.dist.post_gradient(request, gradient.contiguous())
        return None, None, gradient.new_zeros(1)


def order_of(sharding_ctx: Any) -> torch.Tensor | None:
    """Returns the permutation that undoes row-wise bucketizing, as int64."""
    permutation: torch.Tensor | None = sharding_ctx.unbucketize_permute_tensor
    return None if permutation is None else permutation.to(torch.int64).contiguous()
