"""Sorts rows, and finds what is not zero, by PyTriton's ModelClient over HTTP: pytriton_http.py [HOST:PORT]."""

import sys

import numpy as np
from pytriton.client import ModelClient

server = f"http://{sys.argv[1] if len(sys.argv) > 1 else '127.0.0.1:8000'}"

with ModelClient(server, "sort") as client:
    rows = np.array([[3.5, 1, 2], [-1, 7, 0.25]], np.float32)
    print(client.infer_batch(rows)["sorted"])
    print(client.infer_sample(rows[0])["sorted"])
with ModelClient(server, "nonzero") as client:
    picture = np.zeros((4, 5), np.float32)
    picture[1, 2] = picture[3, 4] = 1
    print(client.infer_sample(a=picture)["places"])
