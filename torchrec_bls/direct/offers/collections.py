"""The embedding modules of a model that is not sharded, as `attach` sees them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, PoolingType, data_type_to_dtype
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.quant.embedding_modules import (
    EmbeddingBagCollection as QuantEmbeddingBagCollection,
)
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from torchrec_bls import _native
from torchrec_bls.direct.float_tables import FloatTables
from torchrec_bls.direct.generation import FloatGeneration, Generation
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.offers.manifest import OfferedModule, OfferedTable
from torchrec_bls.direct.reads.agreement import not_of_words
from torchrec_bls.direct.reads.described_form import form_of
from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.direct.reads.float_reads import FloatReads
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.huge_pages import HugePages, huge_pages_for
from torchrec_bls.quant.batches import QuantInputCheck
from torchrec_bls.quant.gpu_lookups import why_not_by_gpu
from torchrec_bls.quant.lookups import Lookups
from torchrec_bls.quant.refusals import why_not_read
from torchrec_bls.quant.shared_rows import PlacedRows, RowsGeneration, SharedRows
from torchrec_bls.quant.stored_reads import StoredReads, output_of

_FLOAT_BYTES = 4
# Bytes of a cache line; no two tables share one.
_LINE = 64
_MEAN = PoolingType.MEAN


class Collection(ABC):
    """An EmbeddingBagCollection or EmbeddingCollection.

    Args:
        module: the module, which may be on the device "meta". It is not changed.

    Attributes:
        module: see above.
        pooled: whether it is an EmbeddingBagCollection.
        is_weighted: whether its ids have weights.
        with_ids: whether its output has the ids.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.pooled = hasattr(module, "is_weighted")
        self.is_weighted = bool(module.is_weighted()) if self.pooled else False
        self.with_ids = False if self.pooled else bool(module.need_indices())

    @property
    def configs(self) -> list[Any]:
        """Returns the EmbeddingBagConfig or EmbeddingConfig of each table."""
        return list(
            self.module.embedding_bag_configs() if self.pooled else self.module.embedding_configs()
        )

    @abstractmethod
    def terms(self) -> dict[str, object]:
        """Returns what a served module must have as well, beside the tables, by name."""

    @abstractmethod
    def alone(self, name: str, config: BLSConfig) -> OfferedModule:
        """Returns the description of the module if one process has all of its tables.

        Args:
            name: name of the module in its model.
            config: configuration of its lookups.

        Raises:
            ValueError: its tables can't be read directly.
        """

    def _alone(
        self,
        name: str,
        config: BLSConfig,
        huge_pages: HugePages,
        tables: Sequence[OfferedTable],
        digest: bytes,
        size: int,
        dtype: torch.dtype,
        form: Mapping[str, Any],
    ) -> OfferedModule:
        return OfferedModule(
            name=name,
            quantized=dtype == torch.uint8,
            pooled=self.pooled,
            weighted=self.is_weighted,
            bad_ids=config.bad_ids,
            form=form,
            tables=list(tables),
            sizes=[size],
            pieces=[],  # they follow from the tables
            dtype=str(dtype),
            huge_pages=huge_pages,
            digest=digest.hex(),
        )

    def _offered(self, config: Any, offsets: list[int]) -> OfferedTable:
        """Returns the description of a table of which one process has all rows."""
        rows, columns = config.num_embeddings, config.embedding_dim
        layout = TableLayout(
            config.name, rows, columns, config.data_type.name, (Shard(0, 0, rows, 0, columns),)
        )
        pooling = config.pooling.value if self.pooled else ""
        return OfferedTable(layout, offsets, list(config.feature_names), pooling)

    @abstractmethod
    def tables(
        self, offered: OfferedModule, page: _native.ControlPage, gpu: Gpu | None = None
    ) -> SharedTables:
        """Returns the tables that are offered.

        Args:
            offered: description of the module that another process serves.
            page: control page of that module.
            gpu: GPU that reads them; None: the CPU does.

        Raises:
            ValueError: they are laid out in another way than this module's; or the GPU can't read
                such tables.
            ProtocolError: a table does not lie in its segment.
        """

    @abstractmethod
    def reads(
        self,
        where: str,
        tables: Any,
        generation: Generation,
        owner: int | None,
        offered: OfferedModule,
    ) -> tuple[AnyReads, InputCheck]:
        """Returns lookups in the tables, and the check of their input.

        Args:
            where: name of the module and source of the tables, for messages.
            tables: what `tables` returned.
            generation: generation that is read.
            owner: rank whose tables this process publishes; None: it publishes nothing.
            offered: description of the module that another process serves.

        Raises:
            ProtocolError: the description does not fit the tables.
        """


