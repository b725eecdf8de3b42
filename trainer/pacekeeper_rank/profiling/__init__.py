"""What a rank samples of itself in a profile window. It is imported once a window is requested in a watched rank."""
