"""The gateway: a client of the server that speaks the Open Inference Protocol, version 2, to the clients of others."""
