"""The description of the HTTP interface, OpenAPI 3.1, with examples of the model that is served."""

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.inputs import DENSE, DTYPES, ModelInputs
from torchrec_bls.serve.outcomes import Outcome

# Found at import: a worker that has run out of descriptors could not find it.
PACKAGE_VERSION = metadata.version("torchrec-bls")

_Json = dict[str, Any]
_HEAD_SIZE = "Inference-Header-Content-Length"
_RETRY = {
    "Retry-After": {
        "description": "Seconds after which a retry may succeed; absent if it is the same again.",
        "schema": {"type": "integer", "minimum": 1},
    }
}


def openapi(
    name: str, inputs: ModelInputs, outputs: Mapping[str, tuple[int, ...]], contract: Contract
) -> _Json:
    """Returns the description.

    Args:
        name: name of the model.
        inputs: what it takes.
        outputs: shape of each of its outputs by name, without the samples.
        contract: what is promised to callers.
    """
    model, version = _in_path("model", {"const": name}), _in_path("version", {"type": "string"})
    infer = {"post": _inference(name, inputs, outputs, contract)}
    ready = {"get": _readiness("Whether the model answers")}
    about = {"get": _got("What the model takes and returns", "ModelMetadata", Outcome.UNKNOWN)}
    paths: _Json = {
        "/v2": {"get": _got("What the server is", "ServerMetadata")},
        "/v2/health/live": {"get": _got("Whether the process lives", "Live")},
        "/v2/health/ready": {"get": _readiness("Whether requests are answered")},
        "/metrics": {"get": _got_text("Metrics in Prometheus's format", "text/plain")},
        "/openapi.json": {"get": _got("This description", "Description")},
        "/": {"get": _got_text("A page that shows how the service does", "text/html")},
    }
    for prefix, parameters in (
        ("/v2/models/{model}", [model]),
        ("/v2/models/{model}/versions/{version}", [model, version]),
    ):
        for path, operations in (("", about), ("/ready", ready), ("/infer", infer)):
            paths[prefix + path] = {"parameters": parameters, **operations}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"Model '{name}' served by torchrec-bls",
            "version": PACKAGE_VERSION,
            "description": "The Open Inference Protocol v2 with binary tensors. A request is "
            f"answered within its deadline, {contract.deadline_ms:g} ms unless it gives another "
            "one, or refused early.",
        },
        "paths": paths,
        "components": {"schemas": _schemas(name, inputs, outputs)},
    }


def _inference(
    name: str, inputs: ModelInputs, outputs: Mapping[str, tuple[int, ...]], contract: Contract
) -> _Json:
    return {
        "summary": "Ask the model",
        "description": f"At most {contract.max_samples} samples and {contract.max_body_bytes} "
        "bytes. Ids of features are given as one or as many for each sample (`F`), as lists of "
        "any length (`F.values`, `F.lengths`), or all features at once (`ids.values`, "
        "`ids.lengths`: feature after feature, in the order of the model's metadata). A tensor "
        "with the parameter `broadcast` has one sample, which stands for all.",
        "parameters": [
            {
                "name": _HEAD_SIZE,
                "in": "header",
                "description": "Bytes of the JSON, where tensors follow it in binary. Each of "
                "these has the parameter `binary_data_size`, and no `data`.",
                "schema": {"type": "integer", "minimum": 1},
            }
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _schema("InferenceRequest"),
                    "example": _request(inputs),
                },
                **_BINARY,
            },
        },
        "responses": {
            "200": {
                "description": "The scores; by JSON, or by what was asked for in binary behind it.",
                "headers": {
                    _HEAD_SIZE: {
                        "description": "Bytes of the JSON, where tensors follow it in binary.",
                        "schema": {"type": "integer"},
                    }
                },
                "content": {
                    "application/json": {
                        "schema": _schema("InferenceReply"),
                        "example": _reply(name, outputs),
                    },
                    **_BINARY,
                },
            },
            **_errors(
                Outcome.BAD,
                Outcome.UNKNOWN,
                Outcome.TOO_LARGE,
                Outcome.FAILED,
                Outcome.REFUSED,
                Outcome.EXPIRED,
            ),
        },
    }


_BINARY: _Json = {
    "application/octet-stream": {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "JSON, then the elements of each binary tensor in its order, little "
            "endian, without gaps.",
        }
    }
}
_MEANINGS = {
    Outcome.BAD: "The request does not fit; the text names the tensor.",
    Outcome.UNKNOWN: "No such model or version is served.",
    Outcome.TOO_LARGE: "Too many samples, or too large a body: send several requests.",
    Outcome.FAILED: "The model failed, or its scores are no numbers.",
    Outcome.REFUSED: "It would be late, or no version serves while one is made.",
    Outcome.EXPIRED: "It was admitted, but batches before it took longer than was predicted.",
}


