import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.models import (
    EBC,
    EC,
    WEIGHTED,
    Kind,
    assert_same_bits,
    flatten,
    make_ids,
    shard,
)
from tests.processes import run
from torchrec_bls import BLSConfig, BoundedLagChannel, _native
from torchrec_bls.distributed.inputs.arrived_features import ArrivedFeatures

KEYS = ["a", "b"]


def plain(values: torch.dtype, is_weighted: bool) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        KEYS,
        values=torch.tensor([5, 1, 4, 1, 3], dtype=values),
        lengths=torch.tensor([2, 0, 1, 0, 1, 1], dtype=torch.int32),
        weights=torch.arange(5, dtype=torch.float32) if is_weighted else None,
    )


def arrived(channel: BoundedLagChannel, sent: KeyedJaggedTensor) -> ArrivedFeatures:
    """Features that this rank sent itself, whose message is gone."""
    tensors = sent.lengths(), sent.values(), sent.weights_or_none()
    _native.post_ids(channel.native, *tensors, len(KEYS), sent.stride(), [len(KEYS)], [])
    arrival = channel.wait()
    ids = _native.BatchIds(arrival.native, len(KEYS), [0])
    arrival.release()
    return ArrivedFeatures.of(ids, KEYS)


USES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda features: features,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda features: pickle.loads(pickle.dumps(features)),
    "tree_map": lambda features: tree_map(lambda t: t if t is None else t.clone(), features),
    "to": lambda features: features.to(torch.device("cpu")),
    "split": lambda features: KeyedJaggedTensor.concat(features.split([1, 1])),
}


def compare_uses(rank: int) -> None:
    channel = BoundedLagChannel(dist.group.WORLD, slot_bytes=4096, name="ids")
    for values in (torch.int32, torch.int64):
        for is_weighted in (False, True):
            expected = plain(values, is_weighted)
            for name, use in USES.items():
                features = arrived(channel, expected)
                assert "_values" not in vars(features), name
                found = use(features)
                assert found.keys() == KEYS, name
                assert found.stride() == 3, name
                assert found.length_per_key() == [3, 2], name
                for tensor in ("lengths", "values", "offsets", "weights_or_none"):
                    of_found, wanted = getattr(found, tensor)(), getattr(expected, tensor)()
                    if wanted is None:
                        assert of_found is None, (name, tensor)
                        continue
                    assert of_found.dtype == wanted.dtype, (name, tensor)
                    assert torch.equal(of_found, wanted), (name, tensor)
                with pytest.raises(AttributeError, match="no attribute 'nothing'"):
                    features.nothing  # noqa: B018


def change_ids_after_they_were_checked(rank: int) -> None:
    channel = BoundedLagChannel(dist.group.WORLD, slot_bytes=4096, name="ids")
    features = arrived(channel, plain(torch.int64, False))
    table, out = torch.arange(6.0).reshape(6, 1), torch.empty(5, 1)
    tables = _native.Tables([(table, False)] * len(KEYS))
    _native.copy_table_rows(tables, features.native, out)
    assert out.flatten().tolist() == [5, 1, 4, 1, 3]
    features.values()[3] = 6
    with pytest.raises(ValueError, match="id 6 of feature 1 of the lookup, whose table has 6 rows"):
        _native.copy_table_rows(tables, features.native, out)


def test_ids_that_were_changed_are_checked_again() -> None:
    run(1, change_ids_after_they_were_checked)


def test_features_are_those_that_were_sent() -> None:
    run(1, compare_uses)


def look_other_ids_up(rank: int, kind: Kind) -> None:
    """Between the exchange of ids and the lookup somebody puts other ids of the same sizes there,
    in the same memory or as another KeyedJaggedTensor."""
    ids = make_ids(kind, rank, 4)
    module = shard(kind, "table_wise", kind.bls_sharder(BLSConfig())).module.embeddings
    with torch.no_grad():
        first_rows = KeyedJaggedTensor(
            ids.keys(), torch.zeros_like(ids.values()), ids.weights_or_none(), ids.lengths()
        )
        expected = flatten(module(first_rows).wait())
        for in_place in (True, False):
            context = module.create_context()
            local = module.input_dist(context, ids).wait().wait()
            if in_place:
                for features in local:
                    features.values().zero_()
            else:
                local = [
                    KeyedJaggedTensor(
                        each.keys(),
                        torch.zeros_like(each.values()),
                        each.weights_or_none(),
                        each.lengths(),
                    )
                    for each in local
                ]
            found = module.compute_and_output_dist(context, local).wait()
            assert_same_bits(flatten(found), expected)


@pytest.mark.parametrize("kind", [EC, EBC, WEIGHTED], ids=["ec", "ebc", "weighted"])
def test_what_is_looked_up_is_what_the_lookup_is_given(kind: Kind) -> None:
    run(2, look_other_ids_up, kind)
