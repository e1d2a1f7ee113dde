"""The server: from a client's request to its answer.

`client_port` reads, checks and keeps the sessions, `dispatcher` asks the scheduler and carries out,
`slot_threads` are slots, `workers` is what is known of them, `worker_port` and `local_port` read what they send, `egress`
answers; `server` puts them together.
"""
