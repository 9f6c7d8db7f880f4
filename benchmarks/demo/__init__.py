"""The demo of `make demo`: a DLRM under delays, by TorchRec and by bounded-lag sharders."""
