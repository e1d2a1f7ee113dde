"""The requests of the comparison, good ones and bad ones, as bytes."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.e2e.triton.exchange import DTYPES, HEAD_LENGTH, request_bytes
from tests.e2e.triton.models import INTEGERS

ROWS = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
BINARY = {"parameters": {"binary_data": True}}


def tensor(name: str, datatype: str, shape: Any, data: Any = None, **more: Any) -> dict[str, Any]:
    """An input; without `data` it says nothing of it."""
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        **({} if data is None else {"data": data}),
        **more,
    }


def sized(name: str, array: np.ndarray[Any, Any], nbytes: Any = None) -> dict[str, Any]:
    """An input whose bytes follow the JSON."""
    datatype = next(key for key, dtype in DTYPES.items() if dtype == array.dtype)
    size = array.nbytes if nbytes is None else nbytes
    return tensor(name, datatype, list(array.shape), parameters={"binary_data_size": size})


def infer(
    model: str, content: Any, binary: bytes = b"", headers: Mapping[str, str] | None = None, **more: Any
) -> bytes:
    """A request to infer; `content` is an object, or the text itself."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    told = {HEAD_LENGTH: str(len(text))} if binary else {}
    return request_bytes(
        "POST", f"/v2/models/{model}/infer", text + binary, {**told, **(headers or {})}, **more
    )


def get(path: str) -> bytes:
    """A request of a page."""
    return request_bytes("GET", path)


def a(**more: Any) -> dict[str, Any]:
    """The rows, for `sort`."""
    return {**tensor("a", "FP32", [2, 3], ROWS.ravel().tolist()), **more}


def sort(**more: Any) -> bytes:
    """A request to sort the rows, with more in its object."""
    return infer("sort", {"inputs": [a()], **more})


