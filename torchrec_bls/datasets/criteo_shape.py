"""The shape of a Criteo row: the number of features of each kind, and the sizes of their tables."""

DENSE_FEATURES = 13
CATEGORICAL_FEATURES = 26

#: Keys of the sparse features, the same as ``torchrec.datasets.criteo.DEFAULT_CAT_NAMES``.
CATEGORICAL_NAMES = tuple(f"cat_{index}" for index in range(CATEGORICAL_FEATURES))

#: Distinct values of C1..C26 over the 45,840,617 training rows of Criteo's Display Advertising
#: Challenge (Kaggle, 2014), missing counted as a value: the table sizes that
#: facebookresearch/dlrm derives from that file. They add up to 33,762,577 rows.
KAGGLE_CARDINALITIES = (
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
    27,
    14992,
    5461306,
    10,
    5652,
    2173,
    4,
    7046547,
    18,
    15,
    286181,
    105,
    142572,
)


def capped_cardinalities(cap: int) -> list[int]:
    """Returns the 26 Kaggle cardinalities, none larger than ``cap``.

    Args:
        cap: largest number of rows of a table, at least 1.

    Raises:
        ValueError: ``cap`` is below 1.
    """
    if cap < 1:
        raise ValueError(f"cap is {cap}; a table needs at least 1 row")
    return [min(cardinality, cap) for cardinality in KAGGLE_CARDINALITIES]


def check_rows_per_table(rows_per_table: list[int]) -> None:
    """Raises ValueError unless there are 26 tables of at least one row each."""
    if len(rows_per_table) != CATEGORICAL_FEATURES:
        raise ValueError(
            f"rows_per_table has {len(rows_per_table)} entries; "
            f"Criteo's shape has {CATEGORICAL_FEATURES} tables"
        )
    for name, rows in zip(CATEGORICAL_NAMES, rows_per_table, strict=True):
        if rows < 1:
            raise ValueError(f"rows_per_table gives {name} {rows} rows; at least 1 is needed")
