"""Names of packages that are imported when they are first used, after a check of what they need."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchrec_bls._deprecated import old_name
from torchrec_bls._versions import VersionError, check_packages


def imported_at_first_use(
    package: str, places: Mapping[str, str], check: Callable[[], None] = check_packages
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package for names that are made for TorchRec.

    The check comes before any import of torchrec, which fails with an undefined symbol where
    versions do not match. Modules below the package check nothing.

    Args:
        package: name of the package.
        places: module of each name, relative to the package: ".pipeline".
        check: function that raises VersionError.
    """

    def attribute(name: str) -> Any:
        if name not in places:
            return old_name(package, name)
        try:
            check()
        except VersionError as error:
            raise VersionError(f"{package}.{name} is made for TorchRec. {error}") from None
        value = getattr(importlib.import_module(places[name], package), name)
        vars(sys.modules[package])[name] = value
        return value

    return attribute
