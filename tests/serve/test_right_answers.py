"""Answers over HTTP and gRPC are those of the plain TorchRec model, in all forms of requests."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import tritonclient.grpc
from numpy.typing import NDArray

from tests.serve import ranker
from tests.serve.asking import WAYS, Ask, Tensor, by_json, drawn, json_of
from tests.serve.running import Running

pytestmark = pytest.mark.full


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


def check(outputs: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]]):
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        # Topics are differences of sums near 1000.
        atol = 1e-3 if name == "topics" else 1e-6
        np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("weighted", [False, True])
def test_ragged_ids_of_each_feature(service: Running, ask: Ask, weighted: bool):
    case = drawn(5, 1, weighted=weighted)
    check(ask(service, case.ragged()).outputs, case.scores())


@pytest.mark.parametrize("weighted", [False, True])
def test_all_features_at_once(service: Running, ask: Ask, weighted: bool):
    case = drawn(7, 2, weighted=weighted)
    check(ask(service, case.at_once()).outputs, case.scores())


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_ids_for_each_sample(service: Running, ask: Ask, count: int):
    case = drawn(4, 3, count=count)
    check(ask(service, case.fixed()).outputs, case.scores())


def test_one_id_for_each_sample_in_one_dimension(service: Running, ask: Ask):
    case = drawn(4, 4, count=1)
    tensors = [replace(each, values=each.values.reshape(-1)) for each in case.fixed()[1:]]
    check(ask(service, [case.dense_tensor, *tensors]).outputs, case.scores())


def test_a_user_for_all_candidates(service: Running, ask: Ask):
    case = drawn(6, 5, count=2)
    user = case.ids["user"][0]
    case.ids["user"][:] = [user] * 6
    dense, _, *others = case.fixed()
    of_all = Tensor("user", np.array([user], np.int64), broadcast=True)
    check(ask(service, [dense, of_all, *others]).outputs, case.scores())


def test_dense_features_for_all_candidates(service: Running, ask: Ask):
    case = drawn(3, 6)
    case.dense[:] = [case.dense[0]] * 3
    dense, *others = case.ragged()
    of_all = Tensor("dense", dense.values[:1], broadcast=True)
    check(ask(service, [of_all, *others]).outputs, case.scores())


def test_ragged_ids_of_a_user_for_all_candidates(service: Running, ask: Ask):
    case = drawn(3, 7, weighted=True)
    assert case.weights is not None
    case.ids["user"][:] = [[3, 4]] * 3
    case.weights["user"][:] = [[0.5, 2.0]] * 3
    dense, _, _, _, *others = case.ragged()
    user = [
        Tensor("user.values", np.array([3, 4], np.int64), broadcast=True),
        Tensor("user.lengths", np.array([2], np.int32), broadcast=True),
        Tensor("user.weights", np.array([0.5, 2.0], np.float32)),
    ]
    check(ask(service, [dense, *user, *others]).outputs, case.scores())


def test_no_samples(service: Running, ask: Ask):
    for case in (drawn(0, 8).ragged(), drawn(0, 8).at_once()):
        outputs = ask(service, case).outputs
        assert {name: each.shape for name, each in outputs.items()} == {
            name: (0, *shape) for name, shape in ranker.OUTPUTS.items()
        }


def test_samples_without_ids(service: Running, ask: Ask):
    case = drawn(3, 9, count=0)
    check(ask(service, case.ragged()).outputs, case.scores())


def test_the_reply_names_what_it_is(service: Running, ask: Ask):
    case = drawn(2, 10)
    answer = ask(service, case.ragged(), id="my request")
    assert answer.id == "my request"
    assert answer.model == "ranker"
    assert answer.version.startswith("v1@")
    assert answer.parameters["generation"] == answer.version
    assert answer.parameters["batch"] >= 2
    assert answer.parameters["queue_us"] >= 0


def test_only_outputs_that_were_asked_for(service: Running, ask: Ask):
    case = drawn(2, 11)
    answer = ask(service, case.ragged(), outputs=[{"name": "topics"}])
    check(answer.outputs, {"topics": case.scores()["topics"]})


def test_an_output_in_binary_beside_one_in_json(service: Running):
    case = drawn(2, 12)
    outputs = [{"name": "click"}, {"name": "topics", "parameters": {"binary_data": True}}]
    request = json_of(case.ragged(), outputs=outputs)
    _, headers, body = service.request("POST", service.infer_path, json.dumps(request).encode(), {})
    end = int(headers["inference-header-content-length"])
    click, topics = json.loads(body[:end])["outputs"]
    found = {
        "click": np.array(click["data"], np.float32),
        "topics": np.frombuffer(body[end:], "<f4").reshape(topics["shape"]),
    }
    check(found, case.scores())


def test_nested_lists(service: Running):
    case = drawn(3, 13, count=2)
    inputs = [{**each.head, "data": each.values.tolist()} for each in case.fixed()]
    status, reply = service.infer({"inputs": inputs})
    assert status == 200
    np.testing.assert_allclose(reply["outputs"][0]["data"], case.scores()["click"], rtol=1e-5)


def test_the_version_in_the_path(service: Running):
    case = drawn(1, 14)
    request = json_of(case.ragged())
    [version] = service.get("/v2/models/ranker")["versions"]
    status, reply = service.infer(request, f"/v2/models/ranker/versions/{version}/infer")
    assert (status, reply["model_version"]) == (200, version)
    status, reply = service.infer(request, "/v2/models/ranker/versions/7/infer")
    assert status == 404
    assert version in reply["error"]


def test_callers_at_once_get_their_own_scores(service: Running):
    cases = [drawn(1 + seed % 5, seed, weighted=seed % 2 == 0) for seed in range(20, 60)]
    ways = list(WAYS.values())
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(ways[number % len(ways)], service, case.ragged())
            for number, case in enumerate(cases)
        ]
        for each, case in zip(asked, cases, strict=True):
            check(each.result().outputs, case.scores())


def test_a_request_above_the_longest_batch(service: Running):
    case = drawn(64, 15)
    check(by_json(service, case.ragged()).outputs, case.scores())


def test_tritonclient(service: Running):
    """Its client for HTTP and KServe's are asked by `tests.serve.outside.clients`."""
    case = drawn(9, 16, weighted=True)
    inputs = []
    for each in case.ragged():
        tensor = tritonclient.grpc.InferInput(each.name, each.head["shape"], each.head["datatype"])
        inputs.append(tensor.set_data_from_numpy(each.values))
    with tritonclient.grpc.InferenceServerClient(service.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("ranker")
        assert not client.is_model_ready("other")
        metadata = client.get_model_metadata("ranker", as_json=True)
        assert metadata["name"] == "ranker"
        assert {"name": "dense", "datatype": "FP32", "shape": ["-1", "3"]} in metadata["inputs"]
        result = client.infer("ranker", inputs, timeout=30_000_000, client_timeout=60)
    check({name: result.as_numpy(name) for name in ranker.OUTPUTS}, case.scores())
