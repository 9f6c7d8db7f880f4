"""Times of lookups and collectives on a machine: models, and the profile that holds them."""
