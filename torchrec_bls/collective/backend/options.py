"""Options of the torch.distributed backend, and the environment variable that sets them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchrec_bls.collective.exchange_options import ExchangeOptions

ENVIRONMENT_VARIABLE = "TORCHREC_BLS_BACKEND"
DEFAULT_SLOT_BYTES = 64 << 10

# RDMA devices have environment variables of their own, see VerbsConfig.
_FIELDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "bound": (int, "NUMBER"),
    "transport": (str, "NAME"),
    "slot_bytes": (int, "NUMBER"),
    "deadline": (float, "SECONDS"),
}


@dataclass(frozen=True)
class BLSOptions(ExchangeOptions):
    """Options of a process group of backend "bls" for its all-to-alls: ExchangeOptions' fields.

    They are the `pg_options` of `init_process_group` or `new_group`. A group made without them
    reads the environment variable TORCHREC_BLS_BACKEND, for instance "bound=2,transport=shm".
    Fields that it does not name have their defaults.
    """

    @classmethod
    def from_environment(cls) -> "BLSOptions":
        """Returns the options in TORCHREC_BLS_BACKEND.

        Raises:
            ValueError: the variable has an unknown field, or a value that no channel can have.
        """
        text = os.environ.get(ENVIRONMENT_VARIABLE, "")
        values = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in item.partition("="))
            try:
                values[name] = _FIELDS[name][0](value)
            except (KeyError, ValueError) as error:
                possible = ", ".join(f"{field}={form}" for field, (_, form) in _FIELDS.items())
                raise ValueError(
                    f"{ENVIRONMENT_VARIABLE} is {text!r}, and {item!r} in it is none of {possible}"
                ) from error
        return cls(**values)
