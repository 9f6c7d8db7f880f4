"""What quantized collectives cost a DLRM in accuracy."""
