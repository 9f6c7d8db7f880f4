"""Comparison of batches with what TorchRec says of each sample alone."""

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from tests.serve.samples import KEYS, Asked
from torchrec_bls.serve.batches import dense_of, features_of, ids_of, outputs_of
from torchrec_bls.serve.inputs import Features, ModelInputs
from torchrec_bls.serve.waiting import Part, Request


def check(
    model: nn.Module,
    reference: nn.Module,
    inputs: ModelInputs,
    asked: list[Asked],
    data: st.DataObject,
) -> None:
    """Compares a model's answers to requests, cut anywhere and batched in any order, with those of
    a reference to each sample alone, bit for bit.

    Args:
        model: model that is asked.
        reference: model that is asked for one sample after the other.
        inputs: what the models take.
        asked: the requests.
        data: source of cuts and orders.
    """
    pieces = []
    for request in asked:
        features = request.features(inputs)
        count = len(request.samples)
        assert features.samples == count
        cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=2))})
        for first, end in pairwise(cuts):
            pieces.append((part(features, first, end), request.samples[first:end]))
    pieces = data.draw(st.permutations(pieces))
    batch = [features for features, _ in pieces]
    samples = [each for _, of_piece in pieces for each in of_piece]
    with torch.no_grad():
        found = outputs_of(model(dense_of(batch), ids_of(batch, KEYS)), len(samples))
        for number, sample in enumerate(samples):
            alone = outputs_of(reference(*sample.alone(inputs.is_weighted)), 1)
            assert alone.keys() == found.keys()
            for name, expected in alone.items():
                assert np.array_equal(found[name][number], expected[0]), (name, number, sample)


def part(features: Features, first: int, end: int) -> Features:
    """Returns the features of some samples of a request."""
    answer: Any = asyncio.Future(loop=_LOOP)
    return features_of(Part(Request(features, 0.0, 0.0, answer), first, end))


# Nothing runs in it: futures want one.
_LOOP = asyncio.new_event_loop()
