"""Writes what a training has changed, for services that refresh their tables by row."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardedModule

from torchrec_bls.checkpoints import DELTA_SUFFIX, Head, TablePart, write_part
from torchrec_bls.direct.arguments import check_is_version
from torchrec_bls.direct.dense_weights import is_plain
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.errors import PoisonedError, named
from torchrec_bls.lookup_notes import LookupNotes

_T = TypeVar("_T")

# Of the text that tells a version from others of its name, and of the sign before it.
_DIGITS = 8
# Kernels whose optimizers write to no other rows than those that a batch has looked up.
_BY_ROWS = ("fused", "fused_uvm", "fused_uvm_caching")
_DENSE = "dense"


class _Table(NamedTuple):
    """A table that is tracked.

    Attributes:
        tracked_as: its name in the tracker.
        changes_whole: whether a step may change rows that no batch has looked up.
        is_replicated: whether each rank has it whole.
        places: first row, first column and sizes of this rank's shards.
    """

    tracked_as: str
    changes_whole: bool
    is_replicated: bool
    places: list[tuple[int, int, torch.Size]]


class _Shard(NamedTuple):
    """A shard of a table on this rank."""

    first_row: int
    first_column: int
    rows: torch.Tensor


class _Asked(NamedTuple):
    """What a rank is asked to write.

    Attributes:
        version: name of the new version.
        base: version that the delta is applied to.
        digits: what tells the version from others of its name, if this is rank 0.
    """

    version: str
    base: str
    digits: str


class DeltaWriter:
    """Writes deltas of a model in training: the rows that batches have looked up since the last
    one, as they are then, and all dense weights.

    A delta is a folder `VERSION.delta`, which has one file of each rank. It appears when all files
    are there. `watch` applies it to the version `base`, in place of a whole checkpoint::

        writer = DeltaWriter(model, "checkpoints")
        ...  # train, and save the checkpoint "checkpoints/step-1000"
        writer.write("step-1100", base="step-1000")
        ...
        writer.write("step-1200")

    TorchRec's ModelDeltaTracker tells which rows are looked up, from here on. The model may have
    one already, which nobody else reads: it learns of lookups when a delta is written. Rows that
    anything else writes to are not noted: after `load_state_dict`, for example, go on with a
    checkpoint as base.

    Tables of data_parallel plans and of the kernel "dense" are written as a whole, since their
    optimizer may change all rows.

    Args:
        model: DistributedModelParallel of the training, with sharders of TorchRec or of this
            package, at bound 0.
        directory: folder of the deltas, the same for all ranks.

    Raises:
        ValueError: the model is no DistributedModelParallel, or one of several replicas; this
            TorchRec has no tracker; or the tracker can't tell which rows change: a feature is
            looked up in two tables, two tables have one name, or a table is not tracked or has a
            kernel that keeps rows elsewhere. Or a dense weight is no plain tensor.
    """

    def __init__(self, model: nn.Module, directory: str | os.PathLike[str]) -> None:
        self._model: Any = model
        self._directory = Path(directory)
        self._tracker = _tracker_of(model)
        self._tables = _tables_of(model, self._tracker)
        # The last writer of a model has its ids.
        self._mark = self._tracker.bls_writer = object()
        self._notes = LookupNotes(self._tracker)
        self._tracker.clear()
        self._tracker.step()  # what is looked up from now on is not what was read before
        # Ids that are in no delta yet, within the rank's shard, by the table's name in the tracker.
        self._touched: dict[str, torch.Tensor] = {}
        # Whether some have left the tracker, and may have gone nowhere.
        self._may_lack_ids = False
        self._last: str | None = None
        # Versions that the rows since the last delta do not lead on from.
        self._earlier: set[str] = set()

    @torch.no_grad()
    def write(self, version: str, base: str | None = None) -> str:
        """Writes a delta, collectively. All ranks call it between two steps: no batch has been
        looked up whose gradients are not applied. They wait for each other.

        If it fails on one rank, all ranks raise and no delta appears. The rows are in the next one.

        Args:
            version: name of the new version, and of the folder: printable text without "/", of at
                most 55 bytes, that begins with no dot.
            base: version that the delta is applied to. None: the one of the last `write`. After a
                checkpoint, and the first time, give the name of its file or folder. The checkpoint
                must have been saved since the last `write`, and since this object was made.

        Returns:
            The name with which the version serves: `version@` and 8 digits, which no other delta
            has.

        Raises:
            ValueError: a name can't be one; the folder is there already; there is no base; the base
                is older than the last `write`, or the ranks give different ones. Or a signal has
                interrupted an earlier call, so that rows may be unknown; the model was sharded
                anew; or there is another DeltaWriter of it. All ranks make a new one then.
            OSError: this rank can't write.
            PoisonedError: another rank has failed; the text says how.
        """
        digits, trained = secrets.token_hex(_DIGITS // 2), time.time()
        asked = self._on_all_ranks(lambda: self._checked(version, base, digits))
        given = {(each.version, each.base) for each in asked}
        if len(given) > 1:
            raise ValueError(
                f"the ranks write deltas of other versions or bases, {sorted(given)}: give the "
                "same on all ranks, and the name of a new checkpoint as base"
            )
        known_base, digits = asked[0].base, asked[0].digits
        head = Head(f"{version}@{digits}", known_base, self._rank, self._ranks, trained)
        folder = self._directory / f".{version}{DELTA_SUFFIX}.{digits}"
        try:
            self._on_all_ranks(lambda: self._write_own(folder, head))
            self._on_all_ranks(lambda: self._complete(folder, version))
        except BaseException:
            if self._rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._earlier |= _names(self._last) | _names(known_base)
        self._last = head.name
        self._touched = {}
        return head.name

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def _ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def _on_all_ranks(self, act: Callable[[], _T]) -> list[_T]:
        """Returns what `act` returns on each rank. If it fails on one, all raise."""
        made, error = None, None
        try:
            made = act()
        except BaseException as raised:  # a signal as well: the others wait
            error = raised
        outcome = (made, None if error is None else named(error))
        outcomes: list[Any] = [outcome]
        if self._ranks > 1:
            outcomes *= self._ranks
            dist.all_gather_object(outcomes, outcome)
        if error is not None:
            raise error
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise PoisonedError(f"rank {rank} can't write its part of the delta: {reason}")
        return [made for made, _ in outcomes]

    def _checked(self, version: str, base: str | None, digits: str) -> _Asked:
        """Returns what this rank is asked for."""
        if self._tracker.bls_writer is not self._mark:
            raise ValueError("another DeltaWriter was made for this model, and has its ids: use it")
        if self._may_lack_ids:
            raise ValueError(
                "an earlier write was interrupted, and not all rows are known that have changed: "
                "make a new DeltaWriter on all ranks, and then save a checkpoint as base"
            )
        check_is_version(version)
        if "/" in version or version[0] == "." or len(version.encode()) > 64 - 1 - _DIGITS:
            raise ValueError(
                f"version is {version!r}, but must name a folder: at most {64 - 1 - _DIGITS} bytes "
                'without "/", and no dot at the beginning'
            )
        if base is not None:
            check_is_version(base)
        if base in self._earlier:
            raise ValueError(
                f"base is {base!r}, but rows that have changed since that version are in a later "
                f"delta: give the version of the last one, {self._last!r}, or a newer checkpoint"
            )
        known = base or self._last
        if known is None:
            raise ValueError("there is no delta yet: give the name of a checkpoint as base")
        if self._rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._path_of(version).exists():
                raise ValueError(f"{self._path_of(version)} is there already: give a new name")
        return _Asked(version, known, digits)

    def _path_of(self, version: str) -> Path:
        return self._directory / f"{version}{DELTA_SUFFIX}"

    def _write_own(self, folder: Path, head: Head) -> None:
        """Writes this rank's file."""
        self._take_ids()
        state = self._model.state_dict()
        tables = {}
        for name, table in self._tables.items():
            if not table.is_replicated or head.rank == 0:
                part = self._part_of(name, table, list(_shards_of(name, state[name])))
                if part is not None:
                    tables[name] = part
        dense = _dense_of(state, self._tables) if head.rank == 0 else {}
        folder.mkdir(exist_ok=True)
        write_part(folder, head, tables, dense)

    def _complete(self, folder: Path, version: str) -> None:
        """Makes the delta appear, once all files are there."""
        if self._rank != 0:
            return
        there = len(list(folder.iterdir()))
        if there != self._ranks:
            raise ValueError(
                f"{folder} has {there} files of {self._ranks} ranks: give all ranks one directory, "
                "which their hosts share"
            )
        folder.rename(self._path_of(version))

    def _take_ids(self) -> None:
        """Takes the ids out of the tracker."""
        self._may_lack_ids = True
        self._notes.tell_tracker()
        # TorchRec can't tell that nothing was looked up.
        nothing = torch.empty(0, dtype=torch.int64, device=self._model.device)
        for table in self._tables.values():
            self._tracker.store.append(self._tracker.curr_batch_idx, table.tracked_as, nothing)
        for name, ids in self._tracker.get_unique_ids().items():
            known = self._touched.get(name, ids[:0])
            self._touched[name] = torch.unique(torch.cat([known, ids]))
        # What is looked up next counts as later, whoever calls the model.
        self._tracker.step()
        self._may_lack_ids = False

    def _part_of(self, name: str, table: _Table, shards: list[_Shard]) -> TablePart | None:
        """Returns the new rows in this rank's shards of a table; None: there are none."""
        if _places(shards) != table.places:
            raise ValueError(
                f"'{name}' was sharded anew, and its ids are those of the old shards: make a new "
                "DeltaWriter on all ranks, and then save a checkpoint as base"
            )
        if len({shard.first_row for shard in shards}) > 1:
            raise ValueError(
                f"'{name}' has shards of different rows on rank {self._rank}, and the tracker does "
                "not tell whose ids it has: plan it with one"
            )
        if not shards or not len(shards[0].rows):
            return None
        rows = len(shards[0].rows)
        if table.changes_whole:
            local = torch.arange(rows)
        else:
            local = self._touched.get(table.tracked_as, torch.empty(0, dtype=torch.int64)).long()
            # fbgemm takes the first row for an id that is out of range, and trains that.
            local = torch.unique(torch.where((local >= 0) & (local < rows), local, 0))
        if not len(local):
            return None
        columns = {
            shard.first_column: shard.rows.index_select(0, local.to(shard.rows.device)).cpu()
            for shard in shards
        }
        return TablePart(local.cpu() + shards[0].first_row, columns)


