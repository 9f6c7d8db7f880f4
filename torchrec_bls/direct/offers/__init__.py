"""Tables handed over to processes that come later."""
