"""TorchRec's sharded embedding modules with bounded-lag exchanges."""
