"""The public API as text, a line a name: what a release may not change without saying so.

Public is what `__all__` of a public module holds. The pages of docs/reference say the rest: which
members of a class are for users, and by `autoclass:: Name()` that the package makes its objects, so
that nobody calls its constructor. Members that only other modules of the package call are on no
page.

    torchrec_bls.Class(parameters of the constructor): attribute, method(parameters)

`python -m tests.public_api` takes over a change that is meant. It leaves the lines of names that
the installed TorchRec lacks: those end with the version that has them.
"""

import importlib
import inspect
import os
import re
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tests.paths import ROOT
from torchrec_bls import errors, sharding

FILE = Path(__file__).with_suffix(".txt")
PAGES = ROOT / "docs" / "reference"
MODULES = (
    "torchrec_bls",
    "torchrec_bls.codecs.torchrec_codecs",
    "torchrec_bls.datasets",
    "torchrec_bls.observe",
    "torchrec_bls.observe.prometheus",
    "torchrec_bls.overlap",
    "torchrec_bls.overlap.quantized_hook",
    "torchrec_bls.sharding",
)
#: Ends the line of a name that older versions of TorchRec lack.
LATER = "  # torchrec 1.9"
_HAS_LATER = sharding._has_seams()
_OF_LATER = {f"torchrec_bls.sharding.{name}" for name in sharding._SEAMS}


class Shown(NamedTuple):
    """What a page shows of a name.

    Attributes:
        is_made: whether objects are made by the package alone.
        members: members that it shows; None: all that have a docstring and no underscore.
        is_chosen: whether it shows these alone, and not the attributes of the docstring as well.
    """

    is_made: bool
    members: list[str] | None = None
    is_chosen: bool = False


def shown() -> dict[str, Shown]:
    """Returns what the pages show, by the whole name."""
    found: dict[str, Shown] = {}
    for page in sorted(PAGES.glob("api-*.md")):
        module = ""
        for line in page.read_text().splitlines():
            if directive := re.match(r"\.\. (\w+):: ([\w.]+)(\(\))?$", line):
                kind, name, made = directive.groups()
                if kind == "currentmodule":
                    module = name
                elif kind != "automodule":
                    name = name if "." in name else f"{module}.{name}"
                    found[name] = Shown(made is not None, [])
            elif members := re.match(r" +:members:(.*)$", line):
                names = re.findall(r"\w+", members[1])
                if found:
                    last = next(reversed(found))
                    found[last] = Shown(found[last].is_made, names or None, bool(names))
    return found


def names() -> Iterator[tuple[str, Any]]:
    """Yields every public name but those of errors, with its value."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            yield f"{module_name}.{name}", getattr(module, name)


def lines() -> list[str]:
    """Returns the lines of what is installed."""
    pages = shown()
    found = list(_errors())
    for name, value in names():
        if name in _OF_LATER:
            found.append(_line(name, value, Shown(False, [])) + LATER)
        else:
            found.append(_line(name, value, pages[name]) if callable(value) else name)
    return _in_order(found)


def lines_of_file() -> list[str]:
    """Returns the lines of the file for what is installed."""
    return [each for each in FILE.read_text().splitlines() if _HAS_LATER or LATER not in each]


def write() -> None:
    """Writes the file anew."""
    absent = [each for each in FILE.read_text().splitlines() if LATER in each and not _HAS_LATER]
    FILE.write_text("\n".join(_in_order([*lines(), *absent])) + "\n")


def _in_order(every: list[str]) -> list[str]:
    def place(line: str) -> tuple[int, str]:
        modules = (*MODULES, "torchrec_bls.errors")
        module = max((each for each in modules if line.startswith(f"{each}.")), key=len)
        return modules.index(module), line

    return sorted(every, key=place)


def _line(name: str, value: Any, page: Shown) -> str:
    head = name if page.is_made else f"{name}{_parameters(value)}"
    members = _members(name, value, page) if inspect.isclass(value) else []
    return f"{head}: {', '.join(members)}" if members else head


def _members(name: str, owner: type, page: Shown) -> list[str]:
    if page.is_chosen:
        chosen = {each: _member(owner, each) for each in page.members or ()}
        assert all(chosen.values()), f"a page shows members that {name} lacks: {chosen}"
        return sorted(chosen.values())
    parameters = () if page.is_made else inspect.signature(owner).parameters
    every = [each for each in vars(owner) if not each.startswith("_")]
    described = [] if page.members is not None else [_member(owner, each) for each in every]
    return sorted([*_attributes(owner, parameters), *filter(None, described)])


def _attributes(owner: type, parameters: Collection[str]) -> list[str]:
    """Returns the attributes of its docstring that are no parameters."""
    _, _, section = inspect.cleandoc(owner.__doc__ or "").partition("\nAttributes:\n")
    section = section.partition("\n\n")[0]
    return [each for each in re.findall(r"^    (\w+):", section, re.M) if each not in parameters]


def _member(owner: type, name: str) -> str:
    """Returns a property or a method with its parameters; empty if it has no docstring."""
    member = inspect.getattr_static(owner, name, None)
    if isinstance(member, owner):  # of an enumeration
        return name
    if isinstance(member, (property, cached_property)):
        return name if member.__doc__ else ""
    if isinstance(member, classmethod):
        return f"{name}{_parameters(getattr(owner, name))}"
    if inspect.isfunction(member) and member.__doc__:
        return f"{name}{_parameters(member, is_method=True)}"
    return ""


def _parameters(function: Any, is_method: bool = False) -> str:
    signature = inspect.signature(function)
    bare = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default="the environment" if parameter.default is os.environ else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    own = bare[1:] if is_method else bare
    return str(signature.replace(parameters=own, return_annotation=inspect.Signature.empty))


def _errors() -> Iterator[str]:
    """Yields a line for each error that has no base here, with those below it."""
    of_us = [
        value
        for _, value in sorted(vars(errors).items())
        if inspect.isclass(value) and issubclass(value, Exception)
    ]

    def named(error: type) -> str:
        others = [base.__name__ for base in error.__bases__ if base not in of_us]
        return f"{error.__name__}({', '.join(others)})" if others else error.__name__

    for first in of_us:
        if not any(base in of_us for base in first.__bases__):
            below = [named(each) for each in of_us if each is not first and issubclass(each, first)]
            yield f"torchrec_bls.errors.{named(first)}: {', '.join(below)}"


if __name__ == "__main__":
    write()
