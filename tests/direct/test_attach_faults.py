"""What attach and offer refuse, before anything of it is used."""

import copy
import fcntl
import os
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, PoolingType

from tests.direct import nodes, served
from tests.direct.answered import answered
from tests.direct.served import Expected, batches_of, check
from tests.processes import run
from torchrec_bls import BLSConfig, attach, offer, publish
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.offers.conversation import Conversation, Descriptors, connect
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import (
    ProtocolError,
    RendezvousError,
)

DEADLINE = 30.0
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE

# Places of tables in the first module.
ROW_WISE, COLUMN_WISE = 0, 2
#: Name of a place among the descriptors, see `place_of`.
Place = str
Change = Callable[[Any, list[int]], tuple[Any, list[int]]]


def relay(source: str, change: Change) -> Callable[[socket.socket], None]:
    """Returns what hands over what `source` does, but for a change."""

    def answer(connected: socket.socket) -> None:
        with closing(Descriptors()) as descriptors:
            with closing(connect(source, DEADLINE)) as offering:
                offering.greet()
                offering.be_greeted()
                content = offering.receive(descriptors)
            handed = [descriptors.take() for _ in range(len(descriptors))]
            content, changed = change(content, list(handed))
            conversation = Conversation(connected, "relay", DEADLINE)
            try:
                conversation.greet()
                conversation.be_greeted()
                conversation.send(content, changed)
            finally:
                for descriptor in {*changed} - {*handed}:
                    os.close(descriptor)

    return answer


def place_of(content: Any, name: Place) -> int:
    """Returns where a descriptor is: of the page of the first module, of the index and the first
    piece of its first or second owner, of the index of the second module, or of dense weights."""
    first, second = content["modules"][0]["pieces"]
    return {
        "page": 0,
        "index": 1,
        "piece": 2,
        "another piece": 3,
        "index of rank 1": 2 + first,
        "piece of rank 1": 3 + first,
        "index of another module": 4 + first + second,
        "dense weights": -1,
    }[name]


def in_place_of(name: Place, make: Callable[[int], int]) -> Change:
    """Puts another descriptor, made from the one that is there, in a place."""

    def change(content: Any, descriptors: list[int]) -> tuple[Any, list[int]]:
        place = place_of(content, name)
        descriptors[place] = make(descriptors[place])
        return content, descriptors

    return change


def changed_text(act: Callable[[Any], Any]) -> Change:
    def change(content: Any, descriptors: list[int]) -> tuple[Any, list[int]]:
        content = copy.deepcopy(content)
        return act(content) or content, descriptors

    return change


def exchanged(*names: Place) -> Change:
    def change(content: Any, descriptors: list[int]) -> tuple[Any, list[int]]:
        one, other = (place_of(content, name) for name in names)
        descriptors[one], descriptors[other] = descriptors[other], descriptors[one]
        return content, descriptors

    return change


def memory(original: int, *, share: float = 1.0, seals: int = SEALS) -> int:
    """Returns a memory file with a share of the bytes of another one."""
    size = int(os.fstat(original).st_size * share)
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(made, os.pread(original, size, 0).ljust(size, b"\0"))
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def null_device(_: int) -> int:
    return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def end_of_a_pipe(_: int) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def module_text(content: Any, **changed: Any) -> None:
    content["modules"][0].update(changed)


def shard_text(content: Any, table: int, **changed: int) -> None:
    """Changes the first shard of a table of the pooled module, and the digest with it."""
    module = content["modules"][0]
    module["tables"][table]["layout"]["shards"][0].update(changed)
    layouts = []
    for layout in (each["layout"] for each in module["tables"]):
        shards = tuple(Shard(**shard) for shard in layout["shards"])
        layouts.append(TableLayout(**{**layout, "shards": shards}))
    module["digest"] = digest_of(layouts).hex()


