"""`_native.pyi`, written by hand, says what the compiled module has.

mypy's stubtest finds names that are missing on one side. It can't see the parameters of compiled
functions, so the stub is compared with the one that pybind11-stubgen generates as well.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.full

SOURCE = ROOT / "torchrec_bls" / "_native.pyi"
# The classes' metaclass is pybind11's; the aliases of types are the stub's own.
ALLOWED = r"torchrec_bls\._native\.[A-Z]\w*"
# It has no constructor in Python, which a stub can't say.
ALLOWED_INIT = r"torchrec_bls\._native\.\w+\.__init__"
# Buffers behind memoryviews, which nobody names.
UNNAMED = {"Pages", "View"}

Function = tuple[tuple[str, ...], str]


def aliases(tree: ast.Module) -> dict[str, str]:
    """Returns the types that assignments at the top of a stub name."""
    return {
        target.id: ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def spelled(node: ast.expr | None, names: dict[str, str]) -> str:
    """Returns a type in one spelling: without modules and aliases, numbers in as they come out."""
    text = ast.unparse(node) if node is not None else ""
    text = re.sub(r"typing\.Supports(Int|Float) \| typing\.SupportsIndex", r"\1", text)
    text = re.sub(r"\b(Int|Float)\b", lambda match: match[0].lower(), text)
    # The alias of an address is a list where it comes out and any sequence where it goes in.
    text = re.sub(r"typing\.Annotated\[(.*?), 'FixedSize\(\d+\)'\]", r"\1", text)
    text = re.sub(r"\b\w+", lambda match: names.get(match[0], match[0]), text)
    text = re.sub(r"\b(collections\.abc|typing)\.", "", text).replace("Any", "object")
    return text.replace("list[", "Sequence[")


def functions(body: list[ast.stmt], names: dict[str, str], prefix: str = "") -> dict[str, Function]:
    """Returns parameters and result of all functions, methods and properties by their names."""
    found: dict[str, Function] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= functions(node.body, names, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            if any(ast.unparse(d).endswith(".setter") for d in node.decorator_list):
                continue
            types = [spelled(arg.annotation, names) for arg in node.args.args if arg.arg != "self"]
            found[prefix + node.name] = (tuple(types), spelled(node.returns, names))
        elif isinstance(node, ast.AnnAssign) and prefix:
            found[prefix + ast.unparse(node.target)] = ((), spelled(node.annotation, names))
    return found


def parameters(body: list[ast.stmt], prefix: str = "") -> dict[str, list[str]]:
    """Returns the names of the parameters of all functions and methods."""
    found: dict[str, list[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= parameters(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = [arg.arg for arg in node.args.args]
    return found


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[ast.Module, ast.Module]:
    """Our stub and the generated one."""
    folder = tmp_path_factory.mktemp("stubs")
    run("pybind11_stubgen", "torchrec_bls._native", "--output-dir", str(folder))
    generated = (folder / "torchrec_bls" / "_native.pyi").read_text()
    return ast.parse(SOURCE.read_text()), ast.parse(generated)


def run(module: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_functions_are_those_of_the_module(trees: tuple[ast.Module, ast.Module]) -> None:
    ours, generated = trees
    names = aliases(ours)
    here, there = (functions(tree.body, names) for tree in (ours, generated))
    there = {name: found for name, found in there.items() if name.split(".")[0] not in UNNAMED}
    there.pop("VerbsConfig.__init__", None)  # without parameters, as every class has it
    assert here == there


def test_parameters_that_have_names_have_the_same(trees: tuple[ast.Module, ast.Module]) -> None:
    ours, generated = (parameters(tree.body) for tree in trees)
    compared = 0
    for name, there in generated.items():
        for here, theirs in zip(ours.get(name, []), there, strict=False):
            if not re.fullmatch(r"arg\d+|self", theirs):
                assert here == theirs, name
                compared += 1
    assert compared


@pytest.mark.slow
def test_stubtest_finds_nothing(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.write_text(f"{ALLOWED}\n{ALLOWED_INIT}\n")
    # The stub needs no other module, and all that the package imports takes mypy half a minute.
    alone = tmp_path / "mypy.ini"
    alone.write_text("[mypy]\nfollow_imports = skip\nignore_missing_imports = true\n")
    options = ("--allowlist", str(allowed), "--mypy-config-file", str(alone))
    run("mypy.stubtest", "torchrec_bls._native", *options)