def _names(version: str | None) -> set[str]:
    """Returns the names by which a base may be meant."""
    return set() if version is None else {version, version.rpartition("@")[0] or version}


def _tracker_of(model: Any) -> Any:
    """Returns the model's tracker, which is made if there is none."""
    if not isinstance(model, DistributedModelParallel) or isinstance(model, DMPCollection):
        raise ValueError(
            f"the model is a {type(model).__name__}, but must be a DistributedModelParallel whose "
            "tables are there once"
        )
    try:
        from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
        from torchrec.distributed.model_tracker.types import Trackers, UpdateMode

        tracker = model.get_delta_tracker()
    except (ImportError, AttributeError) as error:
        raise ValueError("this TorchRec can't track rows: install torchrec 1.7 or later") from error
    if tracker is None:
        # TorchRec's own function for this wants a model with dense weights in training.
        holder = nn.Module()
        holder.module = model.module
        tracker = model.model_trackers[Trackers.DELTA_TRACKER.name] = ModelDeltaTrackerTrec(holder)
    consumers = list(tracker.per_consumer_batch_idx)
    if consumers != [tracker.DEFAULT_CONSUMER] or tracker.store.updateMode is not UpdateMode.NONE:
        raise ValueError(
            f"the model's tracker has the consumers {consumers}, or more than ids: leave "
            "consumers and tracking_mode of its configuration out"
        )
    return tracker


