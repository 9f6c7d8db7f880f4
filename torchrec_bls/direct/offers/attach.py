"""A model in a process of its own that reads the tables which others serve."""

import os
from collections.abc import Mapping
from contextlib import closing

import torch
from torch import nn

from torchrec_bls import _native
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import check_owner
from torchrec_bls.direct.dense_weights import dense_weights
from torchrec_bls.direct.gpu.device import Gpu, gpu_of
from torchrec_bls.direct.offers.collections import Collection, collections_of
from torchrec_bls.direct.offers.conversation import Conversation, Descriptors, connect
from torchrec_bls.direct.offers.manifest import Manifest
from torchrec_bls.direct.offers.read_tables import Received, check_same, read_tables
from torchrec_bls.direct.process import this_process
from torchrec_bls.errors import ProtocolError, RendezvousError
from torchrec_bls.lifetime import whole_at_forks


def attach(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    owner: int | None = None,
    deadline: float = 30.0,
    device: torch.device | None = None,
) -> None:
    """Makes a model of this process read the tables that another process serves.

    It needs no process group and loads nothing. It waits only for the process at the socket, which
    may end afterwards. The model gives the results of the sharded model there, bit for bit, in the
    same order of features, and follows its versions. It is called under torch.no_grad().

    Args:
        model: model that is not sharded, with the names of the model there. Its
            EmbeddingBagCollections and EmbeddingCollections, float or quantized, which may be on
            the device "meta", are replaced. All other weights are overwritten.
        path: path that a process of this host and user gave to `offer`.
        owner: rank whose process is gone; this process then publishes its tables. None: it
            publishes nothing.
        deadline: seconds until the tables must have been handed over.
        device: device of the embeddings: a GPU of CUDA then reads the tables, where they lie on
            the host. Its process must not be forked afterwards. None: the CPU.

    Raises:
        ValueError: `model` is another one than the served one, or is sharded already; or `owner` is
            no rank, or lives; or no clock counts to `deadline`; or there is no such GPU, or it
            can't read such tables. `model` stays as it was.
        BLSError: the driver does not register the tables for the GPU; the text says what to do.
        RendezvousError: nobody listens at `path`, or there is no memory or no descriptor left. Or
            the tables are drained at the moment, see `publish`.
        PeerTimeoutError: the other process is stopped or stuck.
        PeerDiedError: the other process ended meanwhile.
        ProtocolError: the other process refused, has another version, is another user's or in
            another container, or hands over something else than it announced.
    """
    where = os.fsdecode(path)
    check_deadline(deadline)
    if owner is not None:
        check_owner(owner)
    collections = collections_of(model)
    gpu = _gpu_of(device)
    with closing(connect(where, deadline)) as conversation:
        received = _receive(conversation, where, collections, gpu)
    read_tables(model, collections, received, owner)


def _gpu_of(device: torch.device | None) -> Gpu | None:
    if device is None or device.type == "cpu":
        return None
    if device.type != "cuda":
        raise ValueError(f"embeddings can be on the CPU or on a GPU of CUDA, not on '{device}'")
    return gpu_of(device)


@whole_at_forks()
def _receive(
    conversation: Conversation,
    where: str,
    collections: Mapping[str, Collection],
    gpu: Gpu | None,
) -> Received:
    with closing(Descriptors()) as descriptors:
        conversation.greet()
        conversation.be_greeted()
        content = conversation.receive(descriptors)
        if isinstance(content, dict) and "refused" in content:
            raise ProtocolError(f"the process at {where} hands nothing over: {content['refused']}")
        if isinstance(content, dict) and "drained" in content:
            raise RendezvousError(
                f"the process at {where} has no version to hand over, attach again when it has: "
                f"{content['drained']}"
            )
        manifest = Manifest.from_json(content, where)
        if manifest.host != this_process().host:
            raise ProtocolError(
                f"the process at {where} is in another container or on another host, where this "
                "one would not find new versions: run both in one PID namespace and one user "
                "namespace"
            )
        if manifest.descriptors != len(descriptors):
            raise ProtocolError(
                f"{where} announces {manifest.descriptors} descriptors and hands "
                f"{len(descriptors)} over: install one version of torchrec-bls in both processes"
            )
        check_same(collections, manifest.modules, where)
        return _adopted(manifest, collections, descriptors, where, gpu)


def _adopted(
    manifest: Manifest,
    collections: Mapping[str, Collection],
    descriptors: Descriptors,
    where: str,
    gpu: Gpu | None,
) -> Received:
    """Maps the tables that were handed over."""
    version, serial = manifest.version, manifest.serial
    all_tables, generations = [], []
    for module in manifest.modules:
        digest, owners = bytes.fromhex(module.digest), len(module.sizes)
        page = _native.ControlPage.adopt(descriptors.take(), owners, digest)
        tables = collections[module.name].tables(module, page, gpu)
        tables.check_places()
        pieces = [len(cut.pieces) for cut in tables.cuts]
        if pieces != module.pieces:
            raise ProtocolError(
                f"{where} hands over tables of '{module.name}' in {module.pieces} pieces, which "
                f"have {pieces}: install one version of torchrec-bls in both processes"
            )
        parts = [tables.adopt(owner, version, descriptors.take, where) for owner in range(owners)]
        all_tables.append(tables)
        generations.append(tables.generation(version, serial, parts))
    lead = all_tables[0]
    if lead.page.serial < serial:
        raise ProtocolError(
            f"{where} hands version {version!r} over as number {serial}, but on the control page "
            f"{lead.page.serial} is the last one: they are of different models"
        )
    label = (lead.owners, version, lead.digest)
    segment = _native.TableSegment.adopt(descriptors.take(), label)
    try:
        dense = dense_weights(segment, _native.FIRST_TABLE_OFFSET)
    except ValueError as error:
        raise ProtocolError(f"{where} hands over what are no dense weights: {error}") from error
    return Received(where, manifest.modules, all_tables, generations, dense or {})