class FloatCollection(Collection):
    """A float module."""

    def terms(self) -> dict[str, object]:
        """See Collection."""
        dtypes = {str(data_type_to_dtype(config.data_type)) for config in self.configs}
        return {"rows": "float", "weights of": sorted(dtypes)}

    def alone(self, name: str, config: BLSConfig) -> OfferedModule:
        """See Collection. Features are in the order of TorchRec's unsharded module."""
        tables, at = [], 0
        for table in self.configs:
            if table.data_type != DataType.FP32:
                raise ValueError(
                    f"'{name}' has table '{table.name}' of {table.data_type.name}, but only FP32 "
                    "and quantized tables are read directly: quantize it to FP16 by TorchRec's "
                    "quantize_inference_model"
                )
            tables.append(self._offered(table, [at]))
            at += -(-table.num_embeddings * table.embedding_dim * _FLOAT_BYTES // _LINE) * _LINE
        names = list(chain.from_iterable(get_embedding_names_by_table(self.configs)))
        means = [each.name for each in self.configs if self.pooled and each.pooling == _MEAN]
        form: dict[str, Any] = (
            {"names": names, "kernel_means": means, "division": None}
            if self.pooled
            else {"names": names, "with_ids": self.with_ids}
        )
        digest = digest_of([table.layout for table in tables])
        huge_pages = huge_pages_for(config.huge_pages, at)
        return self._alone(name, config, huge_pages, tables, digest, at, torch.float32, form)

    def tables(
        self, offered: OfferedModule, page: _native.ControlPage, gpu: Gpu | None = None
    ) -> FloatTables:
        """See Collection."""
        layouts = {table.layout.name: table.layout for table in offered.tables}
        dtype: torch.dtype = getattr(torch, offered.dtype.removeprefix("torch."))
        if gpu is not None and (reason := not_of_words(layouts.values(), dtype)):
            raise ValueError(f"'{offered.name}': {reason}")
        return FloatTables(
            page,
            bytes.fromhex(offered.digest),
            layouts,
            offered.sizes,
            offered.huge_pages,
            {
                (table.layout.name, shard): offset
                for table in offered.tables
                for shard, offset in zip(table.layout.shards, table.offsets, strict=True)
            },
            dtype,
            gpu=gpu,
        )

    def reads(
        self,
        where: str,
        tables: FloatTables,
        generation: Generation,
        owner: int | None,
        offered: OfferedModule,
    ) -> tuple[FloatReads, InputCheck]:
        """See Collection."""
        assert isinstance(generation, FloatGeneration)
        configs = self.configs
        form = form_of(offered.form, configs, offered.pooled)
        check = InputCheck(offered.name, configs, offered.weighted, offered.bad_ids)
        return FloatReads(where, tables, generation, None, owner, configs, form), check


class QuantCollection(Collection):
    """A quantized module. Where its rows lie, it says itself."""

    @property
    def configs(self) -> list[Any]:
        """See Collection. They are in the order of the tables' memory."""
        return [each for tables in self.module._key_to_tables.values() for each in tables]

    def terms(self) -> dict[str, object]:
        """See Collection."""
        output = output_of(self.module)
        return {
            "rows": "quantized",
            "output of": output["output"],
            "row alignment": output["row_alignment"],
        }

    def alone(self, name: str, config: BLSConfig) -> OfferedModule:
        """See Collection."""
        if reason := why_not_read(self.module):
            raise ValueError(f"'{name}' can't be read directly: {reason}")
        tables = [self._offered(table, []) for table in self.configs]
        lookups = self._lookups(config.huge_pages)
        shards = {table.layout.name: table.layout.shards for table in tables}
        rows = PlacedRows.of(lookups.tables, shards, lookups.huge_pages)
        size, form = rows.size_of(0), output_of(self.module)
        return self._alone(
            name, config, lookups.huge_pages, tables, rows.digest, size, torch.uint8, form
        )

    def tables(
        self, offered: OfferedModule, page: _native.ControlPage, gpu: Gpu | None = None
    ) -> SharedRows:
        """See Collection."""
        if reason := why_not_read(self.module):
            raise ValueError(f"'{offered.name}' can't read tables of other processes: {reason}")
        if gpu is not None and (reason := why_not_by_gpu(self.module)):
            raise ValueError(f"'{offered.name}' can't be read by a GPU: {reason}")
        rows = PlacedRows.of(
            self._lookups(offered.huge_pages).tables,
            {table.layout.name: table.layout.shards for table in offered.tables},
            offered.huge_pages,
        )
        if rows.digest.hex() != offered.digest:
            raise ValueError(
                f"'{offered.name}' places its rows in another way than the module that is served: "
                "attach the same model, with the same versions of torchrec and torchrec-bls"
            )
        layouts = {table.layout.name: table.layout for table in offered.tables}
        sizes, pages = offered.sizes, offered.huge_pages
        return SharedRows(page, rows.digest, layouts, sizes, pages, rows, gpu=gpu)

    def reads(
        self,
        where: str,
        tables: SharedRows,
        generation: Generation,
        owner: int | None,
        offered: OfferedModule,
    ) -> tuple[StoredReads, InputCheck]:
        """See Collection."""
        assert isinstance(generation, RowsGeneration)
        lookups = self._lookups(offered.huge_pages)
        check = QuantInputCheck(offered.name, self.configs, offered.weighted, offered.bad_ids)
        reads = StoredReads(
            where, tables, generation, None, owner, self.configs, self.module, lookups, check
        )
        return reads, check

    def _lookups(self, huge_pages: HugePages | None) -> Lookups:
        children = self.module.embedding_bags if self.pooled else self.module.embeddings
        return Lookups(self.module, children, huge_pages)


def collections_of(model: nn.Module) -> dict[str, Collection]:
    """Returns the embedding modules of a model that is not sharded, by name.

    Raises:
        ValueError: there is none, or the model is one.
    """
    found: dict[str, Collection] = {}
    for name, module in model.named_modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            found[name] = FloatCollection(module)
        elif type(module) in (QuantEmbeddingBagCollection, QuantEmbeddingCollection):
            found[name] = QuantCollection(module)
    if not found:
        raise ValueError(
            "the model has no EmbeddingBagCollection or EmbeddingCollection whose tables could be "
            "read: attach the model as it is before it is sharded"
        )
    if "" in found:
        raise ValueError(
            "the model is itself a collection, which can't be replaced: put it into a module, "
            "there and here"
        )
    return found


def terms_here(collection: Collection) -> dict[str, object]:
    """Returns what a module is, by the name of each of its features."""
    tables: dict[str, object] = {
        f"table '{config.name}'": (
            config.num_embeddings,
            config.embedding_dim,
            config.data_type.name,
            list(config.feature_names),
            config.pooling.value if collection.pooled else "",
        )
        for config in collection.configs
    }
    kind: dict[str, object] = {
        "pooled embeddings": collection.pooled,
        "weighted ids": collection.is_weighted,
        "ids in its output": collection.with_ids,
    }
    return {**collection.terms(), **kind, **tables}


def terms_there(module: OfferedModule) -> dict[str, object]:
    """Returns the same of a module that another process serves."""
    tables: dict[str, object] = {
        f"table '{table.layout.name}'": (
            table.layout.rows,
            table.layout.columns,
            table.layout.dtype,
            table.features,
            table.pooling,
        )
        for table in module.tables
    }
    of_rows: dict[str, object] = (
        {
            "rows": "quantized",
            "output of": module.form.get("output"),
            "row alignment": module.form.get("row_alignment"),
        }
        if module.quantized
        else {"rows": "float", "weights of": [module.dtype]}
    )
    kind: dict[str, object] = {
        "pooled embeddings": module.pooled,
        "weighted ids": module.weighted,
        "ids in its output": bool(module.form.get("with_ids", False)),
    }
    return {**of_rows, **kind, **tables}
