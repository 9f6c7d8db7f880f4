"""Imported last by the server from which tests' ranks are forked.

Without it each full collection of garbage in a rank would walk through all that the server has
imported, half a second long, and copy its pages.
"""

import gc

gc.freeze()
