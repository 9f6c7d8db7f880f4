"""Error-bounded rows beside compressors of the same codes, and other lossy ones, in one run."""

import ctypes
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.codecs.page import bounded_section
from benchmarks.codecs.rows import keep_memory
from benchmarks.exchange.native import build
from benchmarks.harness import record
from benchmarks.harness.launch import pin_to_core
from benchmarks.harness.statistics import taking_turns
from torchrec_bls import _native

BOUND = 0.01
SIZES = (("dlrm32", 2048), ("dlrm32", 128), ("dlrm64", 2048), ("dlrm64", 128))
SYMBOLS = 1 << 16
#: Deviations of symbols of normal distributions that take half a bit each, up to eight.
DEVIATIONS = (0.26, 0.36, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 1e4)
Arrays = list[np.ndarray]
#: Makes bytes and returns how many, and gives back tables or writes them to `Batch.out`.
Calls = tuple[Callable[[], int], Callable[[], Any]]


class Batch(NamedTuple):
    """Tables, and memory for what becomes of them."""

    values: Arrays
    out: Arrays
    groups: Arrays  # which rows of each table have the same ids


class Table(ctypes.Structure):
    """That of bounded_peers.cpp."""

    _fields_ = [("values", ctypes.c_void_p), ("out", ctypes.c_void_p)] + [
        (name, ctypes.c_size_t) for name in ("rows", "columns")
    ]


def batches(folder: Path, name: str, rows: int) -> Iterator[Batch]:
    """The first three; tables lie behind each other."""
    files = sorted(folder.glob(f"{name}_t??_*_b{rows}.npy"))
    for number in range(3):
        values, groups = [np.load(file)[number] for file in files], []
        for file in files:
            ids = np.load(file.with_name(f"{file.stem}_idx.npy"))[number].reshape(rows, -1)
            _, first, of_row = np.unique(ids, axis=0, return_index=True, return_inverse=True)
            groups.append(np.argsort(np.argsort(first))[of_row.ravel()].astype(np.uint32))
        stacked = (np.stack(values), np.empty_like(np.stack(values)))
        yield Batch(*map(list, stacked), groups)


def ours(batch: Batch, groups: Any = None, fixed: Any = None) -> Calls:
    def frame(arrays: Arrays) -> _native.Frame:
        columns, counts = arrays[0].shape[1], [len(each) for each in arrays]
        coded = [(_native.ERROR_BOUNDED, columns, BOUND, f) for f in fixed or [False] * len(arrays)]
        whole = arrays[0] if len(arrays) == 1 else arrays[0].base  # tables lie behind each other
        rows = torch.from_numpy(whole).view(-1, columns)
        first_rows = [0, *itertools.accumulate(counts)][: len(arrays)]
        place = _native.CodedFeatures(coded), rows, first_rows, counts
        if groups is None:
            return _native.Frame.one_below_another(*place)
        known = [block for block, each in enumerate(groups) if len(each)]
        ids = np.concatenate([groups[block].astype(np.int64) for block in known] or [[]])
        blocks = [(counts[block], counts[block], True) for block in known]
        equal = _native.EqualBags(None, torch.from_numpy(ids.astype(np.int64)), blocks)
        of_tables = [known.index(t) if t in known else -1 for t in range(len(arrays))]
        return _native.Frame.one_below_another(*place, equal, of_tables)

    source, target = frame(batch.values), frame(batch.out)
    room = torch.empty(_native.encode_frame(source), dtype=torch.uint8)
    return lambda: _native.encode_frame(source, room), lambda: _native.decode_frame(room, target)


def papers_choice(batch: Batch) -> Calls:
    """By table the smaller of equal rows with codes of a fixed width, and Huffman without those."""
    alone = [np.arange(len(each), dtype=np.uint32) for each in batch.values]
    sizes = [
        (ours(one, fixed=[True])[0](), ours(one, groups=[rows])[0]())
        for rows, values in zip(alone, batch.values, strict=True)
        for one in [Batch([values], [values], [])]
    ]
    fixed = [lz < huffman for lz, huffman in sizes]
    return ours(batch, [() if lz else rows for lz, rows in zip(fixed, alone, strict=True)], fixed)


