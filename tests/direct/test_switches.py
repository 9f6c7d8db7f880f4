"""What a switch changes and refuses: dense state of any kind, replaced and written weights."""

import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.direct import served
from tests.direct.nodes import until
from tests.direct.served import Expected, batches_of, check, weights_of
from tests.direct.test_publish import check_live
from tests.distributed import models
from tests.processes import run
from torchrec_bls import attach, offer, publish, serving_state
from torchrec_bls.direct import float_tables
from torchrec_bls.direct.serving import served_model, switches
from torchrec_bls.errors import PeerTimeoutError, RendezvousError

DEADLINE = 60.0


class Scaled(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0
        self.refused: Any = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if self.refused is not None and state["scale"] == self.refused:
            raise ArithmeticError("not this scale")
        self.scale = state["scale"]

    def forward(self, ones: torch.Tensor) -> torch.Tensor:
        return self.scale * ones.expand(1, 3)


class Opaque(Scaled):
    def get_extra_state(self) -> Any:
        return threading.Event


class Deaf(nn.Module):
    """Tells a state, and does not take one."""

    def get_extra_state(self) -> float:
        return 1.0

    def forward(self, ones: torch.Tensor) -> torch.Tensor:
        return ones.expand(1, 3)


def quantized(weights: dict[str, torch.Tensor]) -> nn.Module:
    linear = nn.Linear(1, 3)
    linear.load_state_dict({"weight": weights["dense.weight"], "bias": weights["dense.bias"]})
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(linear))


def tables_of(version: int) -> dict[str, Any]:
    return {
        name: tensor
        for name, tensor in weights_of(version).items()
        if not name.startswith("dense.")
    }


def with_dense(dense: nn.Module) -> tuple[Any, list[Any]]:
    """Returns a model with another dense part that has read its tables, and its batches."""
    model, batches = served.sharded(), batches_of(0)
    model.module.dense = dense
    with torch.no_grad():
        model(batches[0])
    return model, batches


def output_of(model: Any, batch: Any) -> Any:
    with torch.no_grad():
        return model(batch)


def switch_what_is_no_tensor(rank: int, folder: str) -> None:
    """Packed weights and extra state change with the tables, here and in attached processes."""
    for number, (first, second) in enumerate(
        [(Scaled(), Scaled()), (quantized(weights_of(1)), quantized(weights_of(2)))]
    ):
        if isinstance(second, Scaled):
            second.scale = 2.5
        expected = [dense(torch.ones(1, 1)).detach() for dense in (first, second)]
        assert not torch.equal(*expected)
        model, batches = with_dense(first)
        late = served.Model()
        late.dense = Scaled() if number == 0 else quantized(weights_of(3))
        with offer(model, f"{folder}/{number}"):
            attach(late, f"{folder}/{number}")
        readers = (model, late)
        for each in readers:
            assert torch.equal(output_of(each, batches[0])["dense"], expected[0])
        new = {f"dense.{name}": value for name, value in second.state_dict().items()}
        publish(model, tables_of(2) | new, version="2").wait(DEADLINE)
        for each in readers:
            wait_for(each, 2, batches[0])
            assert torch.equal(output_of(each, batches[0])["dense"], expected[1])
        publish(model, version="3").wait(DEADLINE)
        wait_for(late, 3, batches[0])
        assert torch.equal(output_of(late, batches[0])["dense"], expected[1])


