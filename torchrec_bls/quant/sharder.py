"""Sharders of TorchRec's quantized modules."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fused_params import (
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from torchrec_bls._deprecated import config_by_name
from torchrec_bls.collective.exchange_options import timeout_of
from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.direct.obstacles import find_obstacles, warn_of_exchange
from torchrec_bls.direct.sharing import NotRegisteredError
from torchrec_bls.distributed.config import BLSConfig, name_of_module
from torchrec_bls.distributed.output_device import gpu_of_outputs
from torchrec_bls.distributed.sharder import sharding_group
from torchrec_bls.quant.gpu_lookups import why_not_by_gpu
from torchrec_bls.quant.refusals import why_not
from torchrec_bls.quant.sharded_module import ShardedQuantCollection

_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
)
# The generators of sharding_plan use the second name.
_KERNELS = (EmbeddingComputeKernel.QUANT.value, EmbeddingComputeKernel.DENSE.value)
# TorchRec's word for quantized tables in host memory whose outputs are on a GPU.
_FOR_GPUS = (EmbeddingComputeKernel.QUANT_UVM.value,)
# Quantized modules have attributes of these names.
_OF_MODULE = (FUSED_PARAM_REGISTER_TBE_BOOL, FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS)
_OUTPUT_DTYPE = "output_dtype"


class QuantSharder:
    """Mix-in of the sharders. It comes before TorchRec's own class.

    Quantize the model as usual (`quantize_inference_model`, or `from_float` of the module), then
    shard it with DistributedModelParallel: each rank keeps its shards in their stored form. With
    lookup="direct" they are in shared memory, and a rank looks up its own batch in the shards of
    all ranks. With lookup="exchange" it asks the ranks for its rows, which travel in their stored
    form. The bound, slots and transport of the configuration are those of the exchanges
    (docs/design/quantized-tables.md).

    The parameters are TorchRec's, in its order, and the others by name.

    Args:
        fused_params: parameters of lookups, as TorchRec's sharders take them. The lookups of the
            module go on here. So only entries that say what these do are accepted: TorchRec's
            names for `register_tbes` and for split scales and shifts in the state dict. An
            "output_dtype" is ignored, as in TorchRec, which takes the module's.
        shardable_params: names of the tables that a planner may place, as in TorchRec.
        config: configuration without codecs. None: BLSConfig(lookup="auto"), which is "direct" if
            all ranks are on one host, and "exchange" otherwise; the ranks find out while they
            shard.
        checkpoint: state dict of the float model, with a [rows, columns] tensor of float32 or
            float16 for each table, under its name there. Each rank quantizes its own rows of it,
            and the module may be on the meta device. Or one of the quantized model, with uint8 rows
            as they are stored. None: the module has its weights.

    Raises:
        TypeError: `config` or `fused_params` is of another type.
        ValueError: codecs are given.
    """

    _tables_name: ClassVar[str]

    @config_by_name(BLSConfig)
    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        shardable_params: list[str] | None = None,
        *,
        config: BLSConfig | None = None,
        checkpoint: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        name = type(self).__name__
        if config is not None and not isinstance(config, BLSConfig):
            raise TypeError(f"{name}: config is {config!r}, but must be a BLSConfig")
        if fused_params is not None and not isinstance(fused_params, dict):
            raise TypeError(f"{name}: fused_params are {fused_params!r}, but must be a dict")
        super().__init__(fused_params, shardable_params)  # type: ignore[call-arg]
        self._config = config or BLSConfig(lookup="auto")
        self._checkpoint = checkpoint
        if self._config.codecs is not None:
            raise ValueError(
                f"{type(self).__name__}: stored rows travel as they are stored, and no "
                "codec makes less of them: leave codecs out of the BLSConfig"
            )

    @property
    def exchange_bound(self) -> int:
        """Returns the number of iterations that ranks may be apart, for the planner."""
        return self._config.bound

    def shard(
        self,
        module: Any,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantCollection:
        """Shards `module`, which is taken over. DistributedModelParallel calls it on every rank.

        Raises:
            ValueError: the module or its plan can't be sharded in this way, or `env` has no process
                group; the text says why.
            RendezvousError: a rank did not come, has no memory for its shards, or has other
                weights.
        """
        gpu = gpu_of_outputs(device)
        group = sharding_group(env)
        name = name_of_module(self._config, module_fqn or type(module).__name__)
        self._check_plan(params, _KERNELS if gpu is None else _FOR_GPUS)
        self._check_fused_params(module)
        reason = why_not(module, params, self._checkpoint)

        def sharded(reads_directly: bool) -> ShardedQuantCollection:
            return ShardedQuantCollection(
                module,
                self._tables_name,
                params,
                group,
                self._config,
                reads_directly,
                name,
                self._checkpoint,
                f"{module_fqn}." if module_fqn else "",
                gpu,
            )

        unread = "" if gpu is None else why_not_by_gpu(module)  # the same on all ranks
        if not self._reads_directly(group, name, reason, unread):
            return sharded(False)
        try:
            return sharded(True)
        except NotRegisteredError as error:
            if self._config.lookup == "direct":
                raise
            warn_of_exchange(group, name, str(error))
        return sharded(False)

    def _reads_directly(
        self, group: dist.ProcessGroup, name: str, reason: str, unread: str
    ) -> bool:
        """Decides on direct reads together with the other ranks, unless the config says
        "exchange".

        Args:
            group: the ranks.
            name: name of the module.
            reason: why this rank can't shard the module; empty if it can.
            unread: why no rank can read it directly; empty if nothing is known.
        """
        refusal, obstacle = reason, ""
        if self._config.lookup != "exchange":
            given = self._config.deadline
            deadline = timeout_of(group) if given is None else given
            refusal, apart = find_obstacles(group, name, deadline, reason)
            obstacle = apart or unread
        if self._config.lookup == "direct":
            refusal = refusal or obstacle
        if refusal:
            raise ValueError(
                f"{name} on {rank_name(group)}: it can't be sharded over processes. {refusal}"
            )
        if obstacle:
            warn_of_exchange(group, name, obstacle)
        return self._config.lookup != "exchange" and not obstacle

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types that a planner may choose from."""
        return list(_TYPES[:2])

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the compute kernels that a planner may choose from."""
        if compute_device_type == "cuda":
            return list(_FOR_GPUS)
        kernels: list[str] = super().compute_kernels(  # type: ignore[misc]
            sharding_type, compute_device_type
        )
        return kernels

    def _check_fused_params(self, module: Any) -> None:
        fused_params: dict[str, Any] = self.fused_params or {}  # type: ignore[attr-defined]
        for name, value in fused_params.items():
            if name == _OUTPUT_DTYPE:
                continue
            if name not in _OF_MODULE:
                cure = "lookups stay as the module was quantized: leave it out"
            elif value != getattr(module, name, False):
                cure = f"the module was quantized with {not value}: give both the same"
            else:
                continue
            raise ValueError(
                f"{type(self).__name__}: fused_params have '{name}': {value!r}, but {cure}"
            )

    def _check_plan(self, params: Mapping[str, ParameterSharding], kernels: Sequence[str]) -> None:
        for table, planned in params.items():
            for what, value, possible in (
                ("sharding type", planned.sharding_type, _TYPES),
                ("compute kernel", planned.compute_kernel, kernels),
            ):
                if value not in possible:
                    reason = (
                        ", since a stored row has one scale and shift for all of its columns"
                        if value == ShardingType.COLUMN_WISE.value
                        else ""
                    )
                    raise ValueError(
                        f"{type(self).__name__}: table '{table}' is planned with {what} {value}, "
                        f"but only {', '.join(possible)} are possible{reason}"
                    )


class BLSQuantEmbeddingBagCollectionSharder(
    QuantSharder,
    QuantEmbeddingBagCollectionSharder,  # type: ignore[misc]
):
    """Shards TorchRec's quantized EmbeddingBagCollections over processes; see QuantSharder."""

    _tables_name = "embedding_bags"


class BLSQuantEmbeddingCollectionSharder(
    QuantSharder,
    QuantEmbeddingCollectionSharder,  # type: ignore[misc]
):
    """Shards TorchRec's quantized EmbeddingCollections over processes; see QuantSharder."""

    _tables_name = "embeddings"
