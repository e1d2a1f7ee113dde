"""Where our answers are not Triton's: each sentence stands in docs/http.md, with the requests that show it.

`(500, 400)` is Triton's status and ours. `(200, 200)`: both answer, and the answers differ. 0: no answer, and the connection
ends.
"""

from __future__ import annotations

Statuses = tuple[int, int]

BLAME: Statuses = (500, 400)
OTHERS: Statuses = (200, 200)
DEVIATIONS: dict[str, dict[str, Statuses]] = {
    "A request that its caller got wrong is 400 (Triton: often 500).": dict.fromkeys(
        (
            *("no JSON", "a list", "an empty object", "inputs that are no list", "an input without a name"),
            *("another datatype", "no datatype", "no shape", "too few elements", "too many elements"),
            *("a negative size", "a string for a number", "null for a number", "a negative number for UINT8"),
            *("a fraction for an integer", "an id that is no string", "a timeout that is no number"),
            *("a negative timeout", "parameters that are no object", "index, no JSON"),
        ),
        BLAME,
    ),
    "`ready` and `stats` of an unknown model or version are 404 (Triton: 400).": {
        "statistics of an unknown model": (400, 404),
        "ready of an unknown model": (400, 404),
        "ready of an unknown version": (400, 404),
    },
    "NaN in JSON, and numbers beyond their datatype, are 400 (Triton: 1e39 becomes infinity, an INT8 of 128 is -128).": {
        "NaN": (200, 400),
        "a number beyond FP32": (200, 400),
        "an integer beyond INT8": (200, 400),
        "NaN as JSON": (200, 400),
    },
    "JSON may have FP16, and 1 and 0 for BOOL.": {
        "half precision as JSON": (400, 200),
        "half precision, as JSON out": (400, 200),
        "numbers for BOOL": (500, 200),
    },
    "An empty body, and one that is not of its `Content-Encoding`, are 400 (Triton serves no elements).": {
        "an empty body": (200, 400),
        "broken gzip": (200, 400),
    },
    "`Inference-Header-Content-Length` is at least 1 (Triton takes 0, or a word, for a body of bytes alone).": {
        "a head length of 0": (200, 400),
        "a head length of abc": (200, 400),
    },
    "An output that is asked for twice is 400.": {"one output twice": (200, 400)},
    "Sequences, classification and shared memory are 400, also where Triton would ignore them.": {
        "a sequence": (200, 400),
        "classification": (200, 400),
        "shared memory that nobody has registered": (404, 400),
    },
    "`triton_enable_empty_final_response` is taken, and ignored (Triton: 400 over HTTP).": {
        "the empty final response": (400, 200),
    },
    "`binary_data_output` also counts for outputs that are named without `binary_data` (Triton: JSON), as described.": {
        "as bytes, but for one output": OTHERS,
    },
    "An unknown `Content-Encoding` is 415 (Triton: 501).": {"an unknown coding": (501, 415)},
    "Answers below 1 KiB are not compressed.": {"gzip out": OTHERS, "deflate out": OTHERS},
    "Bytes that are no HTTP are 400 (Triton hangs up).": {"no head of HTTP": (0, 400)},
    "Answers of `live` and `ready` have a body.": dict.fromkeys(
        ("live", "ready", "ready of a model", "ready of a version"), OTHERS
    ),
    "A shape of more bytes than there is memory is 400 (it ends Triton 2.51).": {"a huge shape": (0, 400)},
}
EXPECTED = {case: statuses for cases in DEVIATIONS.values() for case, statuses in cases.items()}
"""By name of case; all others have the same answers."""
