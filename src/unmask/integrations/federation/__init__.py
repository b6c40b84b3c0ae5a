"""What each client's update gives away, whatever framework carries it; Flower and NVFlare have doors of their own."""
