"""An endpoint of a model: requests over HTTP and gRPC, each answered by its deadline or refused."""
