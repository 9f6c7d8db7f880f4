"""Sizes of the model that is served and of its requests, for processes that need no torch."""

TABLES, ROWS, DIM, DENSE = 26, 200_000, 64, 13
#: Rows of each table with --quick.
QUICK_ROWS = 1_000
#: Candidates of a request: lognormal with this median, cut to 1 to this number.
MEDIAN_CANDIDATES, SIGMA, MOST_CANDIDATES = 32, 1.0, 256
#: Skew of the ids, that of torchrec_bls.datasets.synthetic.
ZIPF_EXPONENT = 1.05
#: By which moment after its intended send a request has to be answered.
DEADLINE_S = 0.02
