"""The description of the HTTP interface says what the service does."""

from typing import Any

import jsonschema
import pytest

from tests.serve import ranker
from tests.serve.asking import drawn, json_of
from tests.serve.running import Running

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def described(service: Running) -> Any:
    return service.get("/openapi.json")


def check(described: Any, schema: Any, value: Any) -> None:
    whole = {**schema, "components": described["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def schema_of(response: Any, kind: str = "application/json") -> Any:
    return response["content"][kind]["schema"]


def test_schemas_are_sound(described: Any):
    assert described["openapi"] == "3.1.0"
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_each_path_replies_as_it_says(service: Running, described: Any):
    [version] = service.get("/v2/models/ranker")["versions"]
    got = {path: each["get"] for path, each in described["paths"].items() if "get" in each}
    assert len(got) == 10
    for path, operation in got.items():
        filled = path.replace("{model}", "ranker").replace("{version}", version)
        status, headers, _ = service.request("GET", filled)
        [kind] = operation["responses"]["200"]["content"]
        assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
        if kind == "application/json":
            schema = schema_of(operation["responses"]["200"])
            check(described, schema, service.get(filled))


def test_the_example_is_answered_as_it_says(service: Running, described: Any):
    operation = described["paths"]["/v2/models/{model}/infer"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    check(described, schema_of(operation["requestBody"]), example)
    status, reply = service.infer(example)
    assert status == 200
    answered = operation["responses"]["200"]
    check(described, schema_of(answered), reply)
    check(described, schema_of(answered), answered["content"]["application/json"]["example"])
    expected = ranker.expected(1, [[0.0] * 3], {name: [[0]] for name in ranker.FEATURES})
    assert reply["outputs"][0]["data"] == pytest.approx(expected["click"].tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (400, {"inputs": []}),
        (413, json_of(drawn(65, 1).ragged())),
        (503, json_of(drawn(1, 1).ragged(), parameters={"timeout": 0})),
    ],
)
def test_refusals_are_as_it_says(service: Running, described: Any, status: int, change: Any):
    response = described["paths"]["/v2/models/{model}/infer"]["post"]["responses"][str(status)]
    found, reply = service.infer(change)
    assert found == status
    check(described, schema_of(response), reply)
