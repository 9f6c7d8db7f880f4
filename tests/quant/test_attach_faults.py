"""What attach refuses of quantized tables, before anything of it is used."""

from pathlib import Path
from typing import Any

import pytest

from tests.direct import nodes
from tests.direct.answered import answered
from tests.direct.nodes import Node, started
from tests.direct.test_attach_faults import Change, changed_text, exchanged, module_text, relay
from torchrec_bls import attach
from torchrec_bls.errors import ProtocolError

DEADLINE = 30.0


def layout_text(content: Any, **changed: Any) -> None:
    """Changes the first shard of a table of the first module."""
    content["modules"][0]["tables"][0]["layout"]["shards"][0].update(changed)


FAULTS: dict[str, tuple[Change, type[Exception], str]] = {
    "another digest": (
        changed_text(lambda content: module_text(content, digest="00" * 32)),
        ProtocolError,
        "the control page of tables is of other owners or shards",
    ),
    "rows of another owner": (
        changed_text(lambda content: layout_text(content, owner=1)),
        ValueError,
        "'bags' places its rows in another way",
    ),
    "pages of another size": (
        changed_text(lambda content: module_text(content, huge_pages=True)),
        ValueError,
        "'bags' places its rows in another way",
    ),
    "rows twice": (
        changed_text(lambda content: layout_text(content, rows=400)),
        ProtocolError,
        "the shards of table 'b0' are not its rows",
    ),
    "some columns": (
        changed_text(lambda content: layout_text(content, columns=4)),
        ProtocolError,
        "the shards of table 'b0' are not its rows",
    ),
    "sizes that are too small": (
        changed_text(lambda content: module_text(content, sizes=[4096, 4096])),
        ProtocolError,
        "has .* bytes of tables .*, but it has announced 4096",
    ),
    "larger sizes": (
        changed_text(lambda content: module_text(content, sizes=[1 << 20, 1 << 20])),
        ProtocolError,
        "has .* bytes of tables .*, but it has announced 1048576",
    ),
    "indexes of two owners exchanged": (
        exchanged("index", "index of rank 1"),
        ProtocolError,
        "is of rank 1 and version",
    ),
    "a float module": (
        changed_text(lambda content: module_text(content, quantized=False)),
        ProtocolError,
        "another digest",
    ),
    "another output": (
        changed_text(lambda content: content["modules"][0]["form"].update(output="torch.half")),
        ValueError,
        "has output of torch.float32 in this model, but torch.half at",
    ),
}


def refuse_all(node: Node, source: object) -> None:
    model, path = node.served.bare_model(), node.path_of("relay")
    before = list(model.modules())
    for name, (change, error, says) in FAULTS.items():
        with (
            answered(path, relay(node.path_of(source), change)),
            pytest.raises(error, match=says),
        ):
            attach(model, path, deadline=DEADLINE)
        assert list(model.modules()) == before, name


def test_another_layout_is_refused(tmp_path: Path) -> None:
    with started(tmp_path, 2, "tests.quant.served") as processes:
        processes.start("reader")
        processes.call("reader", refuse_all, 0)
        processes.call("reader", nodes.join, 0)
