#!/bin/sh
# Sorts two rows, as JSON. curl.sh [HOST:PORT]
set -eu
curl --silent --show-error --fail-with-body "http://${1:-127.0.0.1:8000}/v2/models/sort/infer" --data '{
  "inputs": [{"name": "a", "datatype": "FP32", "shape": [2, 3], "data": [3.5, 1, 2, -1, 7, 0.25]}]
}'
