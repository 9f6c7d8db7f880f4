"""An interrupted call fails all ranks; it never makes one batch's rows another's."""

import warnings
from typing import Any

import pytest
import torch

from tests.distributed import models
from tests.processes import run
from tests.tiers import slow_but
from torchrec_bls import BLSConfig, _native, bounded_lag_modules
from torchrec_bls.errors import BLSError, PoisonedError

KINDS = {kind.name: kind for kind in (models.EC, models.EBC)}


def interrupt_after(name: str, call: int) -> None:
    """Has native function `name` interrupted after its `call`-th call, as a signal does that came
    during it: its message is out."""
    function = getattr(_native, name)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = function(*arguments)
        if calls == call:
            raise KeyboardInterrupt
        return result

    setattr(_native, name, interrupted)


def interrupt(rank: int, kind: models.Kind, name: str, bound: int) -> None:
    model = models.shard(kind, "table_wise", kind.bls_sharder(BLSConfig(bound=bound, deadline=60)))
    if rank == 1:
        interrupt_after(name, 3)
    interrupted_at = None
    errors: list[BaseException] = []
    with torch.no_grad():
        for step in range(6):
            try:
                models.arrived(model(models.Batch(models.make_ids(kind, 10 * step + rank, 4))))
            except KeyboardInterrupt:
                interrupted_at = step
            except BLSError as error:
                errors.append(error)
    if rank == 1:
        # The first batch may take another way.
        assert interrupted_at in (2, 3) and len(errors) == 5 - interrupted_at, errors
    else:
        assert all(isinstance(error, PoisonedError) for error in errors) and len(errors) >= 2
        assert "rank 1 failed" in str(errors[0]) and "KeyboardInterrupt" in str(errors[0])


@pytest.mark.parametrize(
    ("bound", "kind", "name"),
    slow_but(
        [(0, "ec", "post_table_rows"), (0, "ebc", "collect_columns"), (1, "ec", "post_ids")],
        [
            (bound, kind, name)
            for bound in (0, 1)
            for kind, name in (
                ("ec", "post_ids"),
                ("ec", "post_table_rows"),
                ("ebc", "post_ids"),
                ("ebc", "collect_columns"),
            )
        ],
    ),
)
def test_an_interrupt_after_a_message_has_left_fails_all_ranks(
    bound: int, kind: str, name: str
) -> None:
    run(2, interrupt, KINDS[kind], name, bound)


def warn_as_an_error(rank: int) -> None:
    # The warning of a message that is pulled came between the post and its bookkeeping once.
    kind = models.EC
    config = BLSConfig(slot_bytes=1 << 12, deadline=60)
    ours = models.shard(kind, "table_wise", kind.bls_sharder(config))
    theirs = models.shard(kind, "table_wise", kind.torchrec_sharder())
    with torch.no_grad():
        for step in range(6):
            ids = models.make_ids(kind, 10 * step + rank, 2000)
            expected = models.flatten(theirs(models.Batch(ids)))
            if step == 2:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    try:
                        output = models.flatten(ours(models.Batch(ids)))
                    except Exception as error:
                        assert "slots have 4096" in str(error) or isinstance(error, BLSError)
                        return
            else:
                try:
                    output = models.flatten(ours(models.Batch(ids)))
                except BLSError:
                    return
            assert all(torch.equal(output[name], expected[name]) for name in expected)


def test_a_warning_that_is_an_error_gives_no_wrong_rows() -> None:
    run(2, warn_as_an_error)


def lose_a_handle(rank: int) -> None:
    model = models.shard(
        models.EC, "table_wise", models.EC.bls_sharder(BLSConfig(bound=1, deadline=60))
    )
    with torch.no_grad():
        models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 4))))
        (module,) = bounded_lag_modules(model).values()
        exchange = module._bls.exchanges.of("table_wise", "embeddings")
        output = model(models.Batch(models.make_ids(models.EC, 10 + rank, 4)))
        exchange._window.posts.popleft()
        del output
        torch.distributed.barrier()  # a failure reaches ranks that are still posting this batch
        with pytest.raises(BLSError, match="arrived for what was posted as"):
            models.arrived(model(models.Batch(models.make_ids(models.EC, 20 + rank, 4))))


def test_an_arrival_is_never_taken_for_another_posts() -> None:
    run(2, lose_a_handle)


def leave_out_an_exchange(rank: int) -> str:
    """Rank 1 does not look up one batch: what it sends next has the same size."""
    model = models.shard(
        models.EC, "table_wise", models.EC.bls_sharder(BLSConfig(bound=1, deadline=60))
    )
    (module,) = bounded_lag_modules(model).values()
    outputs = []
    with pytest.raises(BLSError) as raised, torch.no_grad():
        for step in range(4):
            ids = models.make_ids(models.EC, 7, 4)
            if rank == 1 and step == 2:
                context = module.create_context()
                module.input_dist(context, ids).wait().wait()
            else:
                outputs.append(model(models.Batch(ids)))
        for output in outputs:
            models.arrived(output)
    return str(raised.value)


def test_a_rank_that_leaves_out_an_exchange_is_found_out() -> None:
    told = " ".join(run(2, leave_out_an_exchange))
    second, third = "forward 2, call 0", "forward 3, call 0"
    assert (
        f"rank 1 sent what belongs to {third}, but this rank waits for {second}" in told
        or f"rank 0 sent what belongs to {second}, but this rank waits for {third}" in told
    )


def fail_in_a_lookup(rank: int) -> None:
    model = models.shard(models.EC, "table_wise", models.EC.bls_sharder(BLSConfig(deadline=60)))
    (module,) = bounded_lag_modules(model).values()
    with torch.no_grad():
        models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 4))))
        if rank == 1:
            module._bls.lookup_tables = None
            module._lookups = None
            with pytest.raises(TypeError):
                models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 4))))
        else:
            with pytest.raises(PoisonedError, match=r"rank 1 failed: .*lookup failed: TypeError"):
                models.arrived(model(models.Batch(models.make_ids(models.EC, rank, 4))))


def test_a_lookup_that_fails_fails_all_ranks_at_once() -> None:
    run(2, fail_in_a_lookup)
