"""Mutations of a file: of its bytes, and of the JSON in it."""

from __future__ import annotations

import gzip
import json
import zlib
from random import Random
from typing import Any

_MARK = "@here@"
# JSON, and what is nearly JSON.
_HOSTILE = (
    *("Infinity", "-Infinity", "NaN", "1e999", "-1e999", "1e308", "-0.0", "1e-320"),
    *("-1", "0", "1", str(2**31), str(2**63), str(2**64), str(2**70), str(-(2**70)), "9" * 5000),
    *(
        "null",
        "true",
        '"x"',
        '""',
        '"-1"',
        '"\\ud800"',
        '"\\u0000"',
        "[]",
        "{}",
        "[[]]",
        '{"a": 1}',
    ),
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 500 + "1" + "}" * 500,
    "[" + "0," * 1000 + "0]",
)


def mutated(data: bytes, is_packed: bool, random: Random) -> bytes:
    """Returns a file's bytes after one to three mutations."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not is_packed:
            data = _one(data, random)
        elif random.random() < 0.4:
            data = _bytes_changed(data, random)
        elif random.random() < 0.02:
            return gzip.compress(random.choice((b"\0", b"[", b"{},")) * (100 << 20), 1)
        else:
            try:
                data = gzip.compress(_one(gzip.decompress(data), random), 1)
            except (OSError, EOFError, zlib.error):  # damaged before
                data = _bytes_changed(data, random)
    return data


def _one(data: bytes, random: Random) -> bytes:
    if random.random() < 0.4:
        return _bytes_changed(data, random)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.splitlines(keepends=True)
        place = random.randrange(len(lines)) if len(lines) > 1 else 0
        if not place or not lines[place].endswith(b"}\n"):
            return _bytes_changed(data, random)
        lines[place] = _one(lines[place], random) + b"\n"  # JSON in each line
        return b"".join(lines)
    return _json_changed(content, random)


def _bytes_changed(data: bytes, random: Random) -> bytes:
    at, to = sorted(random.randrange(len(data) + 1) for _ in range(2))
    match random.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[min(to, at + 100) :]
        case 2:
            return data[:to] + data[at : at + 200] + data[to:]
        case 3:
            return data[:at] + random.randbytes(random.randrange(1, 9)) + data[at:]
        case _:
            changed = bytearray(data)
            for _ in range(random.choice((1, 1, 8)) if data else 0):
                changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
            return bytes(changed)


def _json_changed(content: Any, random: Random) -> bytes:
    """Replaces, renames, removes or repeats one value somewhere in the content."""
    holder: Any = {"": content}
    key: Any = ""
    inner: Any = content
    # The deeper a value, the more like it there are.
    while isinstance(inner, (dict, list)) and inner and random.random() < 0.85:
        holder = inner
        key = (
            random.choice(list(inner)) if isinstance(inner, dict) else random.randrange(len(inner))
        )
        inner = holder[key]
    hostile = random.choice(_HOSTILE)
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
        case 1:
            holder.append(holder[key])
        case 2 if isinstance(holder, dict):
            # The same key twice, once with something else.
            text = json.dumps({**holder, _MARK: 0}).replace(
                f'"{_MARK}": 0', f"{json.dumps(key)}: {hostile}"
            )
            holder.clear()
            holder["@"] = _MARK
            return json.dumps(content).replace(f'{{"@": "{_MARK}"}}', text).encode()
        case 3 if isinstance(inner, (int, float)) and not isinstance(inner, bool):
            holder[key] = random.choice(
                (-inner, inner + 1, inner - 1, inner * 1000, inner / 3, str(inner))
            )
        case _:
            if inner is content:
                return hostile.encode()
            holder[key] = _MARK
            return json.dumps(content).replace(f'"{_MARK}"', hostile).encode()
    return json.dumps(content).encode()
