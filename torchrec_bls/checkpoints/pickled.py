"""Pickled data, without calling anything that it names.

`pickle.loads` calls what the data says. Here functions and classes stay names, and objects are what
they would be made of. So a checkpoint of anybody can be looked at: it can only be wrong.
"""

import pickletools
from dataclasses import dataclass, field
from typing import Any

#: Of the numbers and names in a pickle, not of tensors.
MOST_BYTES = 64 << 20
_CONSTANTS: dict[str, Any] = {
    **{"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()},
}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_MARK = object()


@dataclass(eq=False, frozen=True)
class Named:
    """A function or a class.

    Attributes:
        name: module and name, as in "torch.float32".
    """

    name: str


@dataclass(eq=False)
class Made:
    """An object that unpickling would make.

    Attributes:
        by: function or class that would make it, as in "torch._utils._rebuild_tensor_v2"; empty:
            of another kind.
        arguments: arguments of the call.
        state: state that it would be given; None: none.
    """

    by: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(eq=False, frozen=True)
class Stored:
    """Something outside of the pickle.

    Attributes:
        key: what names it.
    """

    key: Any


def unpickled(data: bytes, where: str) -> Any:
    """Returns pickled data: dictionaries, lists (sets are lists too), tuples, plain values, and the
    types of this module for all else.

    Args:
        data: the pickle.
        where: source of the bytes, for errors.

    Raises:
        ValueError: the bytes are something else, or more than 64 MiB.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"{where} has {len(data):,} bytes of names and numbers, more than {MOST_BYTES:,}, and "
            "so is not read: save fewer and larger tensors"
        )
    try:
        return _Machine().run(data)
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as damaged:
        raise ValueError(
            f"{where} is no pickled data, or damaged ({damaged}): write the checkpoint again"
        ) from damaged


@dataclass(eq=False)
class _Machine:
    """The stack machine that a pickle is a program of."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> Any:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _LITERALS:
                self.stack.append(argument)
            elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self.stack[-1]
            elif name.endswith("GET"):
                self.stack.append(self.memo[argument])
            elif name == "STOP" and self.stack[-1] is not _MARK:
                return self.stack[-1]
            elif name not in ("PROTO", "FRAME"):
                self._step(name, argument)
        raise ValueError("no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack.append(tuple(self._popped(count)))
            case "TUPLE":
                stack.append(tuple(self._marked()))
            case "LIST" | "FROZENSET":
                stack.append(self._marked())
            case "DICT":
                items = self._marked()
                stack.append({})
                self._set(items)
            case "APPEND" | "SETITEM":
                items = self._popped(1 if name == "APPEND" else 2)
                (self._add if name == "APPEND" else self._set)(items)
            case "APPENDS" | "ADDITEMS":
                self._add(self._marked())
            case "SETITEMS":
                self._set(self._marked())
            case "GLOBAL":
                stack.append(Named(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                module, qualified = self._popped(2)
                stack.append(Named(f"{module}.{qualified}"))
            case "REDUCE" | "NEWOBJ":
                stack.append(_made(*self._popped(2)))
            case "NEWOBJ_EX":
                stack.append(_made(*self._popped(3)[:2]))
            case "INST":
                stack.append(Made(argument.replace(" ", ".", 1), tuple(self._marked())))
            case "OBJ":
                by, *arguments = self._marked()
                stack.append(_made(by, tuple(arguments)))
            case "BUILD":
                state = stack.pop()
                if isinstance(stack[-1], Made):
                    stack[-1].state = state
            case "BINPERSID":
                stack.append(Stored(stack.pop()))
            case "PERSID":
                stack.append(Stored(argument))
            case "POP":
                stack.pop()
            case "POP_MARK":
                self._marked()
            case "DUP":
                stack.append(stack[-1])
            case _:
                raise ValueError(f"the instruction {name}")

    def _popped(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError("too few values")
        popped = self.stack[-count:]
        del self.stack[-count:]
        return popped

    def _marked(self) -> list[Any]:
        """Removes the last mark, and returns what stood behind it."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                return self._popped(len(self.stack) - at)[1:]
        raise IndexError("no mark")

    def _add(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)
        elif not isinstance(self.stack[-1], Made):
            raise TypeError("values that belong to no list")

    def _set(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], dict):
            # Others are keys by what they are, not by what is in them: that may be of any depth.
            keys = (key if isinstance(key, _KEYS) else Made("", (key,)) for key in items[::2])
            self.stack[-1].update(zip(keys, items[1::2], strict=True))
        elif not isinstance(self.stack[-1], Made):
            raise TypeError("items that belong to no dictionary")


def _made(by: Any, arguments: Any) -> Any:
    name = by.name if isinstance(by, Named) else ""
    if name == "torch.Size" and len(arguments) == 1:
        return arguments[0]
    if name == "collections.OrderedDict" and not arguments:
        return {}
    return Made(name, arguments if isinstance(arguments, tuple) else ())


# Keys of dictionaries that are what they are; the objects are keys by their identity.
_KEYS = (str, bytes, int, float, type(None), Named, Made, Stored)
