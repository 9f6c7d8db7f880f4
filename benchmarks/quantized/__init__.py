"""The study of quantized collectives: what they cost a DLRM in accuracy."""
