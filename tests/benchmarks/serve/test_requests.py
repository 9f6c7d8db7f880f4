"""Requests: how they are distributed, and what their bytes say."""

import email
import json

import numpy as np
import pytest
from scipy import stats

from benchmarks.serve import shape
from benchmarks.serve.encoding import decode, encode
from benchmarks.serve.traffic import Request, arrivals, requests

COUNT = 2000


@pytest.fixture(scope="module")
def drawn() -> list[Request]:
    return list(requests(COUNT, rows=100, seed=3))


def test_candidates_are_lognormal_and_clipped(drawn: list[Request]) -> None:
    candidates = np.array([len(request.dense) for request in drawn])
    assert (candidates.min(), candidates.max()) == (1, 256)
    law = stats.lognorm(shape.SIGMA, scale=shape.MEDIAN_CANDIDATES)
    # Five deviations of a share of so many.
    for bound in (8, 32, 128, 255):
        expected = law.cdf(bound + 0.5)
        allowed = 5 * (expected * (1 - expected) / COUNT) ** 0.5
        assert (candidates <= bound).mean() == pytest.approx(expected, abs=allowed)


def test_a_request_has_one_id_for_each_key_and_candidate(drawn: list[Request]) -> None:
    for request in drawn[:50]:
        candidates = len(request.dense)
        assert request.dense.shape == (candidates, 13)
        assert request.lengths.tolist() == [1] * (26 * candidates)
        assert request.values.shape == (26 * candidates,)
        assert (request.dense.dtype, request.values.dtype) == (np.float32, np.int64)
        assert request.lengths.dtype == np.int32


def test_ids_follow_zipfs_law(drawn: list[Request]) -> None:
    counts = np.bincount(np.concatenate([request.values for request in drawn]), minlength=100)
    law = stats.zipfian(1.05, 100).pmf(np.arange(1, 101))
    assert len(counts) == 100
    assert np.sort(counts)[::-1] / counts.sum() == pytest.approx(law, rel=0.05)
    # Scattered: the popular ones are not the first.
    assert (np.argsort(counts)[::-1][:10] != np.arange(10)).any()


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    first, again, other = (next(requests(1, 100, seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.dense, again.dense)
    assert np.array_equal(first.values, again.values)
    assert not np.array_equal(first.dense, other.dense)


def test_arrivals_are_a_poisson_process() -> None:
    moments = arrivals(rate=100, seconds=100, seed=5)
    assert abs(len(moments) - 10_000) < 5 * 10_000**0.5
    assert stats.kstest(np.diff(moments), stats.expon(scale=0.01).cdf).pvalue > 1e-4
    assert (moments >= 0).all() and (moments < 100).all()
    assert not np.array_equal(moments, arrivals(rate=100, seconds=100, seed=6))


def test_the_bytes_of_a_request_say_what_it_asks() -> None:
    request = next(requests(1, 1000, seed=7))
    candidates = len(request.dense)
    lines, _, body = encode(request, "/v2/models/m/infer", 0.02).partition(b"\r\n\r\n")
    first, _, rest = lines.partition(b"\r\n")
    assert first == b"POST /v2/models/m/infer HTTP/1.1"
    headers = email.message_from_bytes(rest)
    assert int(headers["content-length"]) == len(body)
    length = int(headers["inference-header-content-length"])
    said = json.loads(body[:length])
    assert said["parameters"] == {"timeout": 20_000}
    assert said["outputs"] == [{"name": "scores", "parameters": {"binary_data": True}}]
    tensors, rest = {}, body[length:]
    for each in said["inputs"]:
        size = each["parameters"]["binary_data_size"]
        dtype = {"FP32": "<f4", "INT64": "<i8", "INT32": "<i4"}[each["datatype"]]
        tensors[each["name"]] = np.frombuffer(rest[:size], dtype).reshape(each["shape"])
        rest = rest[size:]
    assert rest == b""
    assert list(tensors) == ["dense", "ids.values", "ids.lengths"]
    assert tensors["dense"].shape == (candidates, 13)
    assert np.array_equal(tensors["dense"], request.dense)
    assert np.array_equal(tensors["ids.values"], request.values)
    assert np.array_equal(tensors["ids.lengths"], request.lengths)


def test_an_answer_is_read() -> None:
    scores = np.array([0.25, 0.5, 0.75], dtype="<f4")
    said = {
        "model_version": "step-7",
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [3]}],
    }
    head = json.dumps(said).encode()
    lines = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + 12}"
    answer = decode(f"HTTP/1.1 200 OK\r\n{lines}\r\n\r\n".encode() + head + scores.tobytes())
    assert answer.version == "step-7"
    assert answer.scores.tolist() == [0.25, 0.5, 0.75]