FAULTS: dict[str, tuple[Change, type[Exception], str]] = {
    "a device": (in_place_of("index", null_device), ProtocolError, "not sealed, or too short"),
    "a pipe": (in_place_of("piece", end_of_a_pipe), ProtocolError, "not sealed, or too short"),
    "a device as the page": (in_place_of("page", null_device), ProtocolError, "is not sealed"),
    "a device as dense weights": (
        in_place_of("dense weights", null_device),
        ProtocolError,
        "not sealed",
    ),
    "memory that others may write to": (
        in_place_of("piece", lambda fd: memory(fd, seals=SEALS & ~fcntl.F_SEAL_WRITE)),
        ProtocolError,
        "not sealed, or too short",
    ),
    "memory that others may cut off": (
        in_place_of("index", lambda fd: memory(fd, seals=fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)),
        ProtocolError,
        "not sealed, or too short",
    ),
    "sealed memory that was cut off": (
        in_place_of("piece", lambda fd: memory(fd, share=0.75)),
        ProtocolError,
        "has no label",
    ),
    "sealed memory that is too long": (
        in_place_of("index", lambda fd: memory(fd, share=1.5)),
        ProtocolError,
        "has no label",
    ),
    "an empty file": (
        in_place_of("index of rank 1", lambda fd: memory(fd, share=0.0)),
        ProtocolError,
        "not sealed, or too short",
    ),
    "a copy of a piece": (
        in_place_of("piece", memory),
        ProtocolError,
        "hands over another piece than its index lists",
    ),
    "pieces exchanged": (
        exchanged("piece", "another piece"),
        ProtocolError,
        "has other shards",
    ),
    "pieces of two owners exchanged": (
        exchanged("piece", "piece of rank 1"),
        ProtocolError,
        "has other shards|is of rank 1",
    ),
    "a piece in the place of an index": (
        exchanged("index", "piece"),
        ProtocolError,
        "has other shards",
    ),
    "indexes of two owners exchanged": (
        exchanged("index", "index of rank 1"),
        ProtocolError,
        r"is of rank 1 and version '.first forward.', not of rank 0 and version '.first forward.'",
    ),
    "indexes of two modules exchanged": (
        exchanged("index", "index of another module"),
        ProtocolError,
        "has other shards",
    ),
    "the page in the place of an index": (
        exchanged("page", "index"),
        ProtocolError,
        "not sealed",
    ),
    "another version": (
        changed_text(lambda content: content.update(version="2")),
        ProtocolError,
        r"version '.first forward.', not of rank 0 and version '2'",
    ),
    "too few descriptors": (
        lambda content, descriptors: (content, descriptors[:-1]),
        ProtocolError,
        r"announces \d+ descriptors and hands \d+ over",
    ),
    "other sizes": (
        changed_text(lambda content: module_text(content, sizes=[1 << 20, 1 << 20])),
        ProtocolError,
        r"hands over tables of 'bags' in \[.*\] pieces, which have \[",
    ),
    "another number of pieces": (
        changed_text(lambda content: module_text(content, pieces=[1 << 20, 1])),
        ProtocolError,
        "announces 10485.. descriptors",
    ),
    "pieces of one owner": (
        changed_text(lambda content: module_text(content, pieces=[3])),
        ProtocolError,
        "has the pieces of 1 owners, not of 2",
    ),
    "shards outside their segments": (
        changed_text(lambda content: module_text(content, sizes=[4096, 4096])),
        ProtocolError,
        "has a shard of table 't1' at bytes",
    ),
    "another digest": (
        changed_text(lambda content: module_text(content, digest="00" * 32)),
        ProtocolError,
        "another digest",
    ),
    "no owners": (
        changed_text(lambda content: module_text(content, sizes=[])),
        ProtocolError,
        "no owners",
    ),
    "a manifest without a field": (
        changed_text(lambda content: content["modules"][0].pop("form") and None),
        ProtocolError,
        "can't be read",
    ),
    "a manifest with a field more": (
        changed_text(lambda content: module_text(content, later=1)),
        ProtocolError,
        "can't be read",
    ),
    "rows of other columns": (
        changed_text(lambda content: shard_text(content, COLUMN_WISE, first_column=8)),
        ProtocolError,
        "do not cover its 8 columns",
    ),
    "wider rows": (
        changed_text(lambda content: shard_text(content, COLUMN_WISE, columns=16)),
        ProtocolError,
        "do not cover its 8 columns",
    ),
    "more rows": (
        changed_text(lambda content: shard_text(content, ROW_WISE, rows=1 << 40)),
        ProtocolError,
        "in blocks of unequal rows",
    ),
    "rows before the table": (
        changed_text(lambda content: shard_text(content, ROW_WISE, first_row=-1)),
        ProtocolError,
        r"first_row: expected int >= 0, got -1",
    ),
    "a version that is none": (
        changed_text(lambda content: content.update(version="x" * 65)),
        ProtocolError,
        "must be a printable text of 1 to 64 bytes",
    ),
    "a number as a version": (
        changed_text(lambda content: content.update(version=2)),
        ProtocolError,
        "version: expected str, got 2",
    ),
    "a later serial number": (
        changed_text(lambda content: content.update(serial=2)),
        ProtocolError,
        "hands version .* over as number 2, but on the control page 1 is the last one",
    ),
    "a serial number of another age": (
        changed_text(lambda content: content.update(serial=2**70)),
        ProtocolError,
        "serial: expected int <= 9223372036854775807",
    ),
    "a serial number before all": (
        changed_text(lambda content: content.update(serial=-1)),
        ProtocolError,
        "serial: expected int >= 1, got -1",
    ),
    "a serial number without end": (
        changed_text(lambda content: content.update(serial=float("inf"))),
        ProtocolError,
        "sends no manifest, it is no JSON",
    ),
    "a form in itself": (
        changed_text(lambda content: content["modules"][0].update(form=nested(900))),
        ProtocolError,
        "does not fit the tables|too deep in each other",
    ),
    "a dtype that is none": (
        changed_text(lambda content: module_text(content, dtype="torch.nn")),
        ProtocolError,
        "has weights of 'torch.nn', which is no dtype",
    ),
    "text for numbers": (
        changed_text(lambda content: module_text(content, sizes=["4096", "4096"])),
        ProtocolError,
        r"modules\[0\].sizes\[0\]: expected int, got '4096'",
    ),
    "an output of a feature twice": (
        changed_text(lambda content: content["modules"][0]["form"]["names"].append("f1")),
        ProtocolError,
        "the output that another process describes does not fit the tables",
    ),
    "means of other features": (
        changed_text(
            lambda content: content["modules"][0]["form"].update(
                division={"features": ["f0"], "sums": ["f9"]}
            )
        ),
        ProtocolError,
        "the output that another process describes does not fit the tables",
    ),
    "weights of another type": (
        changed_text(lambda content: module_text(content, dtype="torch.float64")),
        ValueError,
        r"'bags' has weights of \['torch.float32'\] in this model, but \['torch.float64'\]",
    ),
    "no modules": (
        changed_text(lambda content: content["modules"].clear()),
        ProtocolError,
        "its modules are",
    ),
    "a module twice": (
        changed_text(lambda content: content["modules"].append(content["modules"][0])),
        ProtocolError,
        r"its modules are \['bags', 'rows', 'bags'\]",
    ),
    "an owner more": (
        changed_text(lambda content: module_text(content, sizes=[4096] * 3, pieces=[1] * 3)),
        ProtocolError,
        "different numbers of owners",
    ),
    "no manifest": (changed_text(lambda _: ["modules"]), ProtocolError, "can't be read"),
    "another container": (
        changed_text(lambda content: content.update(host="other")),
        ProtocolError,
        "in another container",
    ),
    "another module": (
        changed_text(lambda content: module_text(content, name="others")),
        ValueError,
        r"serves a module 'others', but this model has \['bags', 'rows'\]",
    ),
}


