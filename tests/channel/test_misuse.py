"""A caller's mistakes are ValueErrors that say what to do, and change nothing."""

import re

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from tests.processes import run
from tests.tiers import network_is_slow
from torchrec_bls import BoundedLagChannel


def channel(bound: int = 0) -> BoundedLagChannel:
    return BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=4096, name="ids")


def refused(message: str) -> "pytest.RaisesExc[ValueError]":
    return pytest.raises(ValueError, match=re.escape(message))


def post_unsuitable_tensors(rank: int) -> None:
    with channel() as ids:
        with refused("a tensor is on meta, but only CPU tensors can be posted"):
            ids.post([[torch.zeros(3, device="meta")]])
        matrix = torch.zeros(3, 4)
        for odd in (matrix.t(), matrix[:, ::2], matrix[:1].expand(3, 4), torch.zeros(8)[::2]):
            with refused("post contiguous tensors or 2-D ones with contiguous rows"):
                ids.post([[odd]])
        with FakeTensorMode():
            fake = torch.zeros(3)
        for hollow in (fake, matrix.to_sparse()):
            with refused("has no memory that can be posted: post a dense one"):
                ids.post([[hollow]])
        with pytest.raises(TypeError, match="only tensors can be posted, and no list"):
            ids.post([[[1, 2]]])  # type: ignore[list-item]
        assert ids.post([[matrix]]) == 0


def post_the_wrong_number(rank: int) -> None:
    with channel() as ids:
        with refused("a post has one message per rank: 1, not 2"):
            ids.post([[], []])
        with refused("17 parts, at most 16 are possible"):
            ids.post([[torch.zeros(1)] * 17])
        assert ids.post([[torch.zeros(1)] * 16]) == 0


def post_too_often(rank: int) -> None:
    with channel(bound=1) as ids:
        ids.post([[]])
        ids.post([[]])
        with refused("channel 'ids' on rank 0 has bound 1 and 2 posts that are not released"):
            ids.post([[]])
        with ids.wait(), refused("wait for and release the oldest before the next post"):
            ids.post([[]])
        assert ids.post([[]]) == 2


def wait_without_a_post(rank: int) -> None:
    with channel() as ids:
        with refused("channel 'ids' on rank 0 has no post to wait for: call post first"):
            ids.wait()
        ids.post([[]])
        ids.wait().release()
        with refused("call post first"):
            ids.wait()


def read_after_release(rank: int) -> None:
    with channel() as ids:
        ids.post([[torch.ones(2)]])
        with ids.wait() as arrival:
            assert arrival.tensor(0, 0, torch.float32).tolist() == [1, 1]
        for read in (lambda: arrival.tensor(0), lambda: arrival.parts(0)):
            with refused("the messages of sequence 0 were released: read them before release"):
                read()
        arrival.release()  # a second time does nothing
        ids.post([[torch.zeros(2)]])
        assert ids.wait().sequence == 1


def release_out_of_order(rank: int) -> None:
    with channel(bound=2) as ids:
        for value in range(3):
            ids.post([[torch.tensor([value])]])
        first, second, third = ids.wait(), ids.wait(), ids.wait()
        with refused("sequence 0 of channel 'ids' has to be released before sequence 2"):
            third.release()
        first.release()
        second.release()
        assert third.tensor(0, 0, torch.int64).tolist() == [2]
        third.release()


def read_what_is_not_there(rank: int) -> None:
    with channel() as ids:
        ids.post([[torch.zeros(3, dtype=torch.uint8), torch.empty(0)]])
        with ids.wait() as arrival:
            with refused("part 0 from rank 0 has 3 bytes, which is no multiple of torch.float32's"):
                arrival.tensor(0, 0, torch.float32)
            with pytest.raises(IndexError, match="part 2 of 2 from rank 0"):
                arrival.tensor(0, 2)
            for nobody in (1, -1):
                for read in (lambda r: arrival.tensor(r, 0), arrival.parts):
                    with pytest.raises(IndexError, match=f"rank {nobody} of 1"):
                        read(nobody)
            assert arrival.tensor(0, 1, torch.float64).shape == (0,)


@pytest.mark.parametrize(
    "mistake",
    [
        post_unsuitable_tensors,
        post_the_wrong_number,
        post_too_often,
        wait_without_a_post,
        read_after_release,
        release_out_of_order,
        read_what_is_not_there,
    ],
)
@network_is_slow
@pytest.mark.usefixtures("transport")
def test_mistake_is_refused(mistake: object) -> None:
    run(1, mistake)  # type: ignore[arg-type]


def post_refused_between_two_posts(rank: int) -> None:
    value = torch.tensor([rank])
    with channel() as ids:
        with refused("17 parts"):
            ids.post([[value + 100], [value + 100], [value] * 17])
        ids.post([[value]] * 3)
        with ids.wait() as arrival:
            assert [int(arrival.tensor(r, 0, torch.int64)) for r in range(3)] == [0, 1, 2]


def test_a_refused_post_sends_nothing_to_anyone() -> None:
    run(3, post_refused_between_two_posts)
