"""Limits on one message. A receiver checks them before anything else; a sender keeps them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_INTEGER = 2**63 - 1
"""The largest id, count, dimension or byte length: that of a signed 64-bit integer."""
MAX_PRIORITY = 2**31 - 1
"""The largest priority; the smallest is its negative."""
MAX_INLINE_BYTES = 1024
"""The longest tensor that may travel inside the header."""
MAX_FRAME_BYTES = 1 << 30
"""The longest tensor: the receiver's libzmq drops the connection for a larger frame (`SocketOptions.max_frame_bytes`)."""
MAX_TENSORS = 64
"""Tensors of one request or result."""
MAX_RANK = 32
"""Dimensions of one tensor (NumPy 1 holds no more)."""
MAX_STRINGS = 1 << 16
"""Strings of one tensor of a request. To read or write so many, one by one, takes an event loop 10 to 20 ms."""
MAX_TEXT_BYTES = 8 << 20
"""Bytes of one `str` tensor of a request, lengths included. To see that so many are UTF-8 takes the event loop 10 ms."""
MAX_NAME_CHARACTERS = 512
"""Names of models, workers, software; codes."""
MAX_MESSAGE_CHARACTERS = 8192
"""Messages for humans. Senders cut longer ones."""
MAX_TAGS = 8
"""Tags of one request, unknown ones included."""
MAX_TAGS_CHARACTERS = 1024
"""Names and values of all tags of one request."""
MAX_REQUEST_ID_CHARACTERS = 128
"""The id that a user gives a request."""
MAX_CALLER_CHARACTERS = 128
"""The name that a gateway gives a caller: a token's name, or an address."""
MAX_TRACE_CHARACTERS = 512
"""`traceparent` and `tracestate`, each. W3C Trace Context asks for as much of `tracestate` to be passed on."""
MAX_PLAIN_ITEMS = 4096
"""Elements of one array or map of plain data, such as a signature or statistics."""
MAX_CLIENT_ITEMS = 1024
"""Elements of one array or map from a client, which sends no plain data. msgpack allocates an array when it reads its
head, in up to 1,024 levels: without this limit 1 KiB of heads asks for 32 MiB."""

MAX_CLIENT_PAIRS = 64
"""Elements of one map from a client. Its only maps are tags, one of an entry; one of more than `MAX_TAGS` fails alone."""
MAX_CLIENT_ENTRY_BYTES = 128 * 1024
"""One packed entry from a client. The longest request with all that it may have inside the header takes 86 KiB."""
MAX_WORKER_ITEMS = 65_536
"""Elements of all arrays and maps of one message from a worker, with `ITEMS_PER_ARRAY` and `ITEMS_PER_MAP` for each of
these. Whatever they are, they take the event loop less than 20 ms. A greeting with 64 models, and costs of 64 calls of
each, has 36,000."""
ITEMS_PER_ARRAY = 1
ITEMS_PER_MAP = 4
"""A map takes four times as long to read as an array, since its keys are checked."""
MAX_PLAIN_DEPTH = 32
"""Nesting of plain data; printing or comparing deeper data could exhaust the stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one kind of connection."""

    max_entries: int = 256
    """Entries in one message."""
    max_frames: int = 1024
    """Raw frames after the header frame."""
    max_header_bytes: int = 1024 * 1024
    """The header frame."""
    max_members: int = 0
    """Requests in one `Execute`, results in one `BatchDone`. 1,024 take the server's event loop 8 ms, and a call of so many
    has next to no overhead left that more could share."""
    preferred_message_bytes: int = 8 * 1024 * 1024
    """Senders start a new message when the raw frames would pass this, so that control entries overtake."""


CLIENT_LIMITS = Limits(preferred_message_bytes=1024 * 1024)
"""Between clients, which are not trusted, and the server. Messages are smaller here: for a client that does not read,
libzmq bounds its queue in messages, not in bytes."""
WORKER_LIMITS = Limits(max_frames=65_536, max_header_bytes=16 * 1024 * 1024, max_members=1024)
"""Between the server and its workers; one entry holds a whole batch."""
