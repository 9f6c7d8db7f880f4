"""The study of quantized collectives: its trainer, its data and its records."""
