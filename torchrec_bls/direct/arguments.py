"""Checks of arguments that several calls share."""


def check_owner(owner: object, owners: int | None = None) -> None:
    """Raises ValueError unless `owner` is a rank.

    Args:
        owner: argument to check.
        owners: number of ranks; None: not known yet.
    """
    if type(owner) is not int or owner < 0 or (owners is not None and owner >= owners):
        among = "" if owners is None else f" of {owners}"
        raise ValueError(f"owner is {owner!r}, but must be a rank{among}, counted from 0")
