"""The packages import and include each other as docs/design/architecture.md says."""

from itertools import chain

import pytest

from tests.architecture.imports import (
    ROOT,
    Graph,
    allowed,
    between,
    cpp_includes,
    cycle_in,
    python_imports,
)
from torchrec_bls import _native, slot_size

HOUSES = ("torchrec_bls", "sharding")
# They join all of csrc/.
ABOVE_ALL = {"bindings", "fuzz", "tests"}


def whole_name(name: str, house: str) -> str:
    """A row leaves the name of its own house out."""
    return name if name.split(".")[0] in HOUSES else f"{house}.{name}"


def allowed_in_python() -> Graph:
    return {
        whole_name(name, house): {whole_name(other, house) for other in imports}
        for house in HOUSES
        for name, imports in allowed(house).items()
    }


def sources() -> Graph:
    return {name: names for house in HOUSES for name, names in python_imports(house).items()}


@pytest.mark.parametrize("house", HOUSES)
def test_packages_import_what_the_page_says(house: str) -> None:
    page = allowed_in_python()
    edges = between(sources(), page, ".")
    for name in page:
        if name.split(".")[0] == house:
            assert edges.get(name, set()) == page[name], name


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycle_in(sources()) == []
    assert cycle_in(allowed_in_python()) == []


def test_a_ring_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_folders_of_csrc_include_what_the_page_says() -> None:
    page = allowed("csrc")
    files = {
        name: names
        for name, names in cpp_includes(".").items()
        if name.split("/")[0] not in ABOVE_ALL
    }
    edges = between(files, page, "/")
    assert {name: edges.get(name, set()) for name in page} == page
    assert cycle_in(page) == []


def test_files_of_csrc_are_included_by_their_path_there() -> None:
    included = set(chain.from_iterable(cpp_includes(".").values()))
    assert [name for name in sorted(included) if not (ROOT / "csrc" / name).exists()] == []


def test_the_planner_knows_the_size_of_slots_and_no_more_of_the_runtime() -> None:
    assert _native.MIN_SLOT_BYTES == slot_size.HEADER_BYTES