def native(library: Any, name: str, level: int, together: bool, batch: Batch) -> Calls:
    work = library.open_peer(name.encode(), level)
    if not work:
        raise ImportError(name)
    pairs = list(zip(batch.values, batch.out, strict=True))
    tables = (Table * len(pairs))(*((v.ctypes.data, o.ctypes.data, *v.shape) for v, o in pairs))
    if together:  # as one table
        tables = (Table * 1)(tables[0])
        tables[0].rows *= len(pairs)
    arguments = work, ctypes.c_float(BOUND if batch.values[0].itemsize == 4 else 0), tables
    return (
        lambda: library.encode_tables(*arguments, len(tables)),
        lambda: library.decode_tables(*arguments, len(tables)),
    )


def python(
    compress: Callable[[Any], Any], decompress: Callable[[Any, Any], Any], data: Arrays
) -> Calls:
    done: list[Any] = []

    def encode() -> int:
        done[:] = map(compress, data)
        return sum(map(len, done))

    return encode, lambda: list(map(decompress, done, data))


def zfp(batch: Batch) -> Calls:
    peer = import_module("zfpy")
    return python(partial(peer.compress_numpy, tolerance=BOUND),
                  lambda data, _: peer.decompress_numpy(data), batch.values)  # fmt: skip


def sz3(batch: Batch) -> Calls:
    peer = import_module("pysz")
    config = peer.szConfig()
    config.errorBoundMode, config.absErrorBound = peer.szErrorBoundMode.ABS, BOUND
    return python(lambda table: peer.sz.compress(table, config)[0],
                  lambda data, table: peer.sz.decompress(data, np.float32, table.shape)[0],
                  batch.values)  # fmt: skip


def codes(batch: Batch, kind: Any) -> Arrays:
    return [np.rint(table / np.float32(1.9999 * BOUND)).astype(kind) for table in batch.values]


def pcodec(batch: Batch) -> Calls:
    peer, config = import_module("pcodec.standalone"), import_module("pcodec").ChunkConfig()
    return python(lambda table: peer.simple_compress(table.ravel(), config),
                  lambda data, _: peer.simple_decompress(data), codes(batch, np.int16))  # fmt: skip


def blosc2(codec: str, level: int, filter_: str, batch: Batch) -> Calls:
    peer = import_module("blosc2")
    peer.set_nthreads(1)
    how = {"codec": peer.Codec[codec], "clevel": level, "typesize": 1, "nthreads": 1}
    how["filters"] = [peer.Filter[filter_]]
    return python(
        lambda table: peer.compress2(table, **how),
        lambda data, _: peer.decompress2(data, nthreads=1),
        codes(batch, np.int8),
    )


def openzl(graph: str, options: dict[str, int], batch: Batch) -> Calls:
    peer = import_module("openzl.ext")
    compressor, to, back = peer.Compressor(), peer.CCtx(), peer.DCtx()
    compressor.set_parameter(peer.CParam.FormatVersion, peer.MAX_FORMAT_VERSION)
    made = getattr(peer.graphs, graph)(**options)
    compressor.select_starting_graph(made.parameterize(compressor))

    def compress(table: np.ndarray) -> bytes:
        to.ref_compressor(compressor)  # which each call forgets
        done: bytes = to.compress([peer.Input(peer.Type.Serial, table.ravel().view(np.uint8))])
        return done

    return python(compress, lambda data, _: back.decompress(data), codes(batch, np.int8))


def peers(library: Any) -> dict[str, Callable[[Batch], Calls]]:
    def of(name: str, level: int = 0, together: bool = False) -> Callable[[Batch], Calls]:
        return partial(native, library, name, level, together)

    return {
        "ours": ours,
        "ours, groups from ids": lambda batch: ours(batch, batch.groups),
        "ours, fixed width": lambda batch: ours(batch, fixed=[True] * len(batch.values)),
        "vector-LZ or Huffman": papers_choice,
        "zstd -1": of("zstd", 1),
        "zstd -1, one call": of("zstd", 1, together=True),
        "zstd -3": of("zstd", 3),
        "lz4": of("lz4"),
        "libdeflate -1": of("libdeflate", 1),
        "libdeflate -6": of("libdeflate", 6),
        "huff0": of("huff0"),
        "zfp": zfp,
        "SZ3": sz3,
        "pcodec (codes)": pcodec,
        "blosc2 lz4 (codes)": partial(blosc2, "LZ4", 5, "BITSHUFFLE"),
        "blosc2 zstd (codes)": partial(blosc2, "ZSTD", 1, "NOFILTER"),
        "OpenZL zstd -1 (codes)": partial(openzl, "Zstd", {"compression_level": 1}),
        "OpenZL Huffman (codes)": partial(openzl, "Entropy", {}),
    }