def _errors(*outcomes: Outcome) -> _Json:
    responses = {}
    for outcome in outcomes:
        response: _Json = {"description": _MEANINGS[outcome], "content": _json_of("Error")}
        if outcome in (Outcome.REFUSED, Outcome.EXPIRED):
            response["headers"] = _RETRY
        responses[str(outcome.status)] = response
    return responses


def _got(summary: str, schema: str, *errors: Outcome) -> _Json:
    found = {"200": {"description": summary, "content": _json_of(schema)}}
    return {"summary": summary, "responses": {**found, **_errors(*errors)}}


def _got_text(summary: str, kind: str) -> _Json:
    content = {kind: {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}},
    }


def _readiness(summary: str) -> _Json:
    not_now = {"description": "No, and why not.", "content": _json_of("Ready")}
    described = _got(summary, "Ready", Outcome.UNKNOWN)
    described["responses"]["503"] = not_now
    return described


def _in_path(name: str, schema: _Json) -> _Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _schema(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json_of(name: str) -> _Json:
    return {"application/json": {"schema": _schema(name)}}


def _object(required: _Json, optional: _Json | None = None) -> _Json:
    return {
        "type": "object",
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def _list(items: _Json, **more: Any) -> _Json:
    return {"type": "array", "items": items, **more}


def _schemas(name: str, inputs: ModelInputs, outputs: Mapping[str, tuple[int, ...]]) -> _Json:
    text, flag, number = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
    size = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    tensors = [each["name"] for each in inputs.tensors()]
    metadata_of = _object({"name": text, "datatype": text, "shape": _list({"type": "integer"})})
    timeout = {
        "type": "integer",
        "minimum": -(2**63) + 1,
        "maximum": 2**63 - 1,
        "description": "Microseconds from its arrival to the last byte of its answer.",
    }
    return {
        "InferenceRequest": _object(
            {"inputs": _list(_schema("Tensor"))},
            {
                "id": {**text, "description": "Comes back in the reply."},
                "parameters": _object({}, {"timeout": timeout, "binary_data_output": flag}),
                "outputs": _list(_schema("WantedOutput"), description="None: all."),
            },
        ),
        "Tensor": _object(
            {
                "name": {"enum": tensors},
                "shape": _list(size, minItems=1, maxItems=2),
                "datatype": {"enum": list(DTYPES)},
            },
            {
                "parameters": _object({}, {"broadcast": flag, "binary_data_size": size}),
                "data": {
                    **_list({"anyOf": [number, _list(number)]}),
                    "description": "Its elements in the order of rows, or a list for each row.",
                },
            },
        ),
        "WantedOutput": _object(
            {"name": {"enum": list(outputs)}}, {"parameters": _object({}, {"binary_data": flag})}
        ),
        "InferenceReply": _object(
            {
                "model_name": {"const": name},
                "model_version": text,
                "parameters": _object(
                    {
                        "generation": {**text, "description": "Version of the weights."},
                        "batch": {**size, "description": "Samples that the model ran on at once."},
                        "queue_us": {**size, "description": "Microseconds before its batch."},
                    }
                ),
                "outputs": _list(
                    _object(
                        {
                            "name": {"enum": list(outputs)},
                            "datatype": {"const": "FP32"},
                            "shape": _list(size),
                        },
                        {
                            "data": _list(number),
                            "parameters": _object({}, {"binary_data_size": size}),
                        },
                    )
                ),
            },
            {"id": text},
        ),
        "ModelMetadata": _object(
            {
                "name": {"const": name},
                "versions": _list(text),
                "platform": text,
                "inputs": _list(metadata_of),
                "outputs": _list(metadata_of),
            }
        ),
        "ServerMetadata": _object({"name": text, "version": text, "extensions": _list(text)}),
        "Live": _object({"live": flag}),
        "Ready": _object({"ready": flag}, {"error": text}),
        "Description": {"type": "object"},
        "Error": _object({"error": text}),
    }


def _request(inputs: ModelInputs) -> _Json:
    """Returns a request of one sample, which has the first id of each feature."""
    tensors = []
    if inputs.dense_columns:
        columns = inputs.dense_columns
        tensors.append(_tensor(DENSE, "FP32", [1, columns], [0.0] * columns))
    tensors.extend(_tensor(each.name, "INT64", [1], [0]) for each in inputs.features)
    return {"inputs": tensors}


def _reply(name: str, outputs: Mapping[str, tuple[int, ...]]) -> _Json:
    version = "2026-11-26@0123abcd"
    tensors = []
    for output, shape in outputs.items():
        count = 1
        for size in shape:
            count *= size
        tensors.append(_tensor(output, "FP32", [1, *shape], [0.5] * count))
    return {
        "model_name": name,
        "model_version": version,
        "parameters": {"generation": version, "batch": 32, "queue_us": 250},
        "outputs": tensors,
    }


def _tensor(name: str, datatype: str, shape: list[int], data: list[float]) -> _Json:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}