def wait_for(model: Any, version: int, batch: Any) -> None:
    end = threading.Event()
    for _ in range(6000):
        output_of(model, batch)
        if serving_state(model).version == str(version):
            return
        end.wait(0.01)
    raise TimeoutError(serving_state(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_state_that_is_no_tensor_changes_with_the_tables(tmp_path: Path) -> None:
    run(1, switch_what_is_no_tensor, str(tmp_path), deadline=120)


def refuse_what_cannot_be_switched(rank: int) -> None:
    for dense, text in (
        (Opaque(), r"'dense\._extra_state' is a .* that can't be handed to other processes"),
        (Deaf(), r"\['dense\._extra_state'\] can't be switched: 'dense\.' refuses them"),
    ):
        model, batches = with_dense(dense)
        state = dense.state_dict(prefix="dense.")
        for new in (None, tables_of(2) | dict(state)):
            with pytest.raises(ValueError, match=text):
                publish(model, new, version="2")
        with pytest.raises(ValueError, match=r"no 'dense\._extra_state'"):
            publish(model, tables_of(2), version="2")
        output_of(model, batches[0])
        assert serving_state(model).announced_serial == 1


def test_what_cannot_be_switched_is_refused_when_it_is_published() -> None:
    run(1, refuse_what_cannot_be_switched)


def holds_no_older(model: Any) -> bool:
    gc.collect()  # an exception keeps the frames that it came through
    return serving_state(model).readers_behind == {}


def refuse_at_the_switch(rank: int) -> None:
    model, batches = with_dense(Scaled())
    before = output_of(model, batches[0])
    publish(model, tables_of(2) | {"dense._extra_state": {"scale": 2.0}}, version="2").wait(
        DEADLINE
    )
    model.module.dense.refused = 2.0
    with pytest.raises(ValueError, match=r"version '2' is not taken: .* not this scale"):
        output_of(model, batches[0])
    models.assert_same_bits(output_of(model, batches[0]), before)
    assert "not this scale" in serving_state(model).problem
    publish(model, tables_of(3) | {"dense._extra_state": {"scale": 3.0}}, version="3").wait(
        DEADLINE
    )
    assert torch.equal(output_of(model, batches[0])["dense"], torch.full((1, 3), 3.0))
    assert serving_state(model).problem == ""
    until(lambda: holds_no_older(model))  # nor the one that was refused


def test_a_state_that_is_refused_at_the_switch_leaves_the_old_generation() -> None:
    run(1, refuse_at_the_switch)


def replace_before_the_switch(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    model.module.dense.weight = nn.Parameter(torch.zeros(3, 1))
    model.module.dense.bias = nn.Parameter(torch.zeros(3))
    assert check(model, batches, expected, 0) == 2
    publish(model, weights_of(3), version="3").wait(DEADLINE)
    model.module.dense = nn.Linear(1, 3)
    assert check(model, batches, expected, 0) == 3
    publish(model, weights_of(4), version="4").wait(DEADLINE)
    model.half()
    assert check(model, batches, expected, 0) == 4
    check_live(model, 4)
    dist.barrier()  # nobody else holds the segments of who ends before the others have mapped them


def test_tensors_that_are_replaced_before_the_switch_get_the_new_weights() -> None:
    run(2, replace_before_the_switch)


def convert_tables(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    model.module.bags.half()
    for new in (None, weights_of(2)):
        with pytest.raises(ValueError, match=r"'bags\.embedding_bags\.t\d\.weight'.*converted"):
            publish(model, new, version="2")
    for batch in range(3):
        assert check(model, batches, expected, batch) == 1
    other = served.sharded()
    check(other, batches, expected, 0)
    tables = other.module.rows.embeddings
    name = next(name for name in tables if tables[name].weight.nbytes)
    tables[name].weight = nn.Parameter(tables[name].weight.detach().clone())
    with pytest.raises(ValueError, match=rf"rows\.embeddings\.{name}\.weight'.*replaced"):
        publish(other, weights_of(2), version="2")
    assert check(other, batches, expected, 0) == 1


def test_converted_and_replaced_tables_are_refused_by_name() -> None:
    run(2, convert_tables)


def publish_after_a_generation_that_no_batch_took(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    publish(model, version="3").wait(DEADLINE)
    models.assert_same_bits(output_of(model, batches[0]), expected.of(2, 0))
    check_live(model, 2)


def test_live_weights_are_published_as_they_serve() -> None:
    run(2, publish_after_a_generation_that_no_batch_took)


def lose_no_writes(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    write(model, 3)
    with pytest.raises(ValueError, match=r"written to while they show version .*, but '2' serves"):
        publish(model, version="3")
    publish(model, model.state_dict(), version="3").wait(DEADLINE)
    models.assert_same_bits(output_of(model, batches[0]), expected.of(3, 0))


def write(model: Any, version: int) -> None:
    new = weights_of(version)
    with torch.no_grad():
        for name, (rows, columns, shard) in models.local_shards(model).items():
            shard.copy_(new[name.partition(" ")[0]][rows, columns])
        for name, tensor in models.replicas(model).items():
            tensor.copy_(new[name])


def test_writes_that_would_mix_with_a_newer_generation_are_refused() -> None:
    run(2, lose_no_writes)


def serve_no_mix(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    if rank == 0:
        write(model, 2)
        own = publish(model, version="2")
        # The dense weights are new here, and the tables old.
        with pytest.raises(ValueError, match="until all ranks have published"):
            output_of(model, batches[0])
    else:
        check(model, batches, expected, 1)
    dist.barrier()
    if rank == 1:
        own = publish(model, weights_of(2), version="2")
    own.wait(DEADLINE)
    for batch in range(3):
        assert check(model, batches, expected, batch) == 2
    check_live(model, 2)


def test_no_batch_has_written_weights_beside_old_tables() -> None:
    run(2, serve_no_mix)


def show_nothing(rank: int, in_place: bool) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)

    def fail(_: Any) -> None:
        raise RendezvousError("no more mappings")

    native = float_tables._native
    float_tables._native = SimpleNamespace(TableWindow=fail)
    if in_place:
        write(model, 2)
    publish(model, None if in_place else weights_of(2), version="2").wait(DEADLINE)
    for batch in range(3):
        assert check(model, batches, expected, batch) == 2
    assert "no more mappings" in serving_state(model).problem
    with pytest.raises(RendezvousError, match=r"show an older version .*no more mappings"):
        publish(model, version="3")
    float_tables._native = native
    dist.barrier()
    publish(model, version="3").wait(DEADLINE)
    models.assert_same_bits(output_of(model, batches[0]), expected.of(2, 0))
    check_live(model, 2)
    assert serving_state(model).problem == ""


@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_needs_no_view_of_the_own_tables(in_place: bool) -> None:
    run(2, show_nothing, in_place)


def name_who_stays_inside(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    inside, end = threading.Event(), threading.Event()
    outputs: list[Any] = []

    def stay(*_: Any) -> None:
        if threading.current_thread().name == "slow":
            inside.set()
            end.wait(DEADLINE)

    # In the middle: both modules have looked the batch up, and the dense layer has not begun.
    model.module.dense.register_forward_pre_hook(stay)
    switches._LONGEST_FORWARD = 0.05  # type: ignore[misc]
    slow = threading.Thread(
        target=lambda: outputs.append(output_of(model, batches[1])), name="slow"
    )
    slow.start()
    inside.wait(DEADLINE)
    # It began before the model had a gate.
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    with pytest.raises(PeerTimeoutError, match=r"thread 'slow' .* stays in a forward"):
        output_of(model, batches[0])
    for batch in range(3):
        assert check(model, batches, expected, batch) == 1
    assert "'slow'" in serving_state(model).problem
    end.set()
    slow.join()
    models.assert_same_bits(outputs[0], expected.of(1, 1))
    assert check(model, batches, expected, 0) == 2
    assert serving_state(model).problem == ""


def test_a_switch_waits_for_forwards_and_names_who_stays() -> None:
    run(1, name_who_stays_inside)


def interrupt_forwards(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    publish(model, weights_of(2), version="2").wait(DEADLINE)
    check(model, batches, expected, 0)
    handle = model.module.dense.register_forward_pre_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            output_of(model, batches[0])
    handle.remove()
    publish(model, weights_of(3), version="3").wait(DEADLINE)
    in_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_thread.append(check(model, batches, expected, 0)))
    thread.start()
    thread.join()
    assert in_thread == [3]


def test_an_interrupted_forward_holds_no_switch_up() -> None:
    run(1, interrupt_forwards)


def compile_the_model(rank: int) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    publish(model, weights_of(2), version="2").wait(DEADLINE)
    gate = served_model.ServedModel.of(model)._switches.gate
    inside: list[bool] = []

    @torch.compiler.disable
    def look(*_: Any) -> None:
        inside.append(threading.get_ident() in gate.running())

    model.module.dense.register_forward_pre_hook(look)
    compiled = torch.compile(model, backend="eager")
    for generation in (2, 3, 4):
        for batch in range(2):
            models.assert_same_bits(
                output_of(compiled, batches[batch]), expected.of(generation, batch)
            )
        publish(model, weights_of(generation + 1), version=str(generation + 1)).wait(DEADLINE)
    assert inside == [True] * 6 and not gate.running()


def test_a_compiled_model_switches_between_its_forwards() -> None:
    run(1, compile_the_model, deadline=120)
