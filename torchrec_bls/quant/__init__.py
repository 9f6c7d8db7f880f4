"""TorchRec's quantized embedding modules, sharded over processes."""
