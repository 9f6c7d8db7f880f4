"""Each name and spelling of 0.2.0 that goes still works, and says what to write instead."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.autograd.profiler import profile
from torchrec.modules.embedding_configs import EmbeddingConfig

import torchrec_bls
from tests.distributed.models import SGD
from torchrec_bls import (
    BLSConfig,
    BLSEmbeddingBagCollectionSharder,
    BLSEmbeddingCollectionSharder,
    BLSQuantEmbeddingBagCollectionSharder,
    BLSQuantEmbeddingCollectionSharder,
    BoundedLagChannel,
    CodecConfig,
    Decay,
    ErrorBound,
    Publication,
    _native,
    datasets,
    sharding,
)
from torchrec_bls._deprecated import GONE_IN, OLD
from torchrec_bls.codecs import stock, torchrec_codecs
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.errors import ChannelClosedError, ProtocolError

DECAY = Decay(3.0, 100, kind="linear")
CODECS = CodecConfig(forward={"t": ErrorBound(0.1, DECAY)}, backward="bf16", unique=True)
TABLE = EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
CONFIG = BLSConfig(bound=2)

Use = Callable[[], Any]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[BoundedLagChannel]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        with BoundedLagChannel(dist.group.WORLD, slot_bytes=1024) as made:
            yield made
    finally:
        dist.destroy_process_group()


def generation() -> Any:
    state = "torchrec_bls.direct.serving.publishing.serving_state"
    with mock.patch(state, return_value=SimpleNamespace(serial=3)):
        return torchrec_bls.generation_of(mock.Mock())


def uses_of_modules_and_values() -> dict[str, tuple[Use, Any]]:
    """How each name is used, and what comes of it."""
    report = SimpleNamespace(as_text=lambda: "text", as_html=lambda: "page")
    of_profile = sharding.load_profile("epyc-milan-2-cores")
    return {
        "torchrec_bls.generation_of": (generation, 3),
        "torchrec_bls.Publication.generation": (
            lambda: Publication("v", False, 0, 7, mock.Mock(), []).generation,  # type: ignore[attr-defined]
            7,
        ),
        "torchrec_bls.datasets.KAGGLE_CARDINALITIES": (
            lambda: list(datasets.KAGGLE_CARDINALITIES),
            datasets.capped_cardinalities(10**9),
        ),
        "torchrec_bls.codecs.stock.codecs_registry": (
            lambda: stock.codecs_registry,
            torchrec_codecs.codecs_registry,
        ),
        "torchrec_bls.sharding.as_html": (lambda: sharding.as_html(report), "page"),
        "torchrec_bls.sharding.as_text": (lambda: sharding.as_text(report), "text"),
        "torchrec_bls.sharding.link_of": (
            lambda: sharding.link_of(of_profile, 2),
            of_profile.link(2),
        ),
        "torchrec_bls.Decay.factor": (lambda: DECAY.factor(50), 2.0),  # type: ignore[attr-defined]
        "torchrec_bls.ErrorBound.at": (
            lambda: ErrorBound(0.5).at(0, addends=2),  # type: ignore[attr-defined]
            0.25,
        ),
    }


def uses_of_codecs() -> dict[str, tuple[Use, Any]]:
    codecs: Any = CODECS
    uses = {
        "backward_of": (lambda: codecs.backward_of("t"), Codec.BF16),
        "check": (lambda: codecs.check([TABLE]), None),
        "decays": (lambda: codecs.decays, True),
        "describe": (
            lambda: codecs.describe("t").partition(") for ")[2],
            "embeddings, BF16 for gradients, equal rows once",
        ),
        "encode_any": (lambda: codecs.encode_any([TABLE]), True),
        "finds_unique": (lambda: codecs.finds_unique, True),
        "forward_of": (lambda: codecs.forward_of("t"), ErrorBound(0.1, DECAY)),
        "unique_of": (lambda: codecs.unique_of("t"), True),
    }
    return {f"torchrec_bls.CodecConfig.{name}": use for name, use in uses.items()}


def uses_of_a_channel(channel: Any) -> dict[str, tuple[Use, Any]]:
    """In the order of the uses: the last ones end the channel."""
    held = [torch.zeros(1)]

    def hold() -> Any:
        channel.hold_until_release(held)
        return channel.own.pop(0)

    def range_() -> Any:
        with profile(), channel.range("post") as made:
            return made.name

    def refusal() -> Any:
        return type(channel.refuse(SimpleNamespace(sequence=0), "no"))

    uses = {
        "warn_if_pulled": (channel.warn_if_pulled, None),
        "hold_until_release": (hold, held),
        "range": (range_, "bls::channel post seq=0 lag=0 bound=0"),
        "check_not_abandoned": (channel.check_not_abandoned, None),
        "refuse": (refusal, ProtocolError),
        "abandon": (channel.abandon, None),
    }
    return {f"torchrec_bls.BoundedLagChannel.{name}": use for name, use in uses.items()}


def test_each_old_name_works_and_says_what_to_write(channel: BoundedLagChannel) -> None:
    uses = {**uses_of_modules_and_values(), **uses_of_codecs(), **uses_of_a_channel(channel)}
    news = {f"{old.owner}.{old.name}": old.new for old in OLD}
    assert uses.keys() == news.keys()
    for name, (use, expected) in uses.items():
        message = re.escape(f"{name} goes in {GONE_IN}. Write {news[name]}")
        with pytest.warns(FutureWarning, match=f"^{message}$") as warned:
            assert use() == expected, name
        assert {each.filename for each in warned} == {__file__}, name
    with pytest.raises(ChannelClosedError), pytest.warns(FutureWarning, match="check_not"):
        channel.check_not_abandoned()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("channel")
def test_a_transport_of_an_old_name_is_the_new_one() -> None:
    said = f'^transport="c10d" goes in {GONE_IN}. Write transport="tcp"$'
    assert dist.group.WORLD is not None
    with pytest.warns(FutureWarning, match=said) as warned:
        config = BLSConfig(transport="c10d")
        with mock.patch("torchrec_bls._native.TcpTransport", wraps=_native.TcpTransport) as made:
            BoundedLagChannel(dist.group.WORLD, slot_bytes=1024, transport="c10d").close()
    assert config == BLSConfig(transport="tcp")
    assert made.call_count == 1
    assert [each.filename for each in warned] == [__file__] * 2


def test_names_that_never_were_have_no_warning() -> None:
    for module in (torchrec_bls, sharding, datasets):
        with pytest.raises(AttributeError, match=r"module 'torchrec_bls.*' has no attribute 'at'"):
            _ = module.at


@pytest.mark.parametrize(
    ("by_place", "by_name"),
    [
        ((CONFIG,), {}),
        ((CONFIG,), {"fused_params": SGD}),
        ((CONFIG, SGD), {}),
        ((SGD, CONFIG), {}),
    ],
)
@pytest.mark.parametrize(
    "sharder", [BLSEmbeddingCollectionSharder, BLSEmbeddingBagCollectionSharder]
)
def test_a_configuration_by_its_place_is_taken(
    sharder: Any, by_place: tuple[Any, ...], by_name: dict[str, Any]
) -> None:
    name = sharder.__name__
    said = f"^torchrec_bls.{name}.BLSConfig.* goes in {GONE_IN}. Write {name}.config=BLSConfig"
    with pytest.warns(FutureWarning, match=said) as warned:
        made = sharder(*by_place, **by_name)
    assert [each.filename for each in warned] == [__file__]
    assert made._config is CONFIG
    assert ("learning_rate" in made.fused_params) == (SGD in by_place or bool(by_name))


@pytest.mark.parametrize(
    "sharder", [BLSQuantEmbeddingCollectionSharder, BLSQuantEmbeddingBagCollectionSharder]
)
def test_a_configuration_by_its_place_is_taken_for_quantized_tables(sharder: Any) -> None:
    with pytest.warns(FutureWarning, match=r"Write .*\(config=BLSConfig\(...\)\)$"):
        made = sharder(CONFIG, checkpoint={}, shardable_params=["t"])
    assert (made._config, made._checkpoint) == (CONFIG, {})
    assert made._shardable_params == ["t"]


def test_the_release_without_old_names_is_to_come() -> None:
    """In that release the list is emptied, and the functions that only it names go."""
    assert Version(torchrec_bls.__version__) < Version(GONE_IN)
