"""A model in a process of its own that reads the tables which others serve."""

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrec_bls import _native
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import check_owner
from torchrec_bls.direct.dense_weights import dense_weights
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.offers.collections import (
    Collection,
    collections_of,
    terms_here,
    terms_there,
)
from torchrec_bls.direct.offers.conversation import Conversation, Descriptors, connect
from torchrec_bls.direct.offers.manifest import Manifest, OfferedModule
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.ownership import Ownership
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import BLSError, ProtocolError
from torchrec_bls.lifetime import whole_at_forks


@dataclass(frozen=True)
class _Received:
    """The checked content that another process handed over.

    Attributes:
        tables: tables of each module.
        generations: generation of each module, of the version that is served.
        dense: dense weights by name.
    """

    tables: list[SharedTables]
    generations: list[Generation]
    dense: Mapping[str, Any]


def attach(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    owner: int | None = None,
    deadline: float = 30.0,
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

    Raises:
        ValueError: `model` is another one than the served one, or is sharded already; or `owner` is
            no rank, or lives; or no clock counts to `deadline`. `model` stays as it was.
        RendezvousError: nobody listens at `path`, or there is no memory or no descriptor left.
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
    if not collections:
        raise ValueError(
            "the model has no EmbeddingBagCollection or EmbeddingCollection whose tables could be "
            "read: attach the model as it is before it is sharded"
        )
    with closing(connect(where, deadline)) as conversation:
        manifest, received = _receive(conversation, where, collections)
        dense = DenseState(model, [each.module for each in collections.values()])
        _check_dense(dense, received.dense, where)
        readers = _readers_of(where, owner, collections, manifest, received)
        if owner is not None:
            check_owner(owner, received.tables[0].owners)
        ownership = Ownership([tables.page for tables in received.tables])
        _change(model, readers, dense, received.dense, ownership, owner, conversation)


def _change(
    model: nn.Module,
    readers: Mapping[str, nn.Module],
    dense: DenseState,
    given: Mapping[str, Any],
    ownership: Ownership,
    owner: int | None,
    conversation: Conversation,
) -> None:
    """Takes the rank's place and makes the model read the tables. If a step fails, or a signal
    ends it, all is as it was."""
    collections = {name: model.get_submodule(name) for name in readers}
    before = dense.copy()
    had_it = owner is not None and ownership.is_own(owner)
    try:
        if owner is not None:
            ownership.take_over(owner)
        _replace(model, readers)
        _fill(DenseState(model, readers.values()), given)
        ServedModel.of(model)
        with suppress(BLSError):  # the other process has ended, and is not needed any more
            conversation.acknowledge()
    except BaseException:
        ServedModel.forget(model)
        _replace(model, collections)
        _fill(dense, before)
        if owner is not None and not had_it:  # nothing happens where it was not taken over
            ownership.give_up(owner)
        raise


def _replace(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


@whole_at_forks()
def _receive(
    conversation: Conversation, where: str, collections: Mapping[str, Collection]
) -> tuple[Manifest, _Received]:
    with closing(Descriptors()) as descriptors:
        conversation.greet()
        conversation.be_greeted()
        content = conversation.receive(descriptors)
        if isinstance(content, dict) and "refused" in content:
            raise ProtocolError(f"the process at {where} hands nothing over: {content['refused']}")
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
        for module in manifest.modules:
            _check_same(collections, module, where)
        _check_order(list(collections), [module.name for module in manifest.modules], where)
        return manifest, _adopted(manifest, collections, descriptors, where)


def _adopted(
    manifest: Manifest,
    collections: Mapping[str, Collection],
    descriptors: Descriptors,
    where: str,
) -> _Received:
    """Maps the tables that were handed over."""
    version, serial = manifest.version, manifest.serial
    all_tables, generations = [], []
    for module in manifest.modules:
        digest, owners = bytes.fromhex(module.digest), len(module.sizes)
        page = _native.ControlPage.adopt(descriptors.take(), owners, digest)
        tables = collections[module.name].tables(module, page)
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
    return _Received(all_tables, generations, dense or {})


def _check_same(collections: Mapping[str, Collection], module: OfferedModule, where: str) -> None:
    """Raises ValueError if a served module differs from this model's."""
    if module.name not in collections:
        raise ValueError(
            f"{where} serves a module '{module.name}', but this model has {sorted(collections)}: "
            "attach the same model"
        )
    if not module.name:
        raise ValueError(
            "the model is itself a collection, which can't be replaced: put it into a module, "
            "there and here"
        )
    here, there = terms_here(collections[module.name]), terms_there(module)
    for what, own in here.items():
        if own != there.get(what):
            raise ValueError(
                f"'{module.name}' has {what} {own} in this model, but {there.get(what)} at "
                f"{where}: attach the same model"
            )
    if here.keys() != there.keys():
        raise ValueError(
            f"'{module.name}' has no {sorted(there.keys() - here.keys())} in this model, but at "
            f"{where}: attach the same model"
        )


def _check_order(here: list[str], there: list[str], where: str) -> None:
    """Raises ValueError if a different module would be first: the first one's control page
    decides."""
    in_order = [name for name in here if name in there]
    if in_order != there:
        raise ValueError(
            f"the modules {there} at {where} are in the order {in_order} in this model: attach the "
            "same model"
        )


def _check_dense(dense: DenseState, given: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if the model can't have the dense weights that are handed over."""
    live = dense.current()
    without = sorted(
        name for name, value in live.items() if isinstance(value, torch.Tensor) and value.is_meta
    )
    if without:
        raise ValueError(
            f"{without} are on the device 'meta', which only the embedding modules may be on: make "
            "the rest of the model on the CPU"
        )
    dense.copy()  # each switch will
    try:
        dense.check(given, where)
    except ProtocolError as error:
        raise ValueError(f"{error}: attach the same model") from error


def _readers_of(
    where: str,
    owner: int | None,
    collections: Mapping[str, Collection],
    manifest: Manifest,
    received: _Received,
) -> dict[str, AttachedCollection]:
    """Returns the replacement of each collection."""
    readers = {}
    for module, tables, generation in zip(
        manifest.modules, received.tables, received.generations, strict=True
    ):
        collection = collections[module.name]
        at = f"{module.name}, attached to {where}"
        reads, check = collection.reads(at, tables, generation, owner, module)
        readers[module.name] = AttachedCollection(reads, check).train(collection.module.training)
    return readers


@outside_inference_mode
def _fill(dense: DenseState, given: Mapping[str, Any]) -> None:
    dense.load(given)
