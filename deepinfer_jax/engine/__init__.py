"""Execution of requests: compiled steps, and the loop that feeds them."""
