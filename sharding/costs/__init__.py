"""What a machine takes for lookups and collectives: models, and the profile that holds them."""
