"""A page that shows how a service does."""

from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.serve.observer import Observer


def page(name: str, state: ServingState, observer: Observer, up_s: float) -> str:
    """Returns the page, HTML.

    Args:
        name: name of the model.
        state: what the process serves.
        observer: counts of its requests.
        up_s: seconds since it began.
    """
    return f"<!doctype html><title>{name}</title><p>{state.version}"
