"""Checks of arguments that several calls share."""

# Most bytes of the name of a version in UTF-8.
_LONGEST_VERSION = 64

#: Version that the first forward makes. Nobody publishes under this name.
FIRST_VERSION = "(first forward)"
#: Version without rows, which serves while tables are drained. Nobody publishes under this name.
DRAINED_VERSION = "(drained)"

_OWN_NAMES = {
    FIRST_VERSION: "the name of the weights that the first forward shared",
    DRAINED_VERSION: "the name of tables that are drained",
}


def check_owner(owner: object, owners: int | None = None) -> None:
    """Raises ValueError unless `owner` is a rank.

    Args:
        owner: argument to check.
        owners: number of ranks; None: not known yet.
    """
    if type(owner) is not int or owner < 0 or (owners is not None and owner >= owners):
        among = "" if owners is None else f" of {owners}"
        raise ValueError(f"owner is {owner!r}, but must be a rank{among}, counted from 0")


def check_is_version(version: object) -> None:
    """Raises ValueError unless `version` may name a version of the weights."""
    fits = (
        isinstance(version, str)
        and version.isprintable()
        and 1 <= len(version.encode(errors="replace")) <= _LONGEST_VERSION
    )
    if not fits:
        raise ValueError(
            f"version is {version!r}, but must be a printable text of 1 to {_LONGEST_VERSION} bytes"
        )


def check_version(version: object) -> None:
    """Raises ValueError unless somebody may publish under the name `version`."""
    check_is_version(version)
    if version in _OWN_NAMES:
        raise ValueError(
            f"version is {version!r}, {_OWN_NAMES[str(version)]}: give the new weights another name"
        )
