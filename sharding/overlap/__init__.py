"""Which gradients travel together, when and how, so that the backward ends soonest (LIBRA)."""
