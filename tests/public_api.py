"""The public API as text, a line each: what a release may not change without saying so.

`python -m tests.public_api > tests/public_api.txt` takes over a change that is meant.
"""

import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchrec_bls.errors

FILE = Path(__file__).with_suffix(".txt")
MODULES = (
    "torchrec_bls",
    "torchrec_bls.datasets",
    "torchrec_bls.observe",
    "torchrec_bls.overlap",
    "torchrec_bls.sharding",
)


def lines() -> Iterator[str]:
    """Yields every public name with its parameters and their defaults, without annotations."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            yield from _lines_of(f"{module_name}.{name}", getattr(module, name))
    for name, value in sorted(vars(torchrec_bls.errors).items()):
        if inspect.isclass(value) and issubclass(value, Exception):
            bases = ", ".join(base.__name__ for base in value.__bases__)
            yield f"torchrec_bls.errors.{name} is {bases}"


def _lines_of(name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        yield name
        return
    yield f"{name}{_parameters(value)}"
    if inspect.isclass(value):
        for attribute, member in sorted(vars(value).items()):
            if attribute.startswith("_"):
                continue
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            yield f"{name}.{attribute}{_parameters(member) if inspect.isfunction(member) else ''}"


def _parameters(function: Any) -> inspect.Signature | str:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class without an __init__
        return ""
    bare = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default="the environment" if parameter.default is os.environ else parameter.default,
        )
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


if __name__ == "__main__":
    print("\n".join(lines()))
