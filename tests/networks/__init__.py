"""Networks that the tests run: two published ones and one trained for this project."""
