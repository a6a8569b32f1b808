"""The compiled library: declarations in Python of its functions, and NamedTuples of arrays as its structures.

A header here is named as the Python module that declares its functions, and defines them. Calls release the GIL. They check the
types of arrays, but no bounds.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_bool, c_double, c_int64, c_uint64, c_void_p
from functools import cached_property, wraps
from operator import attrgetter
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=type[tuple[Any, ...]])
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=tuple[Any, ...])

MISSING = "The drafters were installed without their compiled library; install a C++ compiler, then install the package again."
LIBRARY = next((ctypes.CDLL(str(file)) for file in sorted(Path(__file__).parent.glob("_drafters.*"), reverse=True)), None)


AVAILABLE = LIBRARY is not None


# The origins of annotations of arrays: since NumPy 2.5, NDArray is a type of its own, and no other name of ndarray.
ARRAYS = (np.ndarray, get_origin(NDArray[Any]))


class Array(ctypes.Structure):
    """An array of up to three dimensions, as in array.h."""

    _fields_ = (("data", c_void_p), ("shape", c_int64 * 3), ("width", c_int64))


pack = Struct("P4q").pack  # of an array


class Pair(ctypes.Structure):
    """Two integers that a function returns."""

    _fields_ = (("first", c_int64), ("second", c_int64))


class Crossing(NamedTuple):
    """How values of a type cross to the library."""

    type: Any  # of a field
    convert: Callable[[Any], Any]  # a value to a field's
    argument: Callable[[Any], Any] | None = None  # a value to what is passed by reference; None = the field's, by value


SCALARS = {
    bool: Crossing(c_bool, bool),
    int: Crossing(c_int64, int),
    float: Crossing(c_double, float),
    np.uint64: Crossing(c_uint64, int),
}


def structure(cls: T) -> T:
    """Makes a NamedTuple of arrays, scalars and other such tuples a structure of the library.

    The arrays of a tuple never move, so its structure is made once and kept beside its fields.
    """
    crossings = [crossing(hint) for hint in get_type_hints(cls).values()]
    fields = [(name, each.type) for name, each in zip(cls._fields, crossings, strict=True)]  # type: ignore[attr-defined]
    native = type(cls.__name__, (ctypes.Structure,), {"_fields_": fields})
    if LIBRARY is not None and ctypes.sizeof(native) != symbol(f"size_of_{cls.__name__}", c_int64).value:
        raise stale()

    def make(self: Any) -> Any:
        return native(*[each.convert(value) for each, value in zip(crossings, self, strict=True)])

    members = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__getstate__": lambda self: None,  # a copy has arrays of its own
        "native_type": native,
        "native": cached_property(make),
        "pointer": cached_property(lambda self: byref(self.native)),
    }
    return type(cls.__name__, (cls,), members)  # type: ignore[return-value]


def zeros(kind: type[S], size: int | tuple[int, ...], /, **others: Any) -> S:
    """A structure whose arrays are zeros of this size; `others` are sizes of some of its arrays, or values of its fields."""
    made: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        value = others.get(name, size)
        is_size = get_origin(hint) in ARRAYS and isinstance(value, (int, tuple))
        made[name] = np.zeros(value, item_of(hint)) if is_size else value
    return kind(**made)


def native(declaration: F, module: str = "") -> F:
    """The library's function that a declaration without a body describes, of the header `module` or named as its module."""
    if LIBRARY is None:
        return missing  # type: ignore[return-value]
    hints = get_type_hints(declaration)
    result = hints.pop("return")
    crossings = [crossing(hint) for hint in hints.values()]
    module = module or declaration.__module__.rpartition(".")[2]
    returned = None if result is type(None) else Pair if get_origin(result) is tuple else crossing(result).type
    prototype = ctypes.CFUNCTYPE(returned, *[c_void_p if each.argument else each.type for each in crossings])
    function = prototype(symbol(f"{module}_{declaration.__name__.removeprefix('_')}", c_void_p).value)
    if returned is Pair:
        function.errcheck = lambda pair, *_: (pair.first, pair.second)  # type: ignore[assignment]
    converters = [each.argument or each.convert for each in crossings]
    defaults = declaration.__defaults__ or ()

    @wraps(declaration)
    def call(*arguments: Any) -> Any:
        if len(arguments) < len(converters):
            arguments += defaults[len(arguments) - len(converters) :]
        return function(*[convert(each) for convert, each in zip(converters, arguments, strict=True)])

    return call  # type: ignore[return-value]


def missing(*arguments: Any) -> Any:
    """Stands for each function where there is no library."""
    raise RuntimeError(MISSING)


def item_of(hint: Any) -> Any:
    """The type of the items of an annotated array."""
    last = get_args(hint)[-1]
    return (get_args(last) or (last,))[0]


def crossing(hint: Any) -> Crossing:
    """How values with this annotation cross."""
    if hint in SCALARS:
        return SCALARS[hint]
    if get_origin(hint) in ARRAYS:
        item = item_of(hint)
        return array_of(None if item is Any else np.dtype(item))
    if get_origin(hint) is tuple:
        return tuple_of(get_args(hint)[0].native_type)
    return Crossing(hint.native_type, attrgetter("native"), attrgetter("pointer"))


def array_of(dtype: np.dtype[Any] | None) -> Crossing:
    """How arrays of this type cross; None = of several types."""

    def convert(array: NDArray[Any]) -> tuple[int, tuple[int, ...], int]:
        if (dtype is not None and array.dtype != dtype) or not array.flags.c_contiguous:
            raise TypeError(f"The library needs a contiguous array of {dtype}, not this one of {array.dtype}.")
        return array.ctypes.data, (*array.shape, 0, 0, 0)[:3], array.itemsize

    def argument(array: NDArray[Any]) -> bytes:
        data, shape, width = convert(array)
        return pack(data, *shape, width)  # in less time than a structure of ctypes

    return Crossing(Array, convert, argument)


def tuple_of(item: Any) -> Crossing:
    """How tuples of structures cross."""
    name = f"{item.__name__}List"
    native = type(name, (ctypes.Structure,), {"_fields_": (("data", POINTER(item)), ("size", c_int64))})
    return Crossing(native, lambda values: native((item * len(values))(*[each.native for each in values]), len(values)))


def symbol(name: str, kind: Any) -> Any:
    """A variable of the library. Raises ImportError if it has none."""
    try:
        return kind.in_dll(LIBRARY, name)
    except ValueError:
        raise stale() from None


def stale() -> ImportError:
    """The error of a library that was compiled from other sources."""
    assert LIBRARY is not None
    return ImportError(f"{LIBRARY._name} was compiled from other sources; install the package again.")
