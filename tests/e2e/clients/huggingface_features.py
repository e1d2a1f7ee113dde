"""What huggingface_hub's client can ask of TEI's endpoints, as JSON: huggingface_features.py HOST:PORT."""

import json
import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

TEXTS = json.load(sys.stdin)
server = f"http://{sys.argv[1]}"
# The server's root, and the page itself.
root, page = InferenceClient(base_url=server), InferenceClient(model=f"{server}/embed")
endpoint = InferenceClient(model=server, provider="hf-inference")
try:
    refused = page.feature_extraction(TEXTS, prompt_name="query").tolist()
except HfHubHTTPError as error:
    refused = [error.response.status_code, error.response.json()]
print(
    json.dumps(
        {
            "root": root.feature_extraction(TEXTS).tolist(),
            "page": page.feature_extraction(TEXTS, truncate=True).tolist(),
            "one": page.feature_extraction(TEXTS[0]).tolist(),
            "as_they_are": page.feature_extraction(TEXTS, normalize=False).tolist(),
            "cut": page.feature_extraction(TEXTS, dimensions=3).tolist(),
            "refused": refused,
            "healthy": endpoint.health_check(),
            "info": endpoint.get_endpoint_info(),
        }
    )
)