def _tables_of(model: Any, tracker: Any) -> dict[str, _Table]:
    """Returns the tables by their names in the model's state dict.

    Raises:
        ValueError: see DeltaWriter.
    """
    state = model.state_dict()
    features: dict[str, str] = {}
    tables = {}
    for tracked_as, of_table in tracker.fqn_to_feature_names().items():
        path, _, table = tracked_as.rpartition(".")
        name = f"{tracked_as}.weight"
        module = tracker.get_tracked_modules().get(path.rpartition(".")[0])
        if module is None or name not in state:
            raise ValueError(
                f"the tracker knows table '{table}' as '{tracked_as}', which is no table of the "
                "model: give tables names that no other module has"
            )
        for feature in of_table:
            if feature in features:
                raise ValueError(
                    f"feature '{feature}' is looked up in '{features[feature]}' and in '{name}', "
                    "and TorchRec's tracker notes its ids for one of them: copy the feature under "
                    "another name"
                )
            features[feature] = name
        planned = module.module_sharding_plan[table]
        is_replicated = not exchanged([planned.sharding_type])
        if planned.compute_kernel not in (*_BY_ROWS, _DENSE):
            raise ValueError(
                f"'{name}' has the kernel {planned.compute_kernel!r}, which keeps rows elsewhere: "
                f"plan it with one of {(*_BY_ROWS, _DENSE)}"
            )
        changes_whole = is_replicated or planned.compute_kernel == _DENSE
        places = _places(_shards_of(name, state[name]))
        tables[name] = _Table(tracked_as, changes_whole, is_replicated, places)
    for path, module in model.module.named_modules():
        below = [] if not isinstance(module, ShardedModule) else _below(path, state)
        if unknown := sorted(set(below) - tables.keys()):
            raise ValueError(
                f"the tracker does not know {unknown}: do not skip '{path}', and give tables names "
                "that no other table has"
            )
    _dense_of(state, tables)
    return tables


def _below(path: str, names: Iterable[str]) -> list[str]:
    """Returns the names of a module's weights."""
    return [name for name in names if not path or name.startswith(f"{path}.")]


def _shards_of(name: str, value: Any) -> Iterator[_Shard]:
    """Yields this rank's shards of a table."""
    if hasattr(value, "local_shards"):
        for shard in value.local_shards():
            first_row, first_column = shard.metadata.shard_offsets
            yield _Shard(first_row, first_column, shard.tensor)
    elif is_plain(name, value):
        yield _Shard(0, 0, value)
    else:
        raise ValueError(f"'{name}' is a {type(value).__name__}: shard without DTensors")


def _places(shards: Iterable[_Shard]) -> list[tuple[int, int, torch.Size]]:
    return [(shard.first_row, shard.first_column, shard.rows.shape) for shard in shards]


def _dense_of(state: Mapping[str, Any], tables: Mapping[str, _Table]) -> dict[str, torch.Tensor]:
    """Returns the dense weights by name."""
    dense = {name: value for name, value in state.items() if name not in tables}
    for name, value in dense.items():
        if not is_plain(name, value):
            raise ValueError(
                f"'{name}' is a {type(value).__name__}, but deltas have rows of tables and plain "
                "tensors: keep it as a buffer, or write checkpoints alone"
            )
    return dense