def sort_of(text: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """The same with an object that is such a text."""
    return infer("sort", text, headers=headers)


TEXT = json.dumps({"inputs": [a()]}).encode()
X = tensor("x", "FP32", [2, 2], [1, 0, 2, 3])
K = tensor("k", "INT64", [2, 1], [10, 20])
TYPED = {
    "bool": [True, False],
    **{"fp32": [1.5, -0.0], "fp64": [1e300, 5e-324]},
    **{name.lower(): [int(np.iinfo(name.lower()).min), int(np.iinfo(name.lower()).max)] for name in INTEGERS},
}


def typed(**changed: Any) -> bytes:
    """One row of two elements of each datatype."""
    values = {**TYPED, **changed}
    return infer(
        "types", {"inputs": [tensor(name, name.upper(), [1, 2], data) for name, data in values.items()]}
    )


def typed_binary() -> bytes:
    """The same as bytes, and the answer as bytes."""
    arrays = {name: np.array([data], DTYPES[name.upper()]) for name, data in TYPED.items()}
    content = {
        "inputs": [sized(name, array) for name, array in arrays.items()],
        "parameters": {"binary_data_output": True},
    }
    return infer("types", content, b"".join(array.tobytes() for array in arrays.values()))


def chunked(text: bytes) -> bytes:
    """A request to sort in two chunks."""
    pieces = (text[:7], text[7:])
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    return infer("sort", body, headers={"Transfer-Encoding": "chunked"}, length=False)


def half(nbytes: int | None = None) -> bytes:
    """A row of two FP16."""
    row = np.array([[1.5, -2]], np.float16)
    content = {"inputs": [sized("x", row, nbytes)], "parameters": {"binary_data_output": True}}
    return infer("half", content, row.tobytes())


def root(data: list[float], **more: Any) -> bytes:
    """Square roots."""
    return infer("root", {"inputs": [tensor("x", "FP32", [1, len(data)], data)], **more})


def head_length(stated: str) -> bytes:
    """Rows as bytes, with such a length of the JSON."""
    return infer("sort", {"inputs": [sized("a", ROWS)]}, ROWS.tobytes(), {HEAD_LENGTH: stated})


def shaped(shape: Any, data: Any = (1, 2, 3)) -> bytes:
    """One input with such a shape."""
    return infer("sort", {"inputs": [tensor("a", "FP32", shape, list(data))]})


GOOD = {
    "JSON": sort(),
    "JSON, nested": infer("sort", {"inputs": [a(data=ROWS.tolist())]}),
    "integers for a floating input": shaped([1, 3], [3, 1, 2]),
    "an id": sort(id="mine"),
    "an empty id": sort(id=""),
    "an output that is chosen": sort(outputs=[{"name": "sorted"}]),
    "an empty list of outputs": sort(outputs=[]),
    "one output of two": infer("scale", {"inputs": [X, K], "outputs": [{"name": "count"}]}),
    "two outputs": infer("scale", {"inputs": [X, K]}),
    "inputs in another order": infer("scale", {"inputs": [K, X]}),
    "outputs in another order": infer(
        "scale", {"inputs": [X, K], "outputs": [{"name": "count"}, {"name": "scaled"}]}
    ),
    "bytes in, JSON out": infer("sort", {"inputs": [sized("a", ROWS)]}, ROWS.tobytes()),
    "bytes in and out": infer(
        "sort", {"inputs": [sized("a", ROWS)], "outputs": [{"name": "sorted", **BINARY}]}, ROWS.tobytes()
    ),
    "all outputs as bytes": sort(parameters={"binary_data_output": True}),
    "one output as bytes, one as JSON": infer(
        "scale", {"inputs": [X, K], "outputs": [{"name": "scaled", **BINARY}, {"name": "count"}]}
    ),
    "as bytes, but for one output": infer(
        "scale",
        {
            "inputs": [X, K],
            "outputs": [{"name": "scaled", "parameters": {"binary_data": False}}, {"name": "count"}],
            "parameters": {"binary_data_output": True},
        },
    ),
    "a head length without bytes": sort_of(TEXT, {HEAD_LENGTH: str(len(TEXT))}),
    "no rows' elements": shaped([2, 0], []),
    "a picture of its own size": infer(
        "places", {"inputs": [tensor("a", "FP32", [2, 3], [0, 1, 0, 0, 0, 5])]}
    ),
    "nothing found": infer("places", {"inputs": [tensor("a", "FP32", [1, 2], [0, 0])]}),
    "nothing found, as bytes": infer(
        "places",
        {"inputs": [tensor("a", "FP32", [1, 2], [0, 0])], "outputs": [{"name": "places", **BINARY}]},
    ),
    "all datatypes as JSON": typed(),
    "all datatypes as bytes": typed_binary(),
    "half precision as bytes": half(),
    "gzip in": sort_of(gzip.compress(TEXT, mtime=0), {"Content-Encoding": "gzip"}),
    "deflate in": sort_of(zlib.compress(TEXT), {"Content-Encoding": "deflate"}),
    "gzip both ways, 4,000 elements": infer(
        "sort",
        gzip.compress(
            json.dumps({"inputs": [tensor("a", "FP32", [1, 4000], [*range(4000, 0, -1)])]}).encode(), mtime=0
        ),
        headers={"Content-Encoding": "gzip", "Accept-Encoding": "gzip"},
    ),
    "deflate out, 4,000 elements": infer(
        "sort",
        {"inputs": [tensor("a", "FP32", [1, 4000], [*range(4000, 0, -1)])]},
        headers={"Accept-Encoding": "deflate"},
    ),
    "gzip out": sort_of(TEXT, {"Accept-Encoding": "gzip"}),
    "deflate out": sort_of(TEXT, {"Accept-Encoding": "deflate"}),
    "a Content-Type": sort_of(TEXT, {"Content-Type": "application/json"}),
    "a wrong Content-Type": sort_of(TEXT, {"Content-Type": "text/plain"}),
    "chunked": chunked(TEXT),
    "a version": request_bytes("POST", "/v2/models/sort/versions/1/infer", TEXT),
    "a timeout far away": sort(parameters={"timeout": 60_000_000}),
    "a priority": sort(parameters={"priority": 2}),
    "an unknown parameter": sort(parameters={"mine": "yes"}),
    "the empty final response": sort(parameters={"triton_enable_empty_final_response": False}),
    "an unknown member": sort(mine=1),
    "infinity as bytes": root([1, 4], parameters={"binary_data_output": True}),
    "NaN as bytes": root([-1, 4], parameters={"binary_data_output": True}),
}
BAD = {
    "an empty body": sort_of(b""),
    "no JSON": sort_of(b"{"),
    "a list": sort_of(b"[]"),
    "an empty object": sort_of(b"{}"),
    "no inputs": infer("sort", {"inputs": []}),
    "inputs that are no list": infer("sort", {"inputs": {}}),
    "an input without a name": infer(
        "sort", {"inputs": [{"datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    ),
    "an unknown input": infer("sort", {"inputs": [a(name="z")]}),
    "one input too many": infer("sort", {"inputs": [a(), a(name="z")]}),
    "one input twice": infer("sort", {"inputs": [a(), a()]}),
    "a missing input": infer("scale", {"inputs": [X]}),
    "an unknown datatype": infer("sort", {"inputs": [a(datatype="FLOAT")]}),
    "another datatype": infer("sort", {"inputs": [a(datatype="INT32")]}),
    "no datatype": infer("sort", {"inputs": [{"name": "a", "shape": [1, 1], "data": [1]}]}),
    "no shape": infer("sort", {"inputs": [{"name": "a", "datatype": "FP32", "data": [1]}]}),
    "no data": infer("sort", {"inputs": [tensor("a", "FP32", [1, 1])]}),
    "too few elements": shaped([1, 4]),
    "too many elements": shaped([1, 2]),
    "a negative size": shaped([-1, -3]),
    "a shape whose product overflows": shaped([2**32, 2**32]),
    "too many rows": shaped([9, 1], range(9)),
    "too few axes": shaped([3]),
    "too many axes": shaped([1, 1, 3]),
    "a size that is fixed": infer("scale", {"inputs": [X, tensor("k", "INT64", [2, 2], [1, 2, 3, 4])]}),
    "rows that differ between inputs": infer("scale", {"inputs": [X, tensor("k", "INT64", [1, 1], [1])]}),
    "a string for a number": shaped([1, 3], ["a", 1, 2]),
    "null for a number": shaped([1, 3], [None, 1, 2]),
    "NaN": sort_of(b'{"inputs":[{"name":"a","datatype":"FP32","shape":[1,1],"data":[NaN]}]}'),
    "a number beyond FP32": shaped([1, 1], [1e39]),
    "an integer beyond INT8": typed(int8=[128, 0]),
    "a negative number for UINT8": typed(uint8=[-1, 0]),
    "a fraction for an integer": typed(int32=[1.5, 0]),
    "numbers for BOOL": typed(bool=[1, 0]),
    "half precision as JSON": infer("half", {"inputs": [tensor("x", "FP16", [1, 1], [1.5])]}),
    "half precision, as JSON out": infer(
        "half", {"inputs": [sized("x", np.ones((1, 1), np.float16))]}, np.ones((1, 1), np.float16).tobytes()
    ),
    "a size of bytes that differs from the shape": half(2),
    "fewer bytes than told": infer("sort", {"inputs": [sized("a", ROWS)]}, ROWS.tobytes()[:-4]),
    "more bytes than told": infer("sort", {"inputs": [sized("a", ROWS)]}, ROWS.tobytes() + b"1234"),
    "bytes without a head length": sort_of(
        json.dumps({"inputs": [sized("a", ROWS)]}).encode() + ROWS.tobytes()
    ),
    "a head length of -5": head_length("-5"),
    "a head length of abc": head_length("abc"),
    "a head length of 0": head_length("0"),
    "a head length beyond the body": head_length("100000"),
    "an unknown output": sort(outputs=[{"name": "z"}]),
    "one output twice": sort(outputs=[{"name": "sorted"}, {"name": "sorted"}]),
    "classification": sort(outputs=[{"name": "sorted", "parameters": {"classification": 2}}]),
    "shared memory that nobody has registered": infer(
        "sort",
        {
            "inputs": [
                tensor(
                    "a",
                    "FP32",
                    [1, 1],
                    parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4},
                )
            ]
        },
    ),
    "a sequence": sort(parameters={"sequence_id": 5, "sequence_start": True}),
    "an id that is no string": sort(id=7),
    "a timeout that is no number": sort(parameters={"timeout": "soon"}),
    "a negative timeout": sort(parameters={"timeout": -1}),
    "parameters that are no object": sort(parameters=[]),
    "an unknown triton parameter": sort(parameters={"triton_mine": 1}),
    "broken gzip": sort_of(TEXT, {"Content-Encoding": "gzip"}),
    "an unknown coding": sort_of(TEXT, {"Content-Encoding": "snappy"}),
    "NaN as JSON": root([-1, 4]),
    "a model that raises": infer("fail", {"inputs": [tensor("x", "FP32", [1, 1], [13])]}),
    "an unknown model": infer("nobody", {"inputs": [a()]}),
    "an unknown version": request_bytes("POST", "/v2/models/sort/versions/2/infer", TEXT),
    "a version that is no number": request_bytes("POST", "/v2/models/sort/versions/x/infer", TEXT),
    "GET of infer": get("/v2/models/sort/infer"),
    "no head of HTTP": b"hello\r\n\r\n",
    "both lengths": infer(
        "sort", chunked(TEXT).partition(b"\r\n\r\n")[2], headers={"Transfer-Encoding": "chunked"}
    ),
}
KILLING = {
    "a huge shape": shaped([2**31, 2**31]),
}
"""It ends Triton 2.51."""
PAGES = {
    "live": get("/v2/health/live"),
    "ready": get("/v2/health/ready"),
    "server": get("/v2"),
    "metadata": get("/v2/models/scale"),
    "metadata of a version": get("/v2/models/scale/versions/1"),
    "metadata of a model without a batch": get("/v2/models/places"),
    "configuration": get("/v2/models/scale/config"),
    "configuration of a model without a batch": get("/v2/models/places/config"),
    "ready of a model": get("/v2/models/sort/ready"),
    "ready of a version": get("/v2/models/sort/versions/1/ready"),
    "index": request_bytes("POST", "/v2/repository/index"),
    "index of what is ready": request_bytes("POST", "/v2/repository/index", b'{"ready":true}'),
    "index, no JSON": request_bytes("POST", "/v2/repository/index", b"{"),
    "metadata of an unknown model": get("/v2/models/nobody"),
    "metadata of an unknown version": get("/v2/models/sort/versions/2"),
    "configuration of an unknown model": get("/v2/models/nobody/config"),
    "statistics of an unknown model": get("/v2/models/nobody/stats"),
    "ready of an unknown model": get("/v2/models/nobody/ready"),
    "ready of an unknown version": get("/v2/models/sort/versions/2/ready"),
    "POST of metadata": request_bytes("POST", "/v2/models/sort", b"{}"),
    "GET of the index": get("/v2/repository/index"),
    "an unknown page": get("/v2/nothing"),
    "the root": get("/"),
}
