"""The change of a model that is not sharded into one that reads tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrec_bls.direct.arguments import check_owner
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.offers.collections import Collection, terms_here, terms_there
from torchrec_bls.direct.offers.manifest import OfferedModule
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.ownership import Ownership
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import ProtocolError


@dataclass(frozen=True)
class Received:
    """The checked tables of a model, and its dense weights.

    Attributes:
        where: source of the tables, for messages.
        modules: modules that read tables.
        tables: tables of each module.
        generations: generation of each module, of the version that is served.
        dense: dense weights by name.
    """

    where: str
    modules: Sequence[OfferedModule]
    tables: list[SharedTables]
    generations: list[Generation]
    dense: Mapping[str, Any]


def read_tables(
    model: nn.Module,
    collections: Mapping[str, Collection],
    received: Received,
    owner: int | None,
    *,
    has_place: bool = False,
) -> None:
    """Makes a model read tables. If a step fails, or a signal ends it, all is as it was.

    Args:
        model: model that is not sharded.
        collections: its embedding modules by name, which are replaced.
        received: what it reads.
        owner: rank whose tables this process publishes from now on; None: it publishes nothing.
        has_place: whether it does so already.

    Raises:
        ValueError: `owner` is no rank, or its process lives; or the model can't have the dense
            weights.
        ProtocolError: the tables do not fit the model.
    """
    dense = DenseState(model, [each.module for each in collections.values()])
    _check_dense(dense, received.dense, received.where)
    readers = _readers_of(owner, collections, received)
    if owner is not None:
        check_owner(owner, received.tables[0].owners)
    ownership = Ownership([tables.page for tables in received.tables])
    taken = None if has_place else owner
    _change(model, readers, dense, received.dense, ownership, taken)


def check_same(
    collections: Mapping[str, Collection], modules: Sequence[OfferedModule], where: str
) -> None:
    """Raises ValueError if served modules differ from a model's.

    Args:
        collections: embedding modules of the model, by name.
        modules: modules that another process serves.
        where: place of that process, for messages.
    """
    for module in modules:
        _check_module(collections, module, where)
    _check_order(list(collections), [module.name for module in modules], where)


def _change(
    model: nn.Module,
    readers: Mapping[str, nn.Module],
    dense: DenseState,
    given: Mapping[str, Any],
    ownership: Ownership,
    owner: int | None,
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


def _check_dense(dense: DenseState, given: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if the model can't have the dense weights that are handed over."""
    check_has_memory(dense)
    dense.copy()  # each switch will
    try:
        dense.check(given, where)
    except ProtocolError as error:
        raise ValueError(f"{error}: attach the same model") from error


def check_has_memory(dense: DenseState) -> None:
    """Raises ValueError if dense weights of a model are on the device "meta"."""
    live = dense.current()
    without = sorted(
        name for name, value in live.items() if isinstance(value, torch.Tensor) and value.is_meta
    )
    if without:
        raise ValueError(
            f"{without} are on the device 'meta', which only the embedding modules may be on: make "
            "the rest of the model on the CPU"
        )


def _readers_of(
    owner: int | None,
    collections: Mapping[str, Collection],
    received: Received,
) -> dict[str, AttachedCollection]:
    """Returns the replacement of each collection."""
    readers = {}
    for module, tables, generation in zip(
        received.modules, received.tables, received.generations, strict=True
    ):
        collection = collections[module.name]
        at = f"{module.name}, attached to {received.where}"
        reads, check = collection.reads(at, tables, generation, owner, module)
        readers[module.name] = AttachedCollection(reads, check).train(collection.module.training)
    return readers


def _check_module(collections: Mapping[str, Collection], module: OfferedModule, where: str) -> None:
    """Raises ValueError if a served module differs from this model's."""
    if module.name not in collections:
        raise ValueError(
            f"{where} serves a module '{module.name}', but this model has {sorted(collections)}: "
            "attach the same model"
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


@outside_inference_mode
def _fill(dense: DenseState, given: Mapping[str, Any]) -> None:
    dense.load(given)
