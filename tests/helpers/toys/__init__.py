"""Small models that only tests have."""
