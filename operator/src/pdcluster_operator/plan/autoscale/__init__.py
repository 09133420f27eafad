"""How many workers each pool should have, from what was scraped: pure, both roles in one decision, every step explained."""
