"""The server: from a client's request to its answer.

`client_port` reads the clients' messages. `dispatcher` tells the scheduler of each event and carries its actions out.
`slot_threads` run batches. `worker_port` and `local_port` read the slots' reports. `egress` answers clients. `server` makes
and runs all of these; docs/architecture.md lists every file.
"""
