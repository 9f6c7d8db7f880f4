"""New weights for models that read their tables directly, while the models serve.

docs/design/generations.md describes the protocol, and says why no batch sees two versions.
"""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from torchrec_bls.checkpoints import open_checkpoint
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import check_is_version, check_owner, check_version
from torchrec_bls.direct.new_weights import CheckpointWeights
from torchrec_bls.direct.serving.probe import Probe
from torchrec_bls.direct.serving.publisher import Publication
from torchrec_bls.direct.serving.reading_modules import reading_modules
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.serving.serving_state import ServingState


def publish(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    probe: Probe | None = None,
    drain: bool = False,
    version: str | None = None,
    owner: int | None = None,
    deadline: float = 60.0,
) -> Publication:
    """Announces this rank's part of a version of a model's weights.

    It is no collective: each rank calls it at its own time, in any thread, while batches are
    served. Once all ranks have announced the same version, each process changes to it between two
    of its batches, in all tables and the dense weights at once. Until then, and if one of the calls
    fails, all ranks stay with the old one. Afterwards the model's parameters show the new version.

    A table, or several small ones together, whose rows in the state dict or checkpoint are those
    of the version before, byte for byte, is not written again: see `Publication.bytes_reused`. That
    needs one state dict or checkpoint before this one; weights that were loaded into the model are
    all written.

    A rank has at most one version announced that does not serve yet. A call with another version
    waits for that one. It withdraws it if another rank has announced something else, and so has
    skipped it, or at the deadline. A call with the version that serves, or that this rank has
    announced already, announces nothing; a state dict replaces weights that were written in place
    before. A version that serves but went with an owner that died is announced anew. An earlier
    version may be published again.

    There is memory for both versions until all processes have changed. A process without batches
    keeps its version until its next batch, even if several were published since.

    Args:
        model: a DistributedModelParallel, or a module in it, that has been called once; or an
            attached model. Later calls of it see new versions.
        state_dict: new weights, with all names of `model.state_dict()`. Tables are whole tensors,
            or ShardedTensors with this rank's shards. Quantized tables are whole tensors: float32
            or float16 weights, of which this rank quantizes its own rows, or uint8 rows as they are
            stored. Dense weights are copied. None, without a checkpoint: the weights that the model
            has now, e.g. after `load_state_dict`. If they were written to, this process's next
            batches raise until all ranks have published. Quantized tables must be the same on all
            ranks then: a page may have rows of two.
        checkpoint: path of new weights in files, with the same names: see `open_checkpoint`. This
            rank reads its own rows, in steps. More tables than the model has are refused, and other
            entries that it lacks are ignored.
        probe: what the version must pass before it is announced, where one rank has all tables: a
            function of a copy of the model with the new weights, which raises what is wrong with
            them; or requests with bounds of all numbers in their answers, as
            `[((batch,), 0.0, 1.0)]`. Bounds are numbers, or tensors that broadcast to the answer.
            The calls run in this thread, without autograd. Modules of the model are copied, except
            its tables.
        drain: whether all processes let go of the version that serves before this one is made, for
            a host that can't hold two. In between forwards raise DrainedError, and
            `ServingState.drained_for` names this version; processes without batches follow by
            themselves. One rank has all tables then. The rows are read twice: once before, so that
            what can't be published drains nothing. If all readers have let go and the version can't
            be made after all, no version serves until one is published.
        version: name of the version, the same on all ranks, such as that of a checkpoint: 1 to 64
            bytes of printable text. It may be left out if one rank has all tables; then each call
            makes a version of its own.
        owner: rank whose process is gone; this process publishes its tables. That takes a state
            dict with the tables as whole tensors. If the state dict has all dense weights as well,
            they are published for processes that only read.
        deadline: seconds until a version that other ranks have not announced is withdrawn for this
            one. With `drain` also the seconds in which all processes must let go.

    Raises:
        ValueError: the model does not read all its tables directly, a weight is missing or of a
            wrong shape, dtype, layout or device, or the owner is no rank or alive. Or the version
            has no name, though there are several ranks; or another rank has withdrawn it and
            announced another one, which the text names. Or this process was forked from the one
            that shared the tables or attached to them. Or a table's parameter was replaced or
            converted; weights of tables are NaN or infinite; the checkpoint is incomplete, or can't
            be read; dense state can't be loaded, or not be handed to other processes; or weights
            were written to before this process saw the version that serves. Or it does not pass the
            probe. Nothing is announced.
        RendezvousError: there is no memory for two versions. Nothing is announced.
        PeerTimeoutError: another thread of this process has not finished publishing, or another
            process has not finished publishing for `owner`. Or, with `drain`, processes that the
            text names have not let go of the version that serves, which serves on.
    """
    check_deadline(deadline)
    if version is not None:
        check_version(version)
    if state_dict is not None and checkpoint is not None:
        raise ValueError("give the new weights as a state_dict or as a checkpoint, not as both")
    served = ServedModel.of(model)
    if owner is not None:
        check_owner(owner, served.reads[0].tables.owners)
    is_for_other = owner is not None and owner != served.weights.rank
    with served.failures_counted():
        if is_for_other and probe is not None:
            raise ValueError(
                f"a probe runs where the tables are owned: attach(owner={owner}), and publish there"
            )
        if is_for_other and drain:
            raise ValueError(
                f"tables are drained where they are owned: attach(owner={owner}), and publish there"
            )
        opened = nullcontext() if checkpoint is None else open_checkpoint(checkpoint)
        with opened as found:
            given = state_dict if found is None else CheckpointWeights(found)
            new = None if given is None else served.whole(model, given)
            if owner is not None and is_for_other:
                return served.weights.publish_for(owner, version, new, deadline)
            return served.weights.publish(version, new, deadline, probe, drain)


