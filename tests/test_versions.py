"""The check of the installed packages, on faked metadata."""

import re
from collections.abc import Callable, Mapping
from importlib import metadata, resources

import pytest

from torchrec_bls._versions import (
    REQUIRED_DISTRIBUTIONS,
    NativeModuleError,
    VersionError,
    check_native,
    check_packages,
    check_torch,
    parse_pins,
)

FITTING = {
    "torch": "2.13.0+cpu",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchrec": "1.8.0",
    **dict.fromkeys(REQUIRED_DISTRIBUTIONS, "1.0"),
}


def environment(without: str = "", **changed: str) -> Callable[[str], str]:
    versions = {name: version for name, version in FITTING.items() if name != without}
    versions |= {name.replace("_", "-"): version for name, version in changed.items()}
    return lookup(versions)


def lookup(versions: Mapping[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


@pytest.mark.parametrize(
    "installed",
    [
        environment(),
        environment(torch="2.13.0"),
        environment(torch="2.13.1+cu130"),
        environment(fbgemm_gpu_cpu="1.8.0+cpu"),
        environment(torchrec="1.8.0+cpu"),
        environment(torchrec="1.9.2"),
        environment(without="fbgemm-gpu-cpu", fbgemm_gpu="1.8.0+cu130"),
        environment(fbgemm_gpu="1.8.0"),
    ],
)
def test_accepts_fitting_packages(installed: Callable[[str], str]) -> None:
    check_packages(installed)


def test_the_environment_of_the_tests_fits() -> None:
    check_packages()


def test_pair_that_does_not_match_names_both_and_the_command() -> None:
    with pytest.raises(VersionError) as raised:
        check_packages(environment(torch="2.12.1+cpu"))
    message = str(raised.value)
    assert "found torch 2.12.1+cpu, fbgemm-gpu-cpu 1.8.0, torchrec 1.8.0" in message
    assert "needs torch 2.13.0, fbgemm-gpu-cpu (or fbgemm-gpu) 1.8.0, torchrec 1.8.0 or 1.9.2" in (
        message
    )
    assert "torch 2.12.1+cpu and fbgemm-gpu-cpu 1.8.0 are not a pair" in message
    assert message.endswith("Mend it with: pip install 'torch==2.13.0'")


def test_pair_that_matches_but_is_not_the_pinned_one_is_refused() -> None:
    with pytest.raises(VersionError) as raised:
        check_packages(environment(torch="2.12.0", fbgemm_gpu_cpu="1.7.0", torchrec="1.7.0"))
    message = str(raised.value)
    assert "are not a pair" not in message
    assert message.endswith(
        "Mend it with: pip uninstall -y fbgemm-gpu-cpu && "
        "pip install 'torch==2.13.0' 'fbgemm-gpu-cpu==1.8.0' && "
        "pip install --no-deps 'torchrec==1.8.0'"
    )


def test_cuda_build_laid_over_the_cpu_build_is_named() -> None:
    """What `pip install torchrec` without `--no-deps` leaves behind."""
    with pytest.raises(VersionError) as raised:
        check_packages(environment(fbgemm_gpu="1.9.0"))
    message = str(raised.value)
    assert "fbgemm-gpu-cpu 1.8.0, fbgemm-gpu 1.9.0" in message
    assert "torch 2.13.0+cpu and fbgemm-gpu 1.9.0 are not a pair" in message
    assert "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install 'fbgemm-gpu-cpu==1.8.0'" in (
        message
    )


def test_torchrec_that_was_not_tested_is_refused() -> None:
    with pytest.raises(VersionError, match=r"torchrec 1\.9\.0; it needs"):
        check_packages(environment(torchrec="1.9.0"))


@pytest.mark.parametrize("version", ["2026.9.1", "1.9.0.dev20260901", "unknown"])
def test_versions_of_another_form_are_refused(version: str) -> None:
    with pytest.raises(VersionError, match=re.escape(f"fbgemm-gpu-cpu {version} are not a pair")):
        check_packages(environment(fbgemm_gpu_cpu=version))


@pytest.mark.parametrize(
    ("missing", "found", "command"),
    [
        ("torch", "torch not installed", "pip install 'torch==2.13.0'"),
        ("fbgemm-gpu-cpu", "fbgemm not installed", "pip install 'fbgemm-gpu-cpu==1.8.0'"),
        ("torchrec", "torchrec not installed", "pip install --no-deps 'torchrec==1.8.0'"),
        ("torchmetrics", "torchmetrics is not installed.", "pip install 'torchmetrics==1.0.3'"),
        ("tensordict", "tensordict is not installed.", "pip install 'tensordict>="),
    ],
)
def test_missing_package_is_named_with_the_command(missing: str, found: str, command: str) -> None:
    with pytest.raises(VersionError) as raised:
        check_packages(environment(without=missing))
    assert found in str(raised.value)
    assert command in str(raised.value)


def test_errors_are_import_errors() -> None:
    assert issubclass(VersionError, ImportError)
    assert issubclass(NativeModuleError, ImportError)


def test_native_module_that_is_not_built_names_the_command() -> None:
    def fail(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    with pytest.raises(NativeModuleError) as raised:
        check_native(fail)
    assert "No module named 'torchrec_bls._native'" in str(raised.value)
    assert "make build" in str(raised.value)
    assert "pip install --no-build-isolation -e ." in str(raised.value)


def test_pins_hold_everything_that_is_required() -> None:
    text = resources.files("torchrec_bls").joinpath("pins.txt").read_text("utf-8")
    pins = parse_pins(text)
    assert set(REQUIRED_DISTRIBUTIONS) <= set(pins.requirements)
    assert pins.accepted_torchrecs() == ("1.8.0", "1.9.2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch==2.13.0", "no line '# next: torchrec==VERSION'"),
        ("torch==2.13.0\n==1.8.0", "line 2: '==1.8.0' is not a requirement"),
    ],
)
def test_damaged_pins_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_pins(text)


@pytest.mark.parametrize(
    "installed",
    [
        environment(),
        environment(without="torchrec"),
        environment(fbgemm_gpu_cpu="1.7.0"),
        lookup({"torch": "2.13.0"}),
    ],
)
def test_torch_alone_is_enough_for_the_first_check(installed: Callable[[str], str]) -> None:
    check_torch(installed)


def test_another_torch_is_refused_by_the_first_check() -> None:
    with pytest.raises(VersionError) as raised:
        check_torch(lookup({"torch": "2.12.1"}))
    assert str(raised.value) == (
        "torchrec_bls found torch 2.12.1; it needs torch 2.13.0.\n"
        "Mend it with: pip install 'torch==2.13.0'"
    )
    with pytest.raises(VersionError, match="found torch not installed; it needs torch 2"):
        check_torch(lookup({}))
    with pytest.raises(VersionError, match=r"torch 2\.12\.1 and fbgemm-gpu-cpu 1\.8\.0 are"):
        check_torch(environment(torch="2.12.1"))
