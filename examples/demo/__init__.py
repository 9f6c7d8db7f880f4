"""Parts of the DLRM demo, ``examples/dlrm_demo.py``."""
