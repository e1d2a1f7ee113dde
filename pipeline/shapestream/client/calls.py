"""The calls of a client, the same in all three faces: their arguments, errors and examples.

`async_face.Client` and `blocking_client.Client` implement them; editors and `help` show the docstrings of this file there.
The examples are for trio and asyncio. For the blocking face, leave out `await` and `async`.
"""

from __future__ import annotations

from typing import Any


class Calls:
    """The calls of a connected client. The faces give them their arguments and defaults."""

    def infer(self, *arguments: Any, **options: Any) -> Any:
        """Run a model on the inputs of one request, and return its outputs.

        Arguments:
            model: name of the model.
            inputs: arrays, lists or plain numbers by input name. Lists and plain numbers take the element type of the
                input. An array's type is changed only where nothing can be lost. Arrays of 64 KiB and more are not
                copied: leave them unchanged until the result is there.
            deadline: seconds from now, None for none. It covers all waiting, with or without a server.
            priority: requests of higher priority go first. An integer of at most 31 bits and a sign.
            request_id: your own id of the request, 1 to 128 printable ASCII characters.
            trace: the request's place in a trace: a mapping with `traceparent` and perhaps `tracestate`, such as the
                headers of an HTTP request. Without it the current OpenTelemetry span counts.
            caller: for whom a gateway asks, 1 to 128 printable ASCII characters. The server's fair shares count by this
                name instead of by the gateway, if its key has the role `gateways`; otherwise the name is ignored.

        Returns a `Result`: the outputs by name. A call that is cancelled, or interrupted by Ctrl-C, is cancelled at the
        server too.

        Raises:
            InvalidRequest: there is no such model, or the inputs do not fit its signature; then nothing is sent.
            DeadlineExceeded: the time is over.
            Cancelled: the client was closed meanwhile.
            RequestError: any other failure of the request; docs/client.md has the table.
            TypeError, ValueError: a name, deadline, priority, id or caller is wrong.
            RuntimeError: the call comes from another event loop than the client's, or from a forked child.

        Example:
            inputs = {"input_ids": np.array([[101, 2023, 102]]), "attention_mask": [[1, 1, 1]]}
            result = await client.infer("embeddings", inputs, deadline=5.0)
            print(result["embedding"].shape)
        """

    def stream(self, *arguments: Any, **options: Any) -> Any:
        """Run a model on every item of a source. Enter the stream, then iterate over its results.

        Arguments:
            model: name of the model.
            source: an iterable, pulled in a thread; or an async iterable, pulled in a task (not in the blocking face).
                Its items are `inputs`, as for `infer`, or `(key, inputs)`.
            max_in_flight: bound on the items under way: pulled, and their results not taken yet.
            ordered: results come in the order of the source; with False, as they are ready.
            on_error: "raise" ends the stream with the error of a failed item, in its place. "yield" gives a `Failed` in
                its place, and the stream goes on.
            deadline: seconds for each item, from when it was pulled; None for none.
            priority: as for `infer`.
            caller: as for `infer`.

        Gives a `Result` per item, with the item's `key`. Leaving the block withdraws unfinished items. An error of the
        source is raised after the results of earlier items.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: the stream is entered in another event loop than the client's, or in a forked child.

        Example:
            images = [{"image": np.zeros((1, 1, 24, width), np.float32)} for width in (32, 40, 48)]
            async with client.stream("detector", images, max_in_flight=2) as results:
                async for result in results:
                    print(result.key, result["peaks"].shape)
        """

    def signature(self, *arguments: Any, **options: Any) -> Any:
        """Return the inputs and outputs of a model (`ModelSignature`). The server is asked once per model.

        Arguments:
            model: name of the model.
            deadline: seconds from now, None for none.

        Raises:
            InvalidRequest: there is no such model.
            DeadlineExceeded: the time is over.
            RequestError, TypeError, ValueError, RuntimeError: as for `infer`.

        Example:
            signature = await client.signature("embeddings")
            print([port.name for port in signature.inputs])
        """

    def statistics(self, *arguments: Any, **options: Any) -> Any:
        """Return the server's counters, as plain data.

        Arguments:
            deadline: seconds from now, None for none.

        Raises:
            DeadlineExceeded: the time is over.
            RequestError, RuntimeError: as for `infer`.

        Example:
            print(await client.statistics())
        """

    def stories(self, *arguments: Any, **options: Any) -> Any:
        """Return the stories of requests, as a list of plain data: when each one waited, and where it ran.

        Arguments:
            request_id: id of the requests; None for the slowest of late.
            slowest: number of the slowest requests, where there is no id.
            deadline: seconds from now, None for none.

        Raises:
            InvalidRequest: the server remembers nothing of this id, or nothing that this client's key may see.
            DeadlineExceeded: the time is over.
            RequestError, TypeError, ValueError, RuntimeError: as for `infer`.

        Example:
            for story in await client.stories(slowest=3):
                print(story)
        """

    def acknowledge_audit(self, *arguments: Any, **options: Any) -> Any:
        """Let the requests of a model share calls again, after an audit stopped that. Returns the server's counters.

        The server ignores this from a key without the role `admin`. Errors are those of `statistics`.

        Arguments:
            model: name of the model.
            deadline: seconds from now, None for none.
        """
