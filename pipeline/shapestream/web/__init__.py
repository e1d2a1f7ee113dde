"""An HTTP/1.1 server on trio, for the gateway and the admin port: connections and their limits, requests, answers."""
