"""The facts that the doctor reads on a host, and its findings about them."""
