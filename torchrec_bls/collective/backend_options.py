"""Options of the torch.distributed backend, and the environment variable that sets them."""

import os
from dataclasses import dataclass, fields

from torchrec_bls.collective.channel import check_bound, check_deadline, check_slot_bytes

ENVIRONMENT_VARIABLE = "TORCHREC_BLS_BACKEND"


@dataclass(frozen=True)
class BLSOptions:
    """How a process group of backend "bls" does its all-to-alls.

    Given as `pg_options` to `init_process_group` or `new_group`. Groups made without get what the
    environment variable TORCHREC_BLS_BACKEND says, for instance "bound=2,deadline=30"; fields that
    it does not name have their defaults. Every rank needs the same bound and slot size.

    Attributes:
        bound: iterations that ranks may be apart; bound + 1 all-to-alls may be outstanding.
        deadline: seconds after which waiting for a peer is an error. None is the timeout of the
            group, half an hour unless given.
        slot_bytes: messages up to this size (less a header of at most 256 bytes) go straight into
            the receiver's memory; larger ones are pulled by it.
    """

    bound: int = 0
    deadline: float | None = None
    slot_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        """Raises ValueError for values that no channel can have."""
        check_bound(self.bound)
        if self.deadline is not None:
            check_deadline(self.deadline)
        check_slot_bytes(self.slot_bytes)

    @classmethod
    def from_environment(cls) -> "BLSOptions":
        """Returns the options that TORCHREC_BLS_BACKEND says."""
        text = os.environ.get(ENVIRONMENT_VARIABLE, "")
        types = {"bound": int, "deadline": float, "slot_bytes": int}
        assert types.keys() == {field.name for field in fields(cls)}
        values = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = item.partition("=")
            try:
                values[name.strip()] = types[name.strip()](value)
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{ENVIRONMENT_VARIABLE} is {text!r}, and {item!r} in it is none of "
                    "bound=NUMBER, deadline=SECONDS, slot_bytes=NUMBER"
                ) from error
        return cls(**values)
