"""Names and spellings of 0.2.0 that work for one more release, and say what to write instead.

This is their only list. A row that has been in a release is deleted with what it stands for.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

#: The release that has none of them.
GONE_IN = "0.4.0"

# Modules whose calls are not the caller's own.
_OURS = ("torchrec_bls", "importlib._bootstrap")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)


class Old(NamedTuple):
    """A name that goes.

    Attributes:
        owner: public module or class that has it: "torchrec_bls.CodecConfig".
        name: the name.
        new: what to write instead.
        place: module and name of the value: "torchrec_bls.codecs.error_bound:bound_at". That of a
            method is a function, which takes the object first.
        is_property: whether it is a property.
    """

    owner: str
    name: str
    new: str
    place: str
    is_property: bool = False

    def value(self) -> Any:
        """Warns, and returns what the name stands for."""
        _warn(f"{self.owner}.{self.name}", self.new)
        module, name = self.place.split(":")
        return getattr(importlib.import_module(module), name)


_CHANNEL, _CHANNELS = "torchrec_bls.BoundedLagChannel", "torchrec_bls.collective.channel"
_CODECS, _CODECS_OF = "torchrec_bls.CodecConfig", "torchrec_bls.distributed.codec_config"
_BOUNDS = "torchrec_bls.codecs.error_bound"
_SHAPE = "torchrec_bls.datasets.criteo_shape"
_HERE = "torchrec_bls._deprecated"
_ITSELF = "nothing: the package does it by itself"
_NOTHING = "nothing in its place"
_COUNT = "version_of, or serving_state(...).serial for a count"

OLD = (
    Old("torchrec_bls", "generation_of", _COUNT, f"{_HERE}:_generation_of"),
    Old("torchrec_bls.Publication", "generation", "Publication.version", f"{_HERE}:_serial", True),
    Old(_CHANNEL, "abandon", _ITSELF, f"{_CHANNELS}:abandon"),
    Old(_CHANNEL, "check_not_abandoned", _ITSELF, f"{_CHANNELS}:check_not_abandoned"),
    Old(_CHANNEL, "hold_until_release", _ITSELF, f"{_CHANNELS}:hold_until_release"),
    Old(_CHANNEL, "range", "torch.profiler.record_function", f"{_CHANNELS}:profiler_range"),
    Old(_CHANNEL, "refuse", "poison, and raise ProtocolError", f"{_CHANNELS}:refuse"),
    Old(_CHANNEL, "warn_if_pulled", _ITSELF, f"{_CHANNELS}:warn_if_pulled"),
    Old(_CODECS, "backward_of", "CodecConfig.backward", f"{_CODECS_OF}:backward_of"),
    Old(_CODECS, "check", _ITSELF, f"{_CODECS_OF}:check_tables"),
    Old(_CODECS, "decays", "ErrorBound.decay", f"{_CODECS_OF}:has_decay", True),
    Old(_CODECS, "describe", "repr(config)", f"{_CODECS_OF}:describe"),
    Old(_CODECS, "encode_any", "CodecConfig.forward and backward", f"{_CODECS_OF}:encode_any"),
    Old(_CODECS, "finds_unique", "CodecConfig.unique", f"{_CODECS_OF}:finds_unique", True),
    Old(_CODECS, "forward_of", "CodecConfig.forward", f"{_CODECS_OF}:forward_of"),
    Old(_CODECS, "unique_of", "CodecConfig.unique", f"{_CODECS_OF}:unique_of"),
    Old("torchrec_bls.Decay", "factor", _NOTHING, f"{_BOUNDS}:factor_at"),
    Old("torchrec_bls.ErrorBound", "at", _NOTHING, f"{_BOUNDS}:bound_at"),
    Old(
        "torchrec_bls.codecs.stock",
        "codecs_registry",
        "torchrec_bls.codecs.torchrec_codecs.codecs_registry",
        "torchrec_bls.codecs.torchrec_codecs:codecs_registry",
    ),
    Old(
        "torchrec_bls.datasets",
        "KAGGLE_CARDINALITIES",
        "capped_cardinalities",
        f"{_SHAPE}:KAGGLE_CARDINALITIES",
    ),
    Old("torchrec_bls.sharding", "as_html", "PlanReport.as_html", f"{_HERE}:_as_html"),
    Old("torchrec_bls.sharding", "as_text", "PlanReport.as_text", f"{_HERE}:_as_text"),
    Old("torchrec_bls.sharding", "link_of", "Profile.link", f"{_HERE}:_link_of"),
)


def old_name(module: str, name: str) -> Any:
    """Returns what an old name of a public module stands for, with a warning.

    Raises:
        AttributeError: the module never had such a name.
    """
    for old in OLD:
        if (old.owner, old.name) == (module, name):
            return old.value()
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def with_old_names(public_class: _C) -> _C:
    """Adds the old members of a public class."""
    for old in OLD:
        if old.owner == f"torchrec_bls.{public_class.__name__}":
            setattr(public_class, old.name, _member(old))
    return public_class


def _member(old: Old) -> Any:
    def member(self: Any, *args: Any, **kwargs: Any) -> Any:
        return old.value()(self, *args, **kwargs)

    member.__name__ = old.name  # without a docstring: neither pages nor the public API show it
    return property(member) if old.is_property else member


def config_by_name(config: type) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator of a sharder's `__init__`: a configuration that comes by its place is
    given by name, with a warning.

    Args:
        config: class of configurations.
    """

    def decorated(init: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(init)
        def with_config(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            by_place = [each for each in args if isinstance(each, config)]
            if not by_place:
                return init(*args, **kwargs)
            sharder = type(args[0]).__name__
            if len(by_place) > 1 or "config" in kwargs:
                raise TypeError(f"{sharder}: config is given twice")
            _warn(
                f"torchrec_bls.{sharder}({config.__name__}(...))",
                f"{sharder}(config={config.__name__}(...))",
            )
            others: Any = [each for each in args if not isinstance(each, config)]
            named: Any = {**kwargs, "config": by_place[0]}
            return init(*others, **named)

        return with_config

    return decorated


def new_transport(transport: str) -> str:
    """Returns the name of a transport, the new one for an old one, with a warning."""
    if transport != "c10d":
        return transport
    _warn('transport="c10d"', 'transport="tcp"')
    return "tcp"


def _warn(old: str, new: str) -> None:
    """Warns of a spelling at the line outside of the package that has it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
        # Python's own frames of an import are none to `warnings`.
        level += "importlib._bootstrap" not in frame.f_globals.get("__name__", "")
    # FutureWarning is shown wherever it comes from. DeprecationWarning is not, unless it comes from
    # the main module, and few jobs call the package from there.
    warnings.warn(f"{old} goes in {GONE_IN}. Write {new}", FutureWarning, level)


def _generation_of(model: Any) -> int:
    publishing = importlib.import_module("torchrec_bls.direct.serving.publishing")
    return int(publishing.serving_state(model).serial)


def _serial(publication: Any) -> int:
    return int(publication._serial)


def _as_html(report: Any) -> str:
    return str(report.as_html())


def _as_text(report: Any) -> str:
    return str(report.as_text())


def _link_of(profile: Any, ranks: int) -> float:
    return float(profile.link(ranks))