def publish_rows(
    model: nn.Module,
    rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    *,
    version: str,
    base: str,
    dense: Mapping[str, Any] | None = None,
    probe: Probe | None = None,
    trained: float | None = None,
    deadline: float = 60.0,
) -> Publication:
    """Announces a version of a model's weights that differs from the one before in some rows, and
    in dense weights.

    The rows are written where they lie, to the one of two copies of their tables that does not
    serve. So it takes about as long as to write these rows twice, however large the tables are, and
    every batch sees exactly one version. The first call makes the two copies of a table, and so
    does the first one after a `publish` of the whole: it takes as long as that. Until all processes
    have gone over then, there is memory for the version before, too. Two tables that share a piece
    (see `Publication.bytes_reused`) have copies together.

    A process that is inside a batch of an older version is waited for. One without batches is not.

    Args:
        model: an attached model of the one process that owns all tables, as a keeper has it.
        rows: new rows, by the names of the tables' weights in a state dict of the model, as for
            `publish`. Ids are int64 or int32, [rows]. Of an id that comes twice the last row
            counts. Rows are [rows, columns], of the table's dtype; those of quantized tables are
            float32 or float16, and are quantized. Tables without new rows may be left out.
        version: name of the new version, as for `publish`.
        base: version that the rows were changed in, which must serve.
        dense: new dense weights by their names in the model's state dict, of the model's dtypes and
            shapes. They are copied. Those that are left out stay those of `base`. None: all stay.
        probe: what the version must pass before it is announced, as for `publish`.
        trained: when a training had these rows, in seconds as `time.time()` has them, for
            `ServingState.trained`. None: that is unknown.
        deadline: seconds to wait for processes that are inside a batch of an older version, and for
            another thread of this process that publishes.

    Raises:
        ValueError: the model does not read all its tables directly; this process does not own all
            tables, has loaded them itself, or was forked from the one that owns them; another
            version than `base` serves; `version` is no name, or that of `base`; a table is unknown;
            ids or rows have another dtype or shape than the table's; an id is out of range; rows
            have NaN or infinite weights; or a dense weight is unknown, has another dtype or shape,
            or is refused by its module; or `trained` is no time. Nothing is written. Or the version
            does not pass the probe, and is not announced.
        RendezvousError: there is no memory for the copies. Nothing is written.
        PeerTimeoutError: processes that the text names are still inside a batch of an older
            version, or another thread of this process has not finished publishing. Nothing is
            announced.
    """
    check_deadline(deadline)
    check_version(version)
    check_is_version(base)
    if trained is not None and not 0 <= trained < float("inf"):
        raise ValueError(f"trained is {trained!r}, but must be seconds since 1970, or None")
    served = ServedModel.of(model)
    with served.failures_counted():
        prefix = served.prefix_within(model)
        whole = {f"{prefix}{name}": pair for name, pair in rows.items()}
        if dense is not None:
            dense = {f"{prefix}{name}": value for name, value in dense.items()}
        return served.weights.publish_rows(version, base, whole, dense, probe, trained, deadline)


def version_of(model: nn.Module) -> str:
    """Returns the version of the weights that the last batch of `model` saw.

    It is the name that `publish` was given, "(first forward)" before that, and "(drained)" while no
    version serves. It is empty if tables are not read directly, and before the first batch of float
    tables."""
    return next(iter(reading_modules(model).values())).version


def serving_state(model: nn.Module) -> ServingState:
    """Returns what this process serves of a model, and which ranks' processes are gone.

    Args:
        model: model as for `publish`.

    Raises:
        ValueError: the model does not read all its tables directly.
    """
    return ServedModel.of(model).state()
