"""Which gradients travel together, when and how. The aim: the backward ends soonest (LIBRA)."""