def attach_to_what_is_wrong(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    if rank == 0:
        source, path = f"{folder}/source", f"{folder}/relay"
        with offer(model, source):
            _refuse_all(source, path)
            joined = nodes.bare_model()
            attach(joined, source, deadline=DEADLINE)
            check(joined, batches, expected, 0)
        assert not Path(source).exists()
        check(joined, batches, expected, 1)
    dist.barrier()


def nested(depth: int) -> dict[str, Any]:
    form: dict[str, Any] = {}
    for _ in range(depth):
        form = {"names": form}
    return form


def _refuse_all(source: str, path: str) -> None:
    reader = nodes.bare_model()
    modules, weights = list(reader.modules()), reader.dense.weight.clone()
    before = _descriptors()
    for fault, (change, kind, text) in FAULTS.items():
        with answered(path, relay(source, change)), pytest.raises(kind, match=text):
            attach(reader, path, deadline=DEADLINE)
        assert list(reader.modules()) == modules, fault
        assert torch.equal(reader.dense.weight, weights), fault
    # The threads that handed over may be about to close what they had.
    nodes.until(lambda: _descriptors() <= before)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_not_what_was_announced_is_refused(tmp_path: Path) -> None:
    run(2, attach_to_what_is_wrong, str(tmp_path))


def attach_other_models(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    check(model, batches, Expected(batches), 0)
    with offer(model, f"{folder}/{rank}") as offered:
        for change, text in OTHER_MODELS:
            other = nodes.bare_model()
            change(other)
            with pytest.raises(ValueError, match=text):
                attach(other, offered.path, deadline=DEADLINE)
        with pytest.raises(ValueError, match="the model has no EmbeddingBagCollection"):
            attach(model, offered.path)
    with pytest.raises(ValueError, match=r"were not called yet, .*call the model once before"):
        offer(served.sharded(), f"{folder}/{rank}")
    with pytest.raises(ValueError, match="do not read their tables directly"):
        offer(served.sharded(BLSConfig()), f"{folder}/{rank}")
    for wrong in (-1, "0", 2, True, 1.0):
        with pytest.raises(ValueError, match=f"owner is {wrong!r}, but must be"):
            publish(model, {}, version="2", owner=wrong)  # type: ignore[arg-type]
    for endless in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ValueError, match=r"deadline is .* s, but must be positive and at most"):
            publish(model, deadline=endless)
        with pytest.raises(ValueError, match=r"deadline is .* s, but must be positive and at most"):
            attach(nodes.bare_model(), f"{folder}/{rank}", deadline=endless)
    for wrong in (-1, "0", True):
        with pytest.raises(ValueError, match=r"owner is .*, but must be a rank, counted from 0"):
            attach(nodes.bare_model(), f"{folder}/{rank}", owner=wrong)  # type: ignore[arg-type]
    state = model.state_dict()
    table = next(key for key, value in state.items() if key.endswith("t0.weight"))
    whole = torch.zeros(41, 8)
    for key, value, text in (
        ("dense.weight", None, "'dense.weight' is a NoneType, but must be a tensor"),
        (
            "dense.weight",
            state["dense.weight"].to("meta"),
            "'dense.weight' is on the device 'meta'",
        ),
        (table, whole.to("meta"), f"'{table}' is on the device 'meta', but must have all"),
        (table, whole.to_sparse(), f"'{table}' is of the layout torch.sparse_coo, but must"),
        (table, None, f"'{table}' is a NoneType: give the whole table"),
    ):
        with pytest.raises(ValueError, match=text):
            publish(model, {**state, key: value}, version="2")
    assert publish(model, state, version="2").version == "2"
    os.chdir(folder)
    with offer(model, f"{rank}.socket".encode()) as offered:
        os.chdir("/")
        assert offered.path == f"{folder}/{rank}.socket"
        attach(nodes.bare_model(), offered.path.encode(), deadline=DEADLINE)  # type: ignore[arg-type]
    assert not Path(offered.path).exists()


def _tables(**changed: Any) -> Callable[[Any], None]:
    """Gives the first table of the pooled module other terms."""

    def change(model: Any) -> None:
        configs = model.bags.embedding_bag_configs()
        for name, value in changed.items():
            setattr(configs[0], name, value)
        model.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    return change


def _without_a_table(model: Any) -> None:
    configs = model.bags.embedding_bag_configs()[:-1]
    model.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def _in_another_order(model: Any) -> None:
    bags = model.bags
    del model.bags
    model.bags = bags


def _weighted(model: Any) -> None:
    configs = model.bags.embedding_bag_configs()
    model.bags = EmbeddingBagCollection(
        tables=configs, is_weighted=True, device=torch.device("meta")
    )


OTHER_MODELS: list[tuple[Callable[[Any], None], str]] = [
    (_tables(num_embeddings=7), r"'bags' has table 't0' \(7, 8, .* in this model, but \(41, 8, "),
    (_tables(embedding_dim=4), "'bags' has table 't0'"),
    (_tables(pooling=PoolingType.MEAN), "'bags' has table 't0'"),
    (_tables(feature_names=["f4"]), "'bags' has table 't0'"),
    (_without_a_table, r"'bags' has no \[\"table 't4'\"\] in this model"),
    (_weighted, "'bags' has weighted ids True in this model, but False"),
    (lambda model: setattr(model, "bags", model.rows), "'bags' has pooled embeddings False"),
    (_in_another_order, r"modules \['bags', 'rows'\] at .* are in the order \['rows', 'bags'\]"),
    (lambda model: delattr(model, "rows"), "serves a module 'rows', but this model has"),
    (lambda model: setattr(model, "dense", nn.Linear(2, 3)), r"'dense.weight' of .* has shape"),
    (lambda model: setattr(model, "more", nn.Linear(1, 1)), r"\['more.bias', 'more.weight'\] are"),
    (
        lambda model: setattr(model, "dense", nn.Linear(1, 3, device="meta")),
        r"\['dense.bias', 'dense.weight'\] are on the device 'meta'",
    ),
]


def test_another_model_is_refused(tmp_path: Path) -> None:
    run(2, attach_other_models, str(tmp_path))


def attach_without_descriptors(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    with offer(model, f"{folder}/source") as offered:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        # The relay is another process in all but name: its thread has what it needs by then.
        ready, go_on = threading.Event(), threading.Event()

        def change(content: Any, descriptors: list[int]) -> tuple[Any, list[int]]:
            ready.set()
            assert go_on.wait(DEADLINE)
            return content, descriptors

        def lower() -> None:
            assert ready.wait(DEADLINE)
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, before[1]))
            go_on.set()

        lowering = threading.Thread(target=lower)
        lowering.start()
        try:
            path = f"{folder}/relay"
            with (
                answered(path, relay(offered.path, change)),
                # Where it comes to light depends on what the relay has closed by then.
                pytest.raises(
                    RendezvousError, match=r"[Rr]aise the limit of open files \(ulimit -n"
                ),
            ):
                attach(nodes.bare_model(), path, deadline=DEADLINE)
        finally:
            lowering.join()
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        joined = nodes.bare_model()
        attach(joined, offered.path, deadline=DEADLINE)
        check(joined, batches, expected, 0)


