"""What a host has for the channel. Nothing here imports torch or the rest of the package, but for
the processes of the self-test: it has to work where they don't."""
