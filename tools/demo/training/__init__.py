"""Training of the demo model: forward passes that can be differentiated, losses, optimiser, weight files."""
