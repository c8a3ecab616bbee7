"""Small models used only by tests."""