def check(name: str, batch: Batch, returned: Any) -> None:
    tables = batch.out if returned is None else returned
    if name.endswith("(codes)"):
        return  # which are not lossy
    pairs = [(v.astype(np.float64), t) for v, t in zip(batch.values, tables, strict=True)]
    # Behind the quantizer for peers what is too large for eight bits is as large as they allow.
    most = 250 * BOUND if returned is None and not name.startswith("ours") else np.inf
    error = max(np.abs(v - t)[np.abs(v) < most].max() for v, t in pairs)
    # zfp and SZ3 promise no more than a float's precision.
    if error > BOUND * (1 + 1e-6 * (name in ("zfp", "SZ3"))):
        raise RuntimeError(f"{name} is {error} away")


def measured(
    of_peers: dict[str, Callable[[Batch], Calls]], found: list[Batch], turns: int, base: str
) -> list[list[Any]]:
    """By peer: times fewer bytes, GB a second of encoding and decoding, and those over `base`'s."""
    ready: dict[str, list[Calls]] = {}
    size = sum(table.nbytes for table in found[0].values)
    sizes = {}
    for name, make in of_peers.items():
        try:
            ready[name] = [make(batch) for batch in found]
        except (ImportError, AttributeError, NotImplementedError) as error:
            print(f"{name} is absent: {error}", file=sys.stderr)
            continue
        sizes[name] = sum(encode() for encode, _ in ready[name])
        for batch, (_, decode) in zip(found, ready[name], strict=True):
            check(name, batch, decode())
    turn = itertools.count()

    def seconds(calls: list[Calls], direction: int) -> float:
        call = calls[next(turn) // (2 * len(ready)) % len(calls)][direction]
        call()  # whatever ran before has filled the caches
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    timed = {(n, d): partial(seconds, calls, d) for n, calls in ready.items() for d in (0, 1)}
    taken = {key: np.array(all_) for key, all_ in taking_turns(timed, turns, "turns").items()}
    return [
        [name, len(found) * size / sizes[name]]
        + [size / 1e9 / float(np.median(taken[name, d])) for d in (0, 1)]
        + [float(np.median(taken[base, d] / taken[name, d])) for d in (0, 1)]
        for name in ready
    ]


def symbols(deviation: float) -> list[Batch]:
    drawn = np.rint(np.random.default_rng(0).normal(0, deviation, SYMBOLS))
    drawn = drawn if deviation < 1e3 else drawn % 256 - 128
    table = drawn.clip(-128, 127).astype(np.int8)[None]
    return [Batch([table], [np.empty_like(table)], [])]


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="gen_data.py, which makes tables")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/codecs"), help="where they are put"
    )
    parser.add_argument("--turns", type=int, default=60, help="calls of each (%(default)s)")
    arguments = parser.parse_args()
    before = record.environment()
    if not (arguments.folder / "manifest.json").exists():
        made = ["--out", str(arguments.folder), "--only", "dlrm32,dlrm64"]
        subprocess.run([sys.executable, str(arguments.data), *made], check=True)
    library = ctypes.CDLL(str(build("bounded_peers") / "libbounded_peers.so"))
    library.open_peer.restype = ctypes.c_void_p
    library.encode_tables.restype, library.decode_tables.restype = ctypes.c_size_t, None
    for call in (library.encode_tables, library.decode_tables):
        call.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_size_t]
    keep_memory()
    pin_to_core(0)
    results: list[dict[str, Any]] = []
    for name, rows in SIZES:
        found = list(batches(arguments.folder, name, rows))
        of_peers = measured(peers(library), found, arguments.turns, "zstd -1")
        results.append({"tables": name, "rows": rows, "peers": of_peers})
    coders = {name: partial(native, library, name, 0, False) for name in ("huff0", "ours")}
    coded = [
        {"deviation": d, "peers": measured(coders, symbols(d), 5 * arguments.turns, "huff0")}
        for d in DEVIATIONS
    ]
    settings = {"bound": BOUND, "turns": arguments.turns, "symbols": SYMBOLS}
    record.publish(
        arguments.json, "bounded_codec", before, settings, results + coded, bounded_section
    )


if __name__ == "__main__":
    main()
