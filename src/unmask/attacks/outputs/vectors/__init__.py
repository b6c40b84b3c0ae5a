"""What one vector for a whole text gives away."""