def test_a_lack_of_descriptors_names_the_limit(tmp_path: Path) -> None:
    run(1, attach_without_descriptors, str(tmp_path))


def attach_to_a_process_that_cannot(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Expected(batches)
    check(model, batches, expected, 0)
    with offer(model, f"{folder}/source") as offered:
        snapshot = ServedModel.snapshot

        def fail(_: ServedModel) -> Any:
            raise RendezvousError("no memory for dense weights")

        ServedModel.snapshot = fail  # type: ignore[method-assign]
        with pytest.raises(ProtocolError, match="hands nothing over: RendezvousError: no memory"):
            attach(nodes.bare_model(), offered.path, deadline=DEADLINE)
        ServedModel.snapshot = snapshot  # type: ignore[method-assign]
        # One that connects and says nothing keeps nobody waiting.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(offered.path)
            joined = nodes.bare_model()
            attach(joined, offered.path, deadline=DEADLINE)
        check(joined, batches, expected, 0)
        with pytest.raises(ValueError, match="a living process offers tables"):
            offer(joined, offered.path)
    with offer(joined, offered.path):
        again = nodes.bare_model()
        attach(again, offered.path, deadline=DEADLINE)
    check(again, batches, expected, 0)


def test_a_refusal_says_why_and_the_next_one_is_served(tmp_path: Path) -> None:
    run(1, attach_to_a_process_that_cannot, str(tmp_path))
