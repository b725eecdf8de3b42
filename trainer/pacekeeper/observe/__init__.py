"""What a rank does, seen from within: records in a ring, and windows of steps made of them."""
