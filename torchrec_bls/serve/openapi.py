"""The description of the HTTP interface, OpenAPI 3.1."""

from typing import Any

from torchrec_bls.serve.inputs import ModelInputs


def openapi(name: str, inputs: ModelInputs) -> dict[str, Any]:
    """Returns the description.

    Args:
        name: name of the model.
        inputs: what it takes.
    """
    return {"openapi": "3.1.0", "info": {"title": name, "version": "2"}, "paths": {}}
