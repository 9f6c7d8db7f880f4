"""The list of private names: all are there, it says so when one is not, and none is left out."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torchrec_bls
from torchrec_bls._contract import CONTRACT, missing_names

PACKAGE = Path(torchrec_bls.__file__).parent


def test_all_are_there() -> None:
    assert missing_names() == []


def test_what_is_missing_is_named() -> None:
    contract = {
        "torch.no_such_module": ("name",),
        "torch.nn:NoSuchClass": ("name",),
        "torch.nn": ("Module", "no_such_name"),
        "torch.nn:Linear": ("in_features", "_no_such_name", "forward", "_forward_hooks"),
    }
    assert missing_names(contract) == [
        "torch.no_such_module",
        "torch.nn:NoSuchClass",
        "torch.nn.no_such_name",
        "torch.nn:Linear._no_such_name",
    ]


def sources_made_for_torchrec() -> Iterator[ast.AST]:
    for path in [
        *(PACKAGE / "distributed").rglob("*.py"),
        *(PACKAGE / "quant").rglob("*.py"),
        *(PACKAGE / "direct" / "reads").rglob("*.py"),
        *PACKAGE.glob("pipeline*.py"),
        PACKAGE / "analysis" / "recording.py",
    ]:
        yield from ast.walk(ast.parse(path.read_text()))


def test_every_private_name_that_is_used_is_in_the_list() -> None:
    used, own = set(), {"_native", "_contract", "_current_frames", "_getframe", "_replace"}
    for node in sources_made_for_torchrec():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            (own if of_self and isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
    assert "_input_dists" in private
    assert private - {name for names in CONTRACT.values() for name in names} == set()
