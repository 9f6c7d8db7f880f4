"""All-to-alls alone: the channel and the backend beside Open MPI and gloo."""
