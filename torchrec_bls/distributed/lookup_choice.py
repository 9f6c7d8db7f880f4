"""The choice of a lookup, in the first forward of a module that TorchRec has sharded."""

import torch

from torchrec_bls.direct.reads.agreement import agree_on_reads
from torchrec_bls.direct.reads.direct_lookup import DirectLookup
from torchrec_bls.distributed.exchange_lookup import ExchangeLookup
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.distributed.module_state import ModuleState
from torchrec_bls.distributed.torchrec_dists import TorchRecDists

_NONE_FROM_GPUS = (
    "autograd is on, and no gradients come back from outputs that were copied to a GPU: use "
    "torch.no_grad(). To train, shard with device=torch.device('cpu'), and copy outputs by .to()"
)


def chosen_lookup(dists: TorchRecDists, state: ModuleState) -> Lookup:
    """Returns the lookup of a module that TorchRec has sharded, collectively.

    Raises:
        ValueError: lookup is "direct", and a rank can't read directly; all ranks raise.
        RendezvousError: a rank did not come, or could not share its tables.
    """
    exchanges = state.exchanges
    if exchanges.config.lookup != "exchange":
        exchanges.deadline.training = torch.is_grad_enabled()
        state.meet()
        try:
            reads = agree_on_reads(state.where, exchanges, dists, state.gpu)
        except ValueError:  # all ranks know why, and that there is nothing to repeat
            raise
        except BaseException:
            state.agreement.forget()
            raise
        if reads is not None:
            device = "" if state.gpu is None else " and device=torch.device('cpu')"
            no_gradients = (
                f"{state.where}: autograd is on, but tables that are read directly do not change: "
                f'use torch.no_grad(), or shard with lookup="exchange"{device} to train'
            )
            return DirectLookup(reads, state.input_check, no_gradients)
    if state.gpu is not None:
        return ExchangeLookup(state, dists, _NONE_FROM_GPUS)
    bound = exchanges.config.bound
    no_gradients = (
        f"bound is {bound} and autograd is on: gradients of up to {bound} iterations ago would "
        "update rows that later lookups have read already. Use torch.no_grad() for inference, or "
        "bound 0 for training"
    )
    return ExchangeLookup(state, dists, no_gradients if bound > 0 else "")
