"""How requests end."""

from enum import Enum

# Characters of a text at most. It may quote what the caller has sent, and gRPC sends it as a
# header.
_MOST_CHARACTERS = 1000


class Outcome(Enum):
    """How a request ended: its label in metrics, its HTTP status and the name of its gRPC code."""

    OK = "ok", 200, "OK"
    #: Answered, but after its deadline: the contract is violated.
    LATE = "late", 200, "OK"
    #: It could not have been answered in time, which was known when it arrived.
    REFUSED = "refused", 503, "RESOURCE_EXHAUSTED"
    #: It could have been, when it arrived. Before its batch began, that was over.
    EXPIRED = "expired", 504, "DEADLINE_EXCEEDED"
    #: No version serves while one is made, on a host that can't hold two.
    DRAINED = "drained", 503, "UNAVAILABLE"
    BAD = "bad", 400, "INVALID_ARGUMENT"
    TOO_LARGE = "too_large", 413, "INVALID_ARGUMENT"
    UNKNOWN = "unknown", 404, "NOT_FOUND"
    WRONG_METHOD = "wrong_method", 405, "UNIMPLEMENTED"
    #: The model raised, or its scores are no numbers.
    FAILED = "failed", 500, "INTERNAL"
    #: The caller left before its batch began.
    GONE = "gone", 499, "CANCELLED"

    def __init__(self, label: str, status: int, code: str) -> None:
        self.label = label
        self.status = status
        self.code = code


class RequestError(Exception):
    """A request that gets no scores.

    Args:
        outcome: how it ends.
        text: what its caller is told; shortened if it is long.
        retry_s: seconds after which a retry may succeed; None: a retry is the same again.
    """

    def __init__(self, outcome: Outcome, text: str, retry_s: float | None = None) -> None:
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[:_MOST_CHARACTERS]}..."
        super().__init__(text)
        self.outcome = outcome
        self.text = text
        self.retry_s = retry_s


def bad(text: str) -> RequestError:
    """Returns the error of a request whose caller made a mistake."""
    return RequestError(Outcome.BAD, text)
