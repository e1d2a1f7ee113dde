"""The server: from a client's request to its answer.

`client_port` reads, checks and keeps the sessions, `dispatcher` asks the scheduler and carries out,
`local_executor` and `remote_executor` are the ways to slots, `worker_port` keeps the workers, `egress` answers;
`server` puts them together.
"""
